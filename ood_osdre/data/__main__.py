r"""The command `python -m ood_osdre.data check`: what of a benchmark is on disk.

It prints one row a set: its role, name, state, the images found and expected, and the exact path
of its list. By default an image counts if its file exists and is not empty; `--decode` opens
every one. Decoded images that earlier runs have kept (`--cache-dir`) are compared with their
checksums, which a run does for small sets alone; what is damaged is removed. The exit status is 0
if the benchmark can run: the ID sets, a reference and at least one near or far set are present. It
is 1 if it cannot, and 2 for a mistake in the command.
"""

__all__ = ["check", "main"]

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from ..errors import Parser, UserError, exit_status
from ..files import local
from .benchmark import CACHE
from .builtin import load_digits_sets
from .images import cache_folders, check_cache, decode_all
from .manifests import BENCHMARKS, Manifest, benchmark_names, check_id, load_manifest
from .status import SetStatus, can_run, find_reference, inspect, lacking, runnable

PROG = "python -m ood_osdre.data"
EPILOG = """\
examples:
  {prog} check --id cifar10 --data-root ./data
  {prog} check --id cifar10 --benchmark pack --decode
  {prog} check --id flowers --benchmark flowers.yml
"""


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    r"""Runs the command line and returns its exit status."""
    args = _parser(prog).parse_args(arguments)
    return exit_status(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    r"""Checks the sets of a benchmark, getting what lacks if asked to, and prints the report."""
    if not args.benchmark:
        check_id(args.id)
    known = (args.benchmark,) if args.benchmark else BENCHMARKS[args.id]
    manifests = [load_manifest(name, args.id) for name in known]
    # Of several, the one that the command would take; if it would take none, the first.
    is_whole = [len(known) == 1 or not lacking(m, args.data_root) for m in manifests]
    manifest = manifests[is_whole.index(True) if any(is_whole) else 0]
    statuses = check(manifest, args.data_root, args.reference)
    if args.download:
        from .download import download

        for status in statuses:
            if not status.present and status.spec.download is not None:
                download(manifest, status.spec, args.data_root, args.mirror)
        statuses = check(manifest, args.data_root, args.reference)
    if args.decode:
        statuses = [_decoded(s, manifest.size) for s in statuses]

    print("\n".join(_report(manifest, statuses, args.verbose)))
    for folder in cache_folders(args.cache_dir or args.data_root / CACHE):
        for path in check_cache(folder):
            print(f"{path}: damaged and removed; the next run decodes it again")
    if can_run(statuses):
        return 0
    if others := runnable(manifest.id_name, args.data_root):
        print(f"What is there suffices for --benchmark {' or '.join(others)}.")
    return 1


def _parser(prog: str) -> argparse.ArgumentParser:
    epilog = EPILOG.format(prog=prog)
    top = Parser(prog=prog, description="Benchmark data.", epilog=epilog)
    commands = top.add_subparsers(dest="command", required=True)

    known = "list the sets of a benchmark and what is on disk"
    p = commands.add_parser("check", help=known, epilog=epilog)
    known = ", ".join(BENCHMARKS)
    p.add_argument("--id", required=True, help=f"ID data set: {known}, or one of --benchmark FILE")
    known = ", ".join(benchmark_names())
    p.add_argument("--benchmark", help=f"manifest, by name ({known}) or by path")
    p.add_argument("--data-root", type=local, default=Path("data"), help="default: ./data")
    p.add_argument("--cache-dir", type=local, help="decoded images (default: in data root)")
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
        sizes = {key: len(images) for key, images in load_digits_sets().items()}
        counts = [sizes[s.role, s.name] for s in manifest.sets]
        here = Path("(embedded)")
        return [
            SetStatus(s, "present", n, n, here, here)
            for s, n in zip(manifest.sets, counts, strict=True)
        ]
    sets = [s for s in manifest.sets if reference is None or s.role != "reference"]
    statuses = [inspect(manifest, spec, data_root) for spec in sets]
    if reference is not None:
        statuses.append(find_reference(manifest, data_root, reference))
    return statuses


def _decoded(status: SetStatus, size: int) -> SetStatus:
    r"""Returns the state of a set after opening each of its images."""
    if not status.present or status.list is None:
        return status
    try:
        paths = [status.images / n for n in status.list.names]
        decode_all(paths, size, str(status.spec), sys.stderr.isatty(), keep=False)
    except UserError as error:
        return replace(status, state="corrupt", detail=str(error))
    return status


def _report(
    manifest: Manifest, statuses: Sequence[SetStatus], verbose: bool = False
) -> Iterator[str]:
    r"""Yields the table, what is wrong with each set, and how to get the data."""
    yield f"{manifest.title}, ID {manifest.id_name}\n"
    columns = ("role", "set", "state", "found", "expected", "path")
    rows = [
        (
            s.spec.role,
            s.spec.name,
            s.state,
            s.found,
            "?" if s.expected is None else s.expected,
            s.path if s.spec.list is None else os.path.realpath(s.path),
        )
        for s in statuses
    ]
    align = ("left", "left", "left", "right", "right", "left")
    yield tabulate(rows, columns, "plain", disable_numparse=True, colalign=align) + "\n"
    for s in statuses:
        if not s.present:
            yield f"{s.spec}: {s.detail}"
        if verbose:
            origin = manifest.datasets.get(s.spec.dataset or "")
            about = {**(origin.to_dict() if origin else {}), "note": s.spec.note}
            yield from (f"{s.spec}: {key}: {value}" for key, value in about.items() if value)

    if not can_run(statuses):
        yield "The benchmark cannot run on this."
        yield f"How to get it: {manifest.get}"
    elif all(s.present for s in statuses if s.spec.role in ("near", "far")):
        yield "The benchmark can run; every near and far set is present."
    else:
        yield "The benchmark can run on the near and far sets that are present."


if __name__ == "__main__":
    sys.exit(main())
