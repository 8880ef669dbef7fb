r"""The YAML files: where configurations and data manifests are, and how they are read.

In a clone they are in the top-level folders `configs/` and `data_manifests/`, beside the package;
a wheel carries copies of both as package data. Commands name a file by its name without `.yml`, or
by a path. A clone reads its own top-level folders, so an edited file takes effect at once.

A file may start from another, and options of a command line come on top: each is a layer of values
by dotted key.
"""

__all__ = [
    "KINDS",
    "Layer",
    "Override",
    "find",
    "flat_layer",
    "folders",
    "names",
    "override_layer",
    "parse_yaml",
    "read_layers",
    "read_yaml",
]

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from .errors import UserError, did_you_mean, one_line
from .files import is_folder, local
from .options import flat, shown

#: The folders of the kinds of files, and what messages call one of each.
KINDS = {"configs": "configuration", "data_manifests": "benchmark"}
SUFFIXES = (".yml", ".yaml")
PACKAGE = Path(__file__).resolve().parent

# What YAML may hold.
Value: TypeAlias = Any
# Values by dotted key, and the file or option that they come from.
Layer: TypeAlias = tuple[str, dict[str, Any]]
Override: TypeAlias = str | tuple[str, Any]
# Whether a dotted key is that of a section of options.
IsSection: TypeAlias = Callable[[str], bool]


def folders(kind: str) -> list[Path]:
    r"""Returns the folders that may hold files of a kind, the preferred one first.

    Arguments:
        kind: `"configs"` or `"data_manifests"`.
    """
    assert kind in KINDS, kind
    candidates = (PACKAGE.parent / kind, PACKAGE / f"_{kind}")
    # Beside an installed package, `configs/` may be anybody's; only a clone has a setup file.
    is_clone = any((PACKAGE.parent / f).is_file() for f in ("setup.cfg", "pyproject.toml"))
    return [c for c in (candidates if is_clone else candidates[1:]) if c.is_dir()]


def names(kind: str) -> list[str]:
    r"""Returns the names, without suffix, that :func:`find` knows for a kind of file."""
    return sorted({p.stem for f in folders(kind) for p in f.iterdir() if p.suffix in SUFFIXES})


def find(kind: str, name: str) -> Path:
    r"""Returns the file of a name; a known name wins over a path of the same spelling.

    Arguments:
        kind: `"configs"` or `"data_manifests"`.
        name: A known name without suffix, or the path of any file.

    Raises:
        UserError: If there is no such file.
    """
    known = names(kind)
    if name in known:
        paths = (f / f"{name}{suffix}" for f in folders(kind) for suffix in SUFFIXES)
        return next(path for path in paths if path.is_file())
    if os.path.isfile(local(name)):  # Path.is_file raises an error for names no file can have
        return local(name)
    found = "is a folder" if is_folder(local(name)) else "no such name or file"
    raise UserError(
        f"{KINDS[kind]} {name!r}: {found}{did_you_mean(name, known)}, "
        f"expected one of {', '.join(known)}, or the path of a YAML file of your own."
    )


def read_yaml(path: Path) -> Value:
    r"""Returns what a YAML file says, see :func:`parse_yaml`.

    Arguments:
        path: The file.

    Raises:
        UserError: If it cannot be read, is not UTF-8, or not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise UserError(f"{path}: cannot be read: {reason}.") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Value:
    r"""Returns what a YAML text says. Here `1e-3` is a number, and a repeated key is an error.

    Arguments:
        text: The text.
        source: The file or option to name in messages.

    Raises:
        UserError: If it is not YAML; the message names the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        reason = getattr(error, "problem", None) or one_line(error)
        raise UserError(f"{where}: not valid YAML: {reason}.") from None


def read_layers(kind: str, name: str, is_section: IsSection) -> list[Layer]:
    r"""Returns the values of a file, after those of the one that it extends, if it does.

    Arguments:
        kind: The kind of file, as for :func:`find`.
        name: Its name or path.
        is_section: Whether a dotted key is that of a section.

    Raises:
        UserError: If a file is not there, is no mapping, or extends one that extends another.
    """
    path = find(kind, name)
    values = flat_layer(read_yaml(path), str(path), is_section)[1]
    base = values.pop("extends", None)
    layers = [] if base is None else [_base(kind, str(base), path, is_section)]
    return [*layers, (str(path), values)]


def _base(kind: str, name: str, path: Path, is_section: IsSection) -> Layer:
    r"""Returns the values of the file that the one at `path` extends."""
    beside = path.parent / name
    try:
        base = beside if os.path.isfile(beside) else find(kind, name)
    except UserError as error:
        raise UserError(f"{path}: extends: {error}") from None
    layer = flat_layer(read_yaml(base), str(base), is_section)
    # One level also rules out circles.
    if "extends" in layer[1] or base.resolve() == path.resolve():
        raise UserError(f"{path}: extends: {name!r} extends another; only one level is allowed.")
    return layer


def flat_layer(mapping: object, source: str, is_section: IsSection) -> Layer:
    r"""Returns the values of a nested mapping; an empty section has none.

    Arguments:
        mapping: The mapping; an empty file has none.
        source: The file or argument to name in messages.
        is_section: Whether a dotted key is that of a section.

    Raises:
        UserError: If it is no mapping.
    """
    if not isinstance(mapping, Mapping):
        raise UserError(f"{source}: got {shown(mapping)}, expected a mapping of sections.")
    values = flat(mapping)
    return source, {k: v for k, v in values.items() if v is not None or not is_section(k)}


def override_layer(override: Override, is_section: IsSection, texts: Collection[str]) -> Layer:
    r"""Returns the value of `"section.key=value"`, or of a key and a value.

    Arguments:
        override: The text, whose value is YAML; or the pair, in which text is read as YAML too.
        is_section: Whether a dotted key is that of a section.
        texts: The keys whose values are text.

    Raises:
        UserError: If the text has another form, or its value is not YAML.
    """
    if isinstance(override, str):
        key, equals, value = override.partition("=")
        key = key.strip()
        if not equals or is_section(key):
            raise UserError(f"option {shown(override)}: expected SECTION.KEY=VALUE.")
        read = parse_yaml(value, f"option {key}")
        # A title may well be a number: where text is expected, text it stays.
        return "option", flat({key: value if key in texts and read is not None else read})
    key, value = override
    # A name or path may hold `#`, or be `null`.
    is_yaml = isinstance(value, str) and key not in texts
    return "option", {key: parse_yaml(value, f"option {key}") if is_yaml else value}


class _Loader(yaml.SafeLoader):
    r"""A safe loader without two habits of YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3, without a dot, as text. Integers match an earlier resolver.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)
