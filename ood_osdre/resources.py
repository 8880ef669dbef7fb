r"""Where the YAML files live: configs and data manifests, in a clone or in an installed package.

In a clone they lie in the top-level folders `configs/` and `data_manifests/`, next to the
package; a wheel carries copies of both as package data. Commands name a file either by its name
without `.yml` or by a path. The clone wins, so that an edited file is the one that is read.
"""

__all__ = ["KINDS", "find", "names"]

import os
from pathlib import Path

from .errors import UserError, did_you_mean

KINDS = ("configs", "data_manifests")
SUFFIXES = (".yml", ".yaml")
PACKAGE = Path(__file__).resolve().parent


def folders(kind: str) -> list[Path]:
    r"""Returns the folders that may hold files of a kind, the preferred one first."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {kind!r}")

    candidates = (PACKAGE.parent / kind, PACKAGE / f"_{kind}")
    # A site-packages folder may hold a stranger's `configs/`; only a clone has a setup file.
    is_clone = any((PACKAGE.parent / f).is_file() for f in ("setup.cfg", "pyproject.toml"))

    return [c for c in (candidates if is_clone else candidates[1:]) if c.is_dir()]


def names(kind: str) -> list[str]:
    r"""Returns the names, without suffix, that :func:`find` knows.

    Arguments:
        kind: `"configs"` or `"data_manifests"`.
    """
    return sorted({p.stem for f in folders(kind) for p in f.iterdir() if p.suffix in SUFFIXES})


def find(kind: str, name: str) -> Path:
    r"""Finds a file by its name without suffix, or by its path.

    Arguments:
        kind: `"configs"` or `"data_manifests"`.
        name: A known name, or the path of any file; a name wins over a file of the same name.
    """
    for folder in folders(kind):
        for suffix in SUFFIXES:
            if name == Path(name).name and (folder / f"{name}{suffix}").is_file():
                return folder / f"{name}{suffix}"

    if os.path.isfile(name):  # false, too, for a name that no file can have
        return Path(name)

    known = names(kind)
    raise UserError(
        f"{kind}: no file and no known name {name!r}{did_you_mean(name, known)}; "
        f"known: {', '.join(known) or 'none'}"
    )
