r"""Options with types and ranges: the checks under :mod:`ood_osdre.config`.

A *section* is a frozen dataclass whose annotations say what each option may hold: `bool`, `int`,
`float`, `str`, a `Literal` of choices, a `tuple[T, ...]`, any of them `| None`, and numbers with
a range through `Annotated[float, Range(...)]`. The same annotations serve the type checker and
the user's YAML file, so a default, a type and a range are each written once.

Values are never guessed: an integer is accepted where a number is expected, everything else has
to have its own type. Messages are one line that names the source and the key.

Nothing here imports torch, so that a mistyped key is reported at once.
"""

__all__ = ["Range", "Section", "check", "option_types", "parse_yaml", "read_yaml"]

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from .errors import UserError, nearest

# What YAML may hold, and what annotations are to Python.
Value: TypeAlias = Any
Hint: TypeAlias = Any


@dataclass(frozen=True)
class Range:
    r"""An interval of numbers.

    Arguments:
        low: The lower end.
        high: The upper end.
        ends: Whether the ends belong to the interval, as in `"[)"`.
    """

    low: float = -math.inf
    high: float = math.inf
    ends: Literal["[]", "[)", "(]", "()"] = "[]"

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        below = value <= self.high if self.ends[1] == "]" else value < self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f">= {self.low:g}" if self.ends[0] == "[" else f"> {self.low:g}"
        return f"in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


class Section:
    r"""Base of the option dataclasses: checks and normalises every field when built.

    An integer given for a `float` becomes one, a list given for a `tuple` becomes one, so that
    equal sections are equal, hash alike and serialise to the same text.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name in option_types(cls):
            value = check(cls, name, getattr(self, name), f"{cls.__name__}.{name}")
            object.__setattr__(self, name, value)


@cache
def option_types(section: type) -> dict[str, Any]:
    r"""Returns the annotation of each option of a section, in order."""
    hints = get_type_hints(section, include_extras=True)
    return {f.name: hints[f.name] for f in fields(section)}


def check(section: type, name: str, value: object, label: str) -> Value:
    r"""Returns the value of option `name`, normalised, or raises a one-line :class:`UserError`.

    Arguments:
        section: The section's class.
        name: The option's name.
        value: What was found.
        label: The source and key to name in the message.
    """
    hint = option_types(section)[name]
    try:
        return _convert(value, hint)
    except _MismatchError:
        choices = [c for c in _alternatives(hint) if isinstance(c, str)]
        near = nearest(value, choices) if isinstance(value, str) else None
        advice = f"; did you mean {near!r}?" if near else "."
        message = f"{label}: got {_show(value)}, expected {_describe(hint)}{advice}"
        raise UserError(message) from None


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


class _MismatchError(Exception):
    r"""A value does not fit an annotation."""


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


def _convert(value: object, hint: Hint) -> Value:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(_convert(value, args[0]), args[1])
    if origin in (Union, UnionType):
        return None if value is None else _convert(value, _strip(hint))
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise _MismatchError
    if origin is tuple:
        if isinstance(value, list | tuple) and value:
            return tuple(_convert(v, args[0]) for v in value)
        raise _MismatchError
    if hint is float and type(value) is int:
        return float(value)
    # An exact type: a bool is an int to Python, not to the user.
    if type(value) is hint and not (hint is str and not value):
        return value
    raise _MismatchError


def _bounded(value: Value, bounds: Range) -> Value:
    if value not in bounds:
        raise _MismatchError
    return value


def _strip(hint: Hint) -> Hint:
    return next(a for a in get_args(hint) if a is not type(None))


def _alternatives(hint: Hint) -> Sequence[object]:
    if get_origin(hint) in (Union, UnionType):
        return _alternatives(_strip(hint))
    return get_args(hint) if get_origin(hint) is Literal else ()


def _describe(hint: Hint) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_describe(args[0])} {args[1]}"
    if origin in (Union, UnionType):
        return f"{_describe(_strip(hint))}, or null"
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return f"a list, each entry {_describe(args[0])}"
    names = {float: "a number", int: "an integer", bool: "true or false", str: "some text"}
    return names.get(hint) or f"a {hint.__name__}"


def _show(value: object) -> str:
    r"""Returns a value as YAML would write it, shortened to fit one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
