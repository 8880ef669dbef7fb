r"""Writing results so that they can be trusted later: atomically, and with their provenance.

Every file of a run folder goes through :func:`atomic_path`: it is written next to its final place
under a temporary name, flushed to the disk and renamed. A reader, or a run that was killed, sees
the old file or the new one, never half of one.

A :class:`RunRecord` is what has to be known to repeat a run or to doubt it. JSON has no NaN and
no infinity, so neither is ever written: :func:`write_json_atomic` refuses them by their key.
"""

__all__ = [
    "RunRecord",
    "atomic_path",
    "command_line",
    "git_commit",
    "library_versions",
    "platform_summary",
    "write_json_atomic",
    "write_text_atomic",
]

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ood_osdre import __version__
from ood_osdre.errors import UserError

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    r"""Gives a temporary path that becomes `path` if the block succeeds and vanishes if not.

    The temporary file lies in the folder of `path`, which is created if needed, and has its
    suffix. Symbolic links are followed.

    Arguments:
        path: The file to create or replace.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with atomic_path(f"{folder}/run/log.txt") as temporary:
        ...         size = temporary.write_text("done")
        ...     [path.name for path in Path(folder, "run").iterdir()]
        ['log.txt']
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Unlike tempfile, respects the umask
        temporary.touch(exist_ok=False)

        try:
            yield temporary
            _flush(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

        _flush(target.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    r"""Writes a text file, in UTF-8, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json_atomic(path: str | os.PathLike[str], obj: object) -> None:
    r"""Writes a JSON file atomically.

    Mappings, sequences, dataclasses, paths (as they were given) and NumPy scalars and arrays are
    accepted.

    Arguments:
        path: The file to create or replace.
        obj: What to write.

    Raises:
        UserError: If a number is NaN or infinite, or if a value has no JSON form; the message
            holds its key. Nothing is written.
    """
    try:
        plain = _plain(obj, "")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None

    write_text_atomic(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


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
    command: Sequence[str] = field(default_factory=lambda: command_line())
    data: Mapping[str, Any] = field(default_factory=dict)
    absent: Sequence[str] = ()
    selection: str | None = None
    validation: Mapping[str, Any] = field(default_factory=dict)
    train_seconds: float | None = None
    score_seconds: float | None = None
    commit: Mapping[str, Any] | None = field(default_factory=lambda: git_commit())
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions())
    platform: Mapping[str, Any] = field(default_factory=lambda: platform_summary())
    created: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )

    def write(self, path: str | os.PathLike[str]) -> None:
        r"""Writes the record as JSON, atomically."""
        write_json_atomic(path, self)


def command_line() -> list[str]:
    r"""Reads the command line as it was given.

    Python expands the program's name to a full path for `-m` and console scripts. It was not
    given by the user, so only its last part is kept.
    """
    program, *arguments = sys.argv or [""]

    return [os.path.basename(program) if os.path.isabs(program) else program, *arguments]


def git_commit(folder: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
    r"""Asks git which commit a source folder is at.

    Arguments:
        folder: The folder; this package's by default.

    Returns:
        The `revision`, and whether tracked files are `dirty`; None if git does not track the
        folder, as for a package that is merely installed below somebody's repository.
    """
    folder = Path(__file__).parent if folder is None else Path(folder)
    # In a git hook, these point to another repository
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
            "dirty": git("status", "--porcelain", "--untracked-files=no") != "",
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


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return

    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)

    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _plain(obj: object, key: str) -> object:
    r"""Converts to what JSON has, or names the key that it cannot hold."""
    if obj is None or isinstance(obj, str | bool | int):
        return obj
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise ValueError(f"'{key}' is {obj}, expected a finite number")
        return float(obj)
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, np.generic | np.ndarray):
        return _plain(obj.tolist(), key)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [f.name for f in dataclasses.fields(obj)]
        return _plain({name: getattr(obj, name) for name in names}, key)
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return _plain(obj._asdict(), key)
    if isinstance(obj, Mapping):
        return {_name(k, key): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, bytes | bytearray):
        return [_plain(v, f"{key}[{i}]") for i, v in enumerate(obj)]

    raise ValueError(f"'{key}' is a {type(obj).__name__}, which JSON cannot hold")


def _name(name: object, key: str) -> str:
    if isinstance(name, str | int) and not isinstance(name, bool):
        return str(name)

    raise ValueError(f"'{key}' has the key {name!r}, expected a string")
