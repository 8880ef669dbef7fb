r"""The record of a run: what has to be known to repeat it or to doubt it.

Nothing here imports torch, so the command reads a record at once.
"""

__all__ = [
    "FinishedRun",
    "RunRecord",
    "command_line",
    "facts_of",
    "git_commit",
    "identity",
    "library_versions",
    "platform_summary",
    "read_entries",
    "read_record",
    "sets_of",
]

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import AliasPath, BaseModel, Field, ValidationError

from .. import __version__
from ..errors import UserError, one_line
from ..files import write_json_atomic
from ..options import explain

if TYPE_CHECKING:
    from ..data import BenchmarkData, ImageSet

# Where code and configurations of the clone are, as git names files.
CODE = ("*.py", ":/benchmarks/*.py", ":/configs/*.yml", ":/data_manifests/*.yml")
LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow")


def command_line() -> list[str]:
    r"""Reads the command line as it was given.

    Python expands the program's name to a full path for `-m` and console scripts. Of `-m` the
    module is put back; else the path was not given by the user, and only its last part is kept.
    """
    program, *arguments = sys.argv or [""]
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and getattr(main, "__file__", None) == program:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *arguments]
    return [os.path.basename(program) if os.path.isabs(program) else program, *arguments]


def git_commit(folder: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
    r"""Asks git which commit a source folder is at.

    Arguments:
        folder: The folder; this package's by default.

    Returns:
        The `revision`, and whether the clone is `dirty`: code or a configuration is changed, or
        not known to git. Results that a run has just written count for nothing. None if git does
        not track the folder, as for a package that is merely installed below somebody's
        repository.
    """
    folder = Path(__file__).parent if folder is None else Path(folder)
    # In a git hook, these point to another repository.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", os.fspath(folder), *args],
            capture_output=True,
            check=True,
            env=env,
            text=True,
            timeout=20,
        ).stdout.strip()

    try:
        if not git("ls-files", "."):
            return None
        return {
            "revision": git("rev-parse", "HEAD"),
            "dirty": git("status", "--porcelain", "--untracked-files=no", "--", *CODE) != ""
            or git("ls-files", "--others", "--exclude-standard", *CODE) != "",
        }
    except (OSError, subprocess.SubprocessError):
        return None


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    r"""Looks up the versions of this package, Python and those of `names` that are installed."""
    versions = {"ood_osdre": __version__, "python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def platform_summary() -> dict[str, Any]:
    r"""Describes the machine, without its name or any path."""
    processor = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
        processor = models[0].strip() if models else processor
    except OSError:
        pass
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor,
        "cores": os.cpu_count(),
    }


@dataclass
class RunRecord:
    r"""The provenance of a run, written as `run.json`.

    Attributes:
        config: The resolved configuration.
        seed: The seed of the run.
        benchmark: The name of the benchmark.
        device: The name of the device, such as a GPU's.
        command: The command line, paths kept as given (see :func:`command_line`).
        data: For each set, what identifies its content: a checksum, a count.
        absent: The sets of the benchmark that were not found.
        selection: How the reported checkpoint was selected, and on which data.
        validation: A summary of the validation history.
        results: What a benchmark measured, where it is no table of its own.
        train_seconds: The training time, in seconds; None if nothing was trained.
        score_seconds: The scoring time, in seconds.
        commit: The commit of the clone; None outside of one (see :func:`git_commit`).
        versions: The versions of the libraries.
        platform: The machine.
        created: The time at which the record was created, in UTC.
    """

    config: Mapping[str, Any]
    seed: int | None = None
    benchmark: str | None = None
    device: str | None = None
    command: Sequence[str] = field(default_factory=command_line)
    data: Mapping[str, Any] = field(default_factory=dict)
    absent: Sequence[str] = ()
    selection: str | None = None
    validation: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    train_seconds: float | None = None
    score_seconds: float | None = None
    commit: Mapping[str, Any] | None = field(default_factory=git_commit)
    versions: Mapping[str, str] = field(default_factory=library_versions)
    platform: Mapping[str, Any] = field(default_factory=platform_summary)
    created: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )

    def write(self, path: str | os.PathLike[str]) -> None:
        r"""Writes the record as JSON, atomically."""
        write_json_atomic(path, self)


class FinishedRun(BaseModel):
    r"""The entries of a record that a reader of a finished run relies on, see :class:`RunRecord`."""

    config: dict[str, Any]
    benchmark: str
    data: dict[str, Any]
    reference: str | None = Field(validation_alias=AliasPath("data", "reference"))
    absent: list[str]
    selection: str
    accuracy: float | None = Field(validation_alias=AliasPath("results", "accuracy"))
    parameters: int = Field(validation_alias=AliasPath("results", "parameters"))
    score_seconds: float


class _Given(BaseModel):
    set: str
    given: str
    use: str
    count: int


