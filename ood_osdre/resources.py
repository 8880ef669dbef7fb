r"""The YAML files: configurations and data manifests, where they are and how they are read.

In a clone they lie in the top-level folders `configs/` and `data_manifests/`, next to the
package; a wheel carries copies of both as package data. Commands name a file either by its name
without `.yml` or by a path. The clone wins, so that an edited file is the one that is read.
"""

__all__ = ["KINDS", "find", "folders", "names", "parse_yaml", "read_yaml"]

import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from .errors import UserError, did_you_mean

KINDS = ("configs", "data_manifests")
# What YAML may hold.
Value: TypeAlias = Any
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


def read_yaml(path: Path) -> Value:
    r"""Returns what a YAML file says, see :func:`parse_yaml`.

    Arguments:
        path: The file.

    Raises:
        UserError: If it cannot be read, or is no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8.") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Value:
    r"""Returns what a YAML text says, with `1e-3` a number and repeated keys refused.

    Arguments:
        text: The text.
        source: The file to name in messages.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UserError(f"{source}: not valid YAML: it is nested too deep.") from None
    except (ValueError, TypeError) as error:  # impossible dates, lists as keys
        raise UserError(f"{source}: not valid YAML: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}: not valid YAML: {problem}.") from None


class _Loader(yaml.SafeLoader):
    r"""A safe loader with two habits of YAML 1.1 mended."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3, without a dot, as text. Integers match an earlier resolver.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)
