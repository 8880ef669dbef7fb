r"""Options that a user writes: in a YAML file, on a command line or as keyword arguments.

An options class is a frozen pydantic model. Its annotations give the type, range and choices of each
option, its method `_conflicts` the rules between options, so that each is written once. No value is
converted, except that an integer may stand for a number and a list for a tuple.

:func:`explain` turns any validation error into one line: where the value came from, its key, what
was found and what was expected. Nothing here imports torch, so a mistyped key is reported at once.
"""

__all__ = [
    "BatchSize",
    "Count",
    "Natural",
    "Options",
    "Positive",
    "Share",
    "Text",
    "Weight",
    "as_keywords",
    "differences",
    "explain",
    "flat",
    "merged",
    "shown",
]

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from .errors import UserError, first, nearest

Count: TypeAlias = Annotated[int, Field(ge=1)]
# A larger batch would fill the memory before anything else is said.
BatchSize: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
Natural: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Weight: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]

# The longest value or key in a message, in characters.
WIDTH = 80
# pydantic's words for what was expected, and ours.
WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "a valid dictionary": "a mapping",
    "greater than": "a number greater than",
    "less than": "a number less than",
}


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
            sources: Other sources by dotted key, the last layer last.

        Raises:
            UserError: If it is no mapping, a key is unknown, or a value is not one of its option's.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(explain(error, cls, source, sources)) from None

    def replace(self, **changes: object) -> Self:
        r"""Returns a copy with some options changed, checked as :meth:`of` does."""
        return self.of({**dict(self), **changes}, type(self).__name__)

    def changed(self, values: Mapping[str, Any], source: str) -> Self:
        r"""Returns a copy with some options changed, by dotted key, as :meth:`of` reads them."""
        layers = [(source, flat(self.to_dict())), (source, values)]
        return self.of(merged(layers)[0], source)

    def to_dict(self) -> dict[str, Any]:
        r"""Returns the options as plain JSON and YAML values."""
        return self.model_dump(mode="json")

    def _conflicts(self) -> Iterator[str]:
        r"""Yields which rules between options are broken, as `"key: got this, expected that."`."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:  # noqa: ANN401
        r"""Gives a section of which some options are written the rest of this class's default."""
        for name, field in cls.model_fields.items() if isinstance(values, Mapping) else ():
            if isinstance(field.default, Options) and isinstance(values.get(name), Mapping):
                values = {**values, name: {**dict(field.default), **values[name]}}
        return values

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self


def flat(values: Mapping[Any, Any], depth: int = 3) -> dict[str, Any]:
    r"""Returns a mapping of mappings as one, by dotted key.

    Arguments:
        values: The mapping.
        depth: The number of levels that have keys of their own: YAML's references may nest endlessly.

    Example:
        >>> flat({"head": {"path": {"eps": 0.1}}, "data": {}})
        {'head.path.eps': 0.1, 'data': {}}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value and depth > 1:
            found |= {f"{key}.{name}": item for name, item in flat(value, depth - 1).items()}
        else:
            found[str(key)] = value
    return found


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], *, shared: bool = False
) -> str | None:
    r"""Says in what two configurations differ, one key after the other; None if in nothing.

    Arguments:
        then: The one, with sections in it.
        now: The other.
        shared: Whether only keys that both have count.
    """
    old, new = ({k: v for k, v in flat(c).items() if v != {}} for c in (then, now))
    keys = old.keys() & new.keys() if shared else old.keys() | new.keys()
    missing = object()
    differing = [
        f"{key}={_short(old.get(key))} (not {_short(new.get(key))})"
        for key in sorted(keys)
        if old.get(key, missing) != new.get(key, missing)
    ]
    return first(differing, "key") if differing else None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def merged(
    layers: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    r"""Returns the nested values of several layers, of which the last wins, and their sources.

    Arguments:
        layers: The source of each layer, and its values by dotted key.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            *sections, name = key.split(".")
            inner: Any = values
            for section in sections:
                if isinstance(inner, dict):
                    inner[section] = inner = {} if inner.get(section) is None else inner[section]
            if not isinstance(inner, dict):  # what is no section is given one: an unknown key
                values[key] = value
            elif value != {} or not inner.get(name):  # an empty section changes nothing
                inner[name] = value
            sources.pop(key, None)
            sources[key] = origin
    return values, sources


