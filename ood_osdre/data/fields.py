r"""Typed reading of the mappings that a YAML file holds, each mistake one short line."""

__all__ = [
    "as_mapping",
    "channels",
    "keys_of",
    "name_of",
    "names_of",
    "path_of",
    "shown",
    "typed",
    "whole",
]

import reprlib
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ..errors import UserError, did_you_mean

T = TypeVar("T")
D = TypeVar("D")

WIDTH = 80
# Control characters, lone surrogates, and separators of lines and paragraphs.
UNWRITABLE = ("Cc", "Cs", "Zl", "Zp")
# The longest name of a file that common file systems have, in bytes.
LONGEST = 255
# Less would be zero once divided by; of pixels in [0, 1] no deviation exceeds 1/2.
LEAST_STD, LARGEST_STD = 1e-6, 1.0


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 2, 4, 4, 4
        self.maxstring = self.maxother = WIDTH

    def repr_int(self, x: int, level: int) -> str:
        # Of thousands of digits Python itself raises an error.
        return repr(x) if x.bit_length() < 3 * WIDTH else f"an integer of {x.bit_length()} bits"


def shown(value: object) -> str:
    r"""Returns a value as messages show it: on one line, and short however it is nested.

    Example:
        >>> shown([[[[1, 2], 3], 4], 5])
        '[[[...], 4], 5]'
    """
    text = _Short().repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def as_mapping(content: object, where: str) -> Mapping[str, Any]:
    r"""Returns a mapping, or raises an error."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: expected a mapping, found {type(content).__name__}")
    return content


def keys_of(
    content: object, keys: Collection[str], where: str, required: Collection[str] = ()
) -> Mapping[str, Any]:
    r"""Returns a mapping with no other keys than these.

    Arguments:
        content: What should be a mapping.
        keys: The keys it may have.
        where: What to call it in errors.
        required: The keys it must have.
    """
    section = as_mapping(content, where)

    for key in section:
        if key not in keys:
            raise UserError(
                f"{where}: unknown key {shown(key)}{did_you_mean(str(key)[:WIDTH], keys)}; "
                f"known: {', '.join(keys)}"
            )
    for key in required:
        if key not in section:
            raise UserError(f"{where}: the key {key!r} is missing")

    return section


def typed(section: Mapping[str, Any], key: str, kind: type[T], where: str, default: D) -> T | D:
    r"""Returns a value of a type, or the default where there is none.

    Text that no file could hold, for one with half of a surrogate pair, is refused.
    """
    value = section.get(key)
    if value is None:
        return default
    # YAML's true is an int to Python.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(
            f"{where}: {key} is {shown(value)} ({type(value).__name__}), expected {kind.__name__}"
        )
    if isinstance(value, str) and any(unicodedata.category(c) == "Cs" for c in value):
        raise UserError(f"{where}: {key} is {shown(value)}, expected text that UTF-8 can hold")
    return value


def whole(
    section: Mapping[str, Any], key: str, where: str, default: D, low: int, high: int
) -> int | D:
    r"""Returns an integer within bounds, or the default where there is none."""
    value = typed(section, key, int, where, default)
    if value is not default and isinstance(value, int) and not low <= value <= high:
        raise UserError(f"{where}: {key} is {shown(value)}, expected {low} to {high}")
    return value


def name_of(section: Mapping[str, Any], key: str, where: str) -> str:
    r"""Returns a name that a row of a table may bear: not empty, and all on one line."""
    value = typed(section, key, str, where, "")
    if not value.strip() or _is_unwritable(value):
        raise UserError(f"{where}: {key} is {shown(value)}, expected a name on one line")
    return value


def names_of(section: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    r"""Returns a list of names; YAML may have read some as numbers."""
    values = typed(section, key, list, where, [])
    for value in values:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UserError(f"{where}: {key} holds {shown(value)}, expected names")
    return tuple(map(str, values))


def path_of(section: Mapping[str, Any], key: str, where: str, default: D) -> str | D:
    r"""Returns the path of a file or folder that may exist, or the default."""
    value = typed(section, key, str, where, default)
    if value is default or not isinstance(value, str):
        return value
    longest = max(len(part.encode()) for part in value.split("/"))
    if not value or _is_unwritable(value) or longest > LONGEST:
        raise UserError(f"{where}: {key} is {shown(value)}, expected the path of a file or folder")
    return value


def channels(section: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    r"""Returns the statistic `mean` or `std` of each channel, for pixels in :math:`[0, 1]`."""
    value = section[key]
    is_list = isinstance(value, list) and len(value) == 3
    if not is_list or not all(type(v) in (int, float) for v in value):
        raise UserError(f"{where}: {key} is {shown(value)}, expected three numbers")
    low, high = (0.0, 1.0) if key == "mean" else (LEAST_STD, LARGEST_STD)
    # Compared before converted: an integer may be too large for a float; false for NaN.
    if not all(low <= v <= high for v in value):
        raise UserError(
            f"{where}: {key} is {shown(value)}, expected {low:g} to {high:g}, as of pixels in "
            "[0, 1]"
        )
    return tuple(map(float, value))


def _is_unwritable(text: str) -> bool:
    return any(unicodedata.category(c) in UNWRITABLE for c in text)
