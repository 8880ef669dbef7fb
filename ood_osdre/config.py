r"""The configuration of a run: frozen dataclasses that a YAML file and the command line fill.

A file holds values only. Whatever it leaves out takes the default documented here; whatever it
says that is not documented here is refused, in one line that names the file and the key.
`extends: NAME` starts from another configuration, one level deep. Overrides, `section.key=value`
pairs with YAML values, come last.

Nothing here imports torch: `--help` and a mistyped key cost no second.
"""

__all__ = [
    "BasisConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "NetworkConfig",
    "ObjectiveConfig",
    "PathConfig",
    "TimesConfig",
    "TrainingConfig",
    "load_config",
    "override_config",
]

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .conflicts import conflicts
from .errors import UserError, nearest
from .options import Section, Value, check, option_types, parse_yaml, read_yaml
from .resources import find
from .sections import (
    BasisConfig,
    DataConfig,
    EvaluationConfig,
    NetworkConfig,
    ObjectiveConfig,
    PathConfig,
    TimesConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class Config(Section):
    r"""A whole run.

    Equal configurations are equal objects, and have the same :meth:`digest` in every process.

    Attributes:
        id: The in-distribution data set.
        benchmark: The manifest that lists the reference and OOD sets.
        reference: The reference set; null for the manifest's own.
        estimator: The one-step ratio, or a rival (:mod:`ood_osdre.baselines`): a direct ratio, a
            time-conditioned score, a classifier.
        title: The title of tables and plots.
        note: Anything worth recording with the run.
        network: See :class:`NetworkConfig`.
        basis: See :class:`BasisConfig`.
        path: See :class:`PathConfig`.
        times: See :class:`TimesConfig`.
        objective: See :class:`ObjectiveConfig`.
        data: See :class:`DataConfig`.
        training: See :class:`TrainingConfig`.
        evaluation: See :class:`EvaluationConfig`.

    Example:
        >>> config = Config.from_mapping({"training": {"steps": 100}})
        >>> config.training.steps, config.network.kind
        (100, 'resnet')
    """

    id: str = "cifar10"
    benchmark: str = "openood"
    reference: str | None = None
    estimator: Literal["one_step", "direct", "time_conditioned", "classifier"] = "one_step"
    title: str | None = None
    note: str | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    basis: BasisConfig = field(default_factory=BasisConfig)
    path: PathConfig = field(default_factory=PathConfig)
    times: TimesConfig = field(default_factory=TimesConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in conflicts(self):
            raise UserError(f"Config: {problem}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "config") -> "Config":
        r"""Returns the configuration that a nested mapping describes, defaults filled in.

        Arguments:
            mapping: Sections of options, and top-level options.
            source: The file or origin to name in messages.
        """
        return _build(_flatten(mapping, source), source)

    def to_dict(self) -> dict[str, Any]:
        r"""Returns the configuration as a nested mapping of plain JSON and YAML values."""
        return json.loads(json.dumps(asdict(self)))

    def digest(self) -> str:
        r"""Returns a hash of the contents, the same in every process and on every machine."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in option_types(Config).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}
KEYS = [
    *(name for name in option_types(Config) if name not in SECTIONS),
    *(f"{section}.{name}" for section, cls in SECTIONS.items() for name in option_types(cls)),
]


def load_config(
    name: str | Path,
    overrides: Sequence[str | tuple[str, Any]] = (),
) -> Config:
    r"""Returns the configuration of a name or file, with overrides.

    Arguments:
        name: The name of a configuration that the package ships, or the path of a YAML file.
        overrides: `"section.key=value"` texts with YAML values, or `(key, value)` pairs, in
            which text is read as YAML too, but for options that are text.
    """
    path = find("configs", str(name))
    mapping = _read(path)
    values: dict[str, Any] = {}

    base = mapping.pop("extends", None)
    if base is not None:
        values |= _base_values(base, path)
    values |= _flatten(mapping, str(path))
    for override in overrides:
        values |= _override(override)

    return _build(values, str(path))


def override_config(
    mapping: Mapping[str, Any], overrides: Sequence[str], source: str = "config"
) -> Config:
    r"""Returns the configuration of a nested mapping, with overrides as in :func:`load_config`.

    Arguments:
        mapping: Sections of options, and top-level options.
        overrides: `"section.key=value"` texts with YAML values.
        source: The file or origin to name in messages.
    """
    values = _flatten(mapping, source)
    for override in overrides:
        values |= _override(override)
    return _build(values, source)


def _read(path: Path) -> dict[str, Any]:
    mapping = read_yaml(path)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UserError(f"{path}: expected a mapping of sections, got {type(mapping).__name__}.")
    return mapping


def _base_values(base: object, path: Path) -> dict[str, Any]:
    r"""Returns the values of the configuration that the file at `path` extends."""
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: got {base!r}, expected the name of a configuration.")
    beside = path.parent / base
    try:
        base_path = beside if beside.is_file() else find("configs", base)
    except UserError as error:
        raise UserError(f"{path}: extends: {error}") from None
    if base_path.resolve() == path.resolve():
        raise UserError(f"{path}: extends: {base!r} is this file itself.")
    mapping = _read(base_path)
    # One level also rules out every longer cycle.
    if "extends" in mapping:
        raise UserError(
            f"{path}: extends: {base!r} extends {mapping['extends']!r} in turn, "
            "only one level is allowed."
        )
    return _flatten(mapping, str(base_path))


def _flatten(mapping: Mapping[str, Any], source: str) -> dict[str, Any]:
    r"""Returns the checked values of a nested mapping, by dotted key."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{source}: got {mapping!r}, expected a mapping of sections.")
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in SECTIONS:
            values[key] = _checked(str(key), value, source)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                values[f"{key}.{name}"] = _checked(f"{key}.{name}", item, source)
        elif value is not None:  # a section with nothing below it is one of defaults
            names = ", ".join(option_types(SECTIONS[key]))
            raise UserError(f"{source}: {key}: got {value!r}, expected a mapping of {names}.")
    return values


def _override(override: str | tuple[str, Any]) -> dict[str, Any]:
    if isinstance(override, str):
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"option {override!r}: expected section.key=value.")
    else:
        key, value = override
    key = key.strip()

    # A name or a path given apart from its key is no YAML: it may hold `#`, or be `null`.
    literal = not isinstance(override, str) and key in KEYS and _is_text(key)
    if isinstance(value, str) and literal and not value:
        raise UserError(f"option {key}: is empty, expected a name or a path.")
    if isinstance(value, str) and not literal:
        text, value = value, parse_yaml(value, f"option {key}")
        # A title may well be a number: where text is expected, text it stays.
        if value is not None and key in KEYS and not isinstance(value, str) and _is_text(key):
            value = text
    return {key: _checked(key, value, "option")}


def _is_text(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return option_types(SECTIONS[section] if section else Config)[name] in (str, str | None)


def _checked(key: str, value: object, source: str) -> Value:
    section, _, name = key.rpartition(".")
    if key in SECTIONS:
        names = ", ".join(option_types(SECTIONS[key]))
        raise UserError(
            f"{source}: {key}: is a section, expected {key}.KEY with KEY one of {names}."
        )
    if key not in KEYS:
        raise UserError(f"{source}: unknown key {key!r}; {_advice(section, name)}")
    return check(SECTIONS[section] if section else Config, name, value, f"{source}: {key}")


def _advice(section: str, name: str) -> str:
    r"""Returns what to write instead of an unknown key, siblings first."""
    if section in SECTIONS:
        siblings = list(option_types(SECTIONS[section]))
        near = nearest(name, siblings)
        near = f"{section}.{near}" if near else nearest(name, KEYS)
    else:
        siblings = list(option_types(Config))
        near = nearest(f"{section}.{name}".strip("."), [*siblings, *KEYS])
    return f"did you mean {near!r}?" if near else f"expected one of {', '.join(siblings)}."


def _build(values: Mapping[str, Any], source: str) -> Config:
    r"""Returns the configuration of checked values by dotted key."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    top: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections[section] if section else top)[name] = value
    for name, cls in SECTIONS.items():
        top[name] = cls(**sections[name])
    try:
        return Config(**top)
    except UserError as error:
        raise UserError(str(error).replace("Config", source, 1)) from None
