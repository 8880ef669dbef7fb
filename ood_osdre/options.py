r"""Options that a user writes, in a YAML file, on a command line or as keyword arguments.

An options class is a frozen pydantic model. Its annotations give each option's type, range and
choices, its validators the rules between options, so each is written once. Values are never
guessed: an integer may stand for a number, every other value must have its own type.

:func:`explain` turns any validation error into one line: where the value came from, its key, what
was found and what was expected. Nothing here imports torch, so a mistyped key is reported at once.
"""

__all__ = ["Count", "Natural", "Options", "Positive", "Share", "Weight", "explain", "shown"]

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from .errors import UserError, nearest

Count: TypeAlias = Annotated[int, Field(ge=1)]
Natural: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Weight: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]

WIDTH = 80


class Options(BaseModel):
    r"""Base of the options classes.

    Equal options are equal objects with equal hashes. A constructor raises pydantic's own
    `ValidationError`, a :class:`ValueError`; :meth:`of` is for values that a user wrote.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def of(cls, values: object, source: str, sources: Mapping[str, str] | None = None) -> Self:
        r"""Returns the options that a mapping holds, defaults filled in.

        Arguments:
            values: The mapping, as a YAML file or a caller gave it.
            source: The file or argument to name in messages.
            sources: Other sources, by dotted key.

        Raises:
            UserError: If it is no mapping, or a value is unknown, of another type or out of range.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(explain(error, cls, source, sources)) from None

    def replace(self, **changes: object) -> Self:
        r"""Returns a copy with some options changed, and checked as :meth:`of` does."""
        return self.of({**dict(self), **changes}, type(self).__name__)

    def to_dict(self) -> dict[str, Any]:
        r"""Returns the options as plain JSON and YAML values."""
        return self.model_dump(mode="json")


def explain(
    error: ValidationError,
    options: type[BaseModel],
    source: str,
    sources: Mapping[str, str] | None = None,
) -> str:
    r"""Returns one line for a validation error: source, key, what was found, what was expected.

    Arguments:
        error: The error, of which the first mistake is told.
        options: The class that was validated.
        source: The file or argument that the values came from.
        sources: Other sources, by dotted key.
    """
    mistakes = error.errors(include_url=False)
    mistake = mistakes[0]
    key = _dotted(mistake["loc"])
    where = f"{(sources or {}).get(key, source)}: "
    more = f" ({len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    if mistake["type"] == "extra_forbidden":
        return f"{where}unknown key {key[:WIDTH]!r}; {advice(key, options)}{more}"
    if mistake["type"] == "missing":
        return f"{where}the key {key!r} is missing{more}."
    if mistake["type"] == "value_error":  # a rule between options, whose text begins with the key
        text = str(mistake["ctx"]["error"])
        return f"{where}{key}.{text}" if key else f"{where}{text}"
    expected = re.sub(r"^(Input|\w+) should (be|have) ", "", mistake["msg"])
    if mistake["type"] in ("model_type", "model_attributes_type"):
        expected = f"a mapping of {', '.join(_keys(options, mistake['loc']))}"
    # Not of a list, whose text may be endless: YAML's references nest.
    word = mistake["input"] if isinstance(mistake["input"], str) else ""
    near = nearest(word[:WIDTH], re.findall(r"'([^']*)'", expected))
    hint = f"; did you mean {near!r}?" if near else "."
    found = f"got {shown(mistake['input'])}, expected {expected}{hint}"
    return f"{where}{key}: {found}{more}" if key else f"{where}{found}{more}"


def advice(key: str, options: type[BaseModel]) -> str:
    r"""Returns what to write instead of an unknown key: a near one, or the keys there are."""
    section, _, name = key.rpartition(".")
    siblings = _keys(options, tuple(section.split(".")) if section else ())
    near = nearest(name[:WIDTH], siblings)
    if near:
        near = f"{section}.{near}" if section else near
    else:
        near = nearest(name[:WIDTH], _all_keys(options))
    return f"did you mean {near!r}?" if near else f"expected one of {', '.join(siblings)}."


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 2, 4, 4, 4
        self.maxstring = self.maxother = WIDTH

    def repr_int(self, x: int, level: int) -> str:
        # Of thousands of digits Python itself raises an error.
        return repr(x) if x.bit_length() < 3 * WIDTH else f"an integer of {x.bit_length()} bits"


def shown(value: object) -> str:
    r"""Returns a value as messages show it: as YAML writes it, on one line, and short.

    Example:
        >>> shown(None), shown([[[[1, 2], 3], 4], 5])
        ('null', '[[[...], 4], 5]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = _Short().repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _keys(options: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    r"""Returns the keys of an options class, or of one of its sections."""
    for part in loc:
        field = options.model_fields.get(re.sub(r"\[\d+\]", "", str(part)))
        kinds = _classes(None if field is None else field.annotation)
        options = kinds[0] if kinds else options
    return list(options.model_fields)


def _all_keys(options: type[BaseModel]) -> list[str]:
    r"""Returns the dotted keys of a class and of its sections."""
    keys = []
    for name, field in options.model_fields.items():
        sections = _classes(field.annotation)
        keys += [f"{name}.{key}" for s in sections for key in s.model_fields] or [name]
    return keys


def _classes(annotation: object) -> list[type[BaseModel]]:
    r"""Returns the options classes within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [c for part in getattr(annotation, "__args__", ()) for c in _classes(part)]
