r"""The command `python -m ood_osdre.data check`: what of a benchmark is on disk.

It prints one row a set: its role, name, state, the images found and expected, and the exact path
of its list. By default an image counts if its file exists and is not empty; `--decode` opens
every one. The exit status is 0 if the benchmark can run: the ID sets, a reference and at least
one near or far set are present. It is 1 if it cannot, and 2 for a mistake in the command.
"""

__all__ = ["check", "main"]

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import UserError, exit_status
from .digits import load_digits_sets
from .images import decode_all
from .manifests import BENCHMARKS, Manifest, SetSpec, benchmark_names, load_manifest
from .status import SetStatus, can_run, find_reference, inspect, runnable

COLUMNS = ("role", "set", "state", "found", "expected", "path")


def main(arguments: Sequence[str] | None = None) -> int:
    r"""Runs the command line and returns its exit status."""
    args = parser().parse_args(arguments)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Checks the sets of a benchmark, getting what lacks if asked to, and prints the report."""
    benchmark = args.benchmark or BENCHMARKS.get(args.id, "openood")
    manifest = load_manifest(benchmark, args.id)
    statuses = check(manifest, args.data_root, args.reference)
    if args.download:
        download_lacking(manifest, statuses, args.data_root, args.mirror)
        statuses = check(manifest, args.data_root, args.reference)
    if args.decode:
        statuses = [decoded(s, manifest.size) for s in statuses]

    print(report(manifest, statuses, args.verbose))
    if not can_run(statuses) and (others := runnable(manifest.id_name, args.data_root)):
        print(f"What is there suffices for --benchmark {' or '.join(others)}.")
    return 0 if can_run(statuses) else 1


def parser() -> argparse.ArgumentParser:
    r"""Returns the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m ood_osdre.data", description="Benchmark data.")
    commands = top.add_subparsers(dest="command", required=True)

    p = commands.add_parser("check", help="list the sets of a benchmark and what is on disk")
    p.add_argument("--id", required=True, help=f"ID data set: {', '.join(BENCHMARKS)}")
    known = ", ".join(benchmark_names())
    p.add_argument("--benchmark", help=f"manifest, by name ({known}) or by path")
    p.add_argument("--data-root", type=Path, default=Path("data"), help="default: ./data")
    p.add_argument("--reference", help="name of a reference, or a folder, list or .npy array")
    p.add_argument("--download", action="store_true", help="fetch what torchvision can fetch")
    p.add_argument("--mirror", help="URL of a folder with the archives, for --download")
    p.add_argument("--decode", action="store_true", help="open every image (takes minutes)")
    p.add_argument("--verbose", action="store_true", help="sources, licences and notes")

    return top


def check(manifest: Manifest, data_root: Path, reference: str | None = None) -> list[SetStatus]:
    r"""Returns the state of every set of a benchmark.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        reference: The reference, if it is to be another than those of the manifest.
    """
    if manifest.is_embedded:
        return embedded(manifest)

    sets = [s for s in manifest.sets if reference is None or s.role != "reference"]
    statuses = [inspect(manifest, spec, data_root) for spec in sets]
    if reference is not None:
        statuses.append(find_reference(manifest, data_root, reference))

    return statuses


def embedded(manifest: Manifest) -> list[SetStatus]:
    r"""Returns the state of an embedded benchmark: all of it is there."""
    sizes = {key: len(images) for key, images in load_digits_sets().items()}
    here = Path("(embedded)")
    return [
        SetStatus(s, "present", sizes[s.role, s.name], sizes[s.role, s.name], here, here)
        for s in manifest.sets
    ]


def download_lacking(
    manifest: Manifest, statuses: Sequence[SetStatus], data_root: Path, mirror: str | None
) -> None:
    r"""Downloads the sets that are not present, where torchvision has them."""
    from .download import download

    for status in statuses:
        if not status.present and status.spec.download is not None:
            download(manifest, status.spec, data_root, mirror)


def decoded(status: SetStatus, size: int) -> SetStatus:
    r"""Returns the state of a set after opening each of its images."""
    if not status.present or status.list is None:
        return status
    try:
        paths = [status.images / name for name in status.list.names]
        decode_all(paths, size, f"{status.spec.role} {status.spec.name}")
    except UserError as error:
        return replace(status, state="corrupt", detail=str(error))
    return status


def report(manifest: Manifest, statuses: Sequence[SetStatus], verbose: bool = False) -> str:
    r"""Returns the table, what is wrong with each set, and how to get the data."""
    rows = [COLUMNS, *(row(s) for s in statuses)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS) - 1)]
    right = (3, 4)
    lines = [f"{manifest.title}, ID {manifest.id_name}", ""]
    for r in rows:
        cells = [
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(r[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*cells, r[-1]]))

    lines.append("")
    for s in statuses:
        if not s.present:
            lines.append(f"{s.spec.role} {s.spec.name}: {s.detail}")
        if verbose:
            lines += about(s.spec)

    complete = all(s.present for s in statuses if s.spec.role in ("near", "far"))
    if not can_run(statuses):
        lines += ["The benchmark cannot run on this.", f"How to get it: {manifest.get}"]
    elif complete:
        lines.append("The benchmark can run; every near and far set is present.")
    else:
        lines.append("The benchmark can run on the near and far sets that are present.")

    return "\n".join(lines)


def row(status: SetStatus) -> tuple[str, ...]:
    r"""Returns the cells of a set."""
    expected = "?" if status.expected is None else str(status.expected)
    where = str(status.path if status.path.name == "(embedded)" else os.path.realpath(status.path))
    return (status.spec.role, status.spec.name, status.state, str(status.found), expected, where)


def about(spec: SetSpec) -> list[str]:
    r"""Returns lines on the source, licence and particulars of a set."""
    known = {"source": spec.source, "licence": spec.licence, "note": spec.note}
    head = f"{spec.role} {spec.name}"
    return [f"{head}: {key}: {value}" for key, value in known.items() if value]


if __name__ == "__main__":
    sys.exit(main())