def explain(
    error: ValidationError,
    options: type[BaseModel],
    source: str,
    sources: Mapping[str, str] | None = None,
) -> str:
    r"""Returns one line for a validation error: source, key, what was found, what was expected.

    Arguments:
        error: The error. Its first mistake is told, and how many more there are.
        options: The class that was validated.
        source: The file or argument that the values came from.
        sources: Other sources by dotted key, the last layer last. Of several options that do not
            go together, the one from the last layer is held responsible.
    """
    mistakes = error.errors(include_url=False)
    mistake = mistakes[0]
    key = _dotted(mistake["loc"])
    keys = [re.sub(r"\[.*", "", key)]
    if mistake["type"] == "extra_forbidden":
        text = f"unknown key {key[:WIDTH]!r}; {_advice(key, options)}"
    elif mistake["type"] == "missing":
        text = f"{key}: is missing."
    elif mistake["type"] == "value_error":  # a rule, whose text begins with a key
        text = f"{key}.{mistake['ctx']['error']}".lstrip(".")
        keys = re.findall(r"^\w+(?=:)|[a-z]\w*(?:\.[a-z]\w*)+", text)
        # A key outside of sections, beside its value: `estimator classifier`.
        given = mistake["input"] if isinstance(mistake["input"], Mapping) else {}
        keys += [k for k, value in given.items() if f" {k} {value}" in text]
    else:
        found = f"got {shown(mistake['input'])}, expected {_expected(mistake, options)}"
        text = f"{key}: {found}" if key else found
    layers = reversed(list((sources or {}).items()))
    origins = (o for k, o in layers if any(f"{k}.".startswith(f"{name}.") for name in keys))
    more = f" ({len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{next(origins, source)}: {text}{more}"


def _expected(mistake: Mapping[str, Any], options: type[BaseModel]) -> str:
    r"""Returns what should have stood in the place of a value of a wrong type or range."""
    if mistake["type"] in ("model_type", "model_attributes_type"):
        return f"a mapping of {', '.join(_keys(options, mistake['loc']))}."
    expected = re.sub(r"^\w+ should (be|have) | after validation.*", "", mistake["msg"])
    for words, ours in WORDS.items():
        expected = re.sub(f"^{words}", ours, expected)
    # Not of a list, whose text may be endless: YAML's references nest.
    word = mistake["input"] if isinstance(mistake["input"], str) else ""
    near = nearest(word[:WIDTH], re.findall(r"'([^']*)'", expected))
    return f"{expected}; did you mean {near!r}?" if near else f"{expected}."


def _advice(key: str, options: type[BaseModel]) -> str:
    r"""Returns what to write instead of an unknown key: a near one, or the keys there are."""
    section, _, name = key[:WIDTH].rpartition(".")
    siblings, every = _keys(options, section.split(".")), _all_keys(options)
    near = next((k for k in every if k.endswith(f".{name}")), None)  # in another section
    if near is None and (sibling := nearest(name, siblings)):
        near = f"{section}.{sibling}".lstrip(".")
    near = near or nearest(name, every)
    return f"did you mean {near!r}?" if near else f"expected one of {', '.join(siblings)}."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 2, 4, 4, 4
_SHORT.maxstring = _SHORT.maxother = WIDTH


def shown(value: object) -> str:
    r"""Returns a value as messages show it: as YAML writes it, on one line, and short.

    Example:
        >>> shown(None), shown([[[[1, 2], 3], 4], 5])
        ('null', '[[[...], 4], 5]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = " ".join(_SHORT.repr(value).split())  # an array has many lines
    except ValueError:  # Python prints no integer of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def as_keywords(error: UserError) -> UserError:
    r"""Returns an error whose advice names a keyword, `training__steps`, not the key of a file."""

    def keyword(match: re.Match[str]) -> str:
        return match[0].replace(".", "__")

    return UserError(re.sub(r"(?<=did you mean ')[\w.]+(?=')", keyword, str(error)))


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


def _keys(options: type[BaseModel], loc: Iterable[int | str]) -> list[str]:
    r"""Returns the keys of an options class, or of the section that a location leads to."""
    for part in loc:
        field = options.model_fields.get(re.sub(r"\[.*", "", str(part)))
        sections = _classes(None if field is None else field.annotation)
        options = sections[0] if sections else options
    return list(options.model_fields)


def _all_keys(options: type[BaseModel]) -> list[str]:
    r"""Returns the dotted keys of a class and of its sections."""
    keys = []
    for name, field in options.model_fields.items():
        sections = _classes(field.annotation)
        keys += [f"{name}.{key}" for s in sections for key in _all_keys(s)] or [name]
    return keys


def _classes(annotation: object) -> list[type[BaseModel]]:
    r"""Returns the options classes within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [c for part in getattr(annotation, "__args__", ()) for c in _classes(part)]