class _Data(BaseModel):
    counts: dict[str, int] = {}
    checksums: dict[str, Any] = {}
    given: list[_Given] = []


class _Validation(BaseModel):
    best: dict[str, float | None] = {}
    history: list[dict[str, Any]] = []


class _Results(BaseModel):
    parameters: int | None = None


class _Commit(BaseModel):
    revision: str = ""
    dirty: bool = False


class DrawnRun(BaseModel):
    r"""The entries of a record that a page shows, of which a record may lack any."""

    config: dict[str, Any] = {}
    seed: int | None = None
    benchmark: str | None = None
    device: str | None = None
    command: list[Any] = []
    data: _Data = _Data()
    selection: str | None = None
    validation: _Validation = _Validation()
    results: _Results = _Results()
    train_seconds: float | None = None
    score_seconds: float | None = None
    commit: _Commit | None = None
    versions: dict[str, Any] = {}
    platform: dict[str, Any] = {}
    created: str = ""


Entries = TypeVar("Entries", bound=BaseModel)


def read_record(path: str | os.PathLike[str]) -> FinishedRun:
    r"""Reads the record of a finished run, which :meth:`RunRecord.write` wrote.

    Raises:
        UserError: If the file cannot be read or is no such record.
    """
    return _read(path, FinishedRun)[1]


def read_entries(path: str | os.PathLike[str]) -> dict[str, Any]:
    r"""Reads what a record has, as it was written; :class:`DrawnRun` says of which types.

    Raises:
        UserError: If the file cannot be read or is no such record.
    """
    return _read(path, DrawnRun)[0]


def _read(path: str | os.PathLike[str], entries: type[Entries]) -> tuple[dict[str, Any], Entries]:
    try:
        content = json.loads(Path(path).read_bytes())
        return content, entries.model_validate(content, strict=True)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            reason = explain(error, entries, "an entry")
        else:
            reason = one_line(error, 80)
        raise UserError(f"{path}: not a run record ({reason})") from None


def identity(data: "BenchmarkData", trained: bool = False) -> dict[str, dict[str, str]]:
    r"""Returns what tells data from other data: checksums of lists, and of some pixels.

    Arguments:
        data: The benchmark.
        trained: Whether only what training sees counts; no near or far set is then read.
    """
    sets = {
        "id_train": data.id_train,
        "id_val": data.id_val,
        "id_test": data.id_test,
        "reference": data.reference,
    }
    checksums = dict(data.checksums)
    if trained:
        checksums = {k: v for k, v in checksums.items() if not k.startswith(("near", "far"))}
    else:
        sets |= {f"near/{name}": images for name, images in data.near.items()}
        sets |= {f"far/{name}": images for name, images in data.far.items()}
    return {
        "checksums": checksums,
        "pixels": {name: _pixels(images) for name, images in sets.items() if len(images)},
    }


def _pixels(images: "ImageSet") -> str:
    r"""Returns a SHA-256 of evenly spaced images, enough to notice another folder of files."""
    step = max(1, len(images) // 500)
    return hashlib.sha256(np.ascontiguousarray(images.images[::step]).data).hexdigest()


def facts_of(record: Mapping[str, Any], seeds: Sequence[int | None]) -> dict[str, str]:
    r"""Returns what has to be known to repeat a run, in words.

    Arguments:
        record: The record of the run, or of one of several.
        seeds: The seeds of all of them, None where it is not known.
    """
    commit, results = record.get("commit") or {}, record.get("results", {})
    facts = {
        "seed": ", ".join(str(seed) for seed in seeds if seed is not None),
        "commit": commit.get("revision", "") + (" with changes" if commit.get("dirty") else ""),
        "command": shlex.join(map(str, record.get("command", []))),
        "created": record.get("created", ""),
        "device": record.get("device"),
        "training": _seconds(record.get("train_seconds")),
        "scoring": _seconds(record.get("score_seconds")),
        "parameters": f"{results['parameters']:,}" if results.get("parameters") else "",
        "selection": record.get("selection"),
        "versions": ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items()),
        "machine": ", ".join(
            f"{v} cores" if k == "cores" else f"{v}"
            for k, v in record.get("platform", {}).items()
            if v
        ),
    }
    return {key: value for key, value in facts.items() if value}


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} s"


def sets_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    r"""Returns the role, name, count and checksum of each set that the record names."""
    data = record.get("data", {})
    counts, rows = data.get("counts", {}), []
    for key, checksum in data.get("checksums", {}).items():
        role, _, name = key.partition("/")
        count = counts.get(f"{name}_test" if role == "id_test" else name)
        if role not in ("id_test", "near", "far"):
            count = None  # a set that is trained on may have a scored one's name
        rows.append({"role": role, "name": name, "count": count, "checksum": str(checksum)})
    return rows
