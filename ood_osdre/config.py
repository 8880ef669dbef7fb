r"""The configuration of a run: sections of options that a YAML file and the command line fill.

A file holds values only. Whatever it leaves out takes its default (:mod:`ood_osdre.sections`); a key
that does not exist is refused, in one line that names the file and the key. `extends: NAME` starts
from another configuration, one level deep. Overrides, `section.key=value` with YAML values, come
last.

Nothing here imports torch: `--help` and a mistyped key do not wait for it.
"""

__all__ = ["Config", "load_config", "override_config"]

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from typing_extensions import Self

from .errors import UserError
from .options import Options, advice, shown
from .resources import find, parse_yaml, read_yaml
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

# The terms that can train each estimator, and those that it takes besides.
TERMS = {
    "one_step": ("endpoint", "conditional", "time_score", "path_difference"),
    "direct": ("endpoint",),
    "time_conditioned": ("conditional", "time_score"),
    "classifier": ("class_weight",),
}
EXTRAS = {
    "one_step": ("class_weight", "outlier_exposure", "shrinkage", "path_variance"),
    "direct": ("class_weight", "outlier_exposure", "shrinkage"),
    "time_conditioned": (),
    "classifier": ("outlier_exposure",),
}


class Config(Options):
    r"""A whole run.

    Attributes:
        id: The in-distribution data set.
        benchmark: The manifest that lists the reference and OOD sets.
        reference: The reference set; null for the manifest's own.
        estimator: The one-step ratio, or a baseline: a direct ratio, a time-conditioned score, a
            classifier.
        title: The title of tables and plots.
        note: Anything worth recording with the run.
        network: See :class:`~ood_osdre.sections.NetworkConfig`.
        basis: See :class:`~ood_osdre.sections.BasisConfig`.
        path: See :class:`~ood_osdre.sections.PathConfig`.
        times: See :class:`~ood_osdre.sections.TimesConfig`.
        objective: See :class:`~ood_osdre.sections.ObjectiveConfig`.
        data: See :class:`~ood_osdre.sections.DataConfig`.
        training: See :class:`~ood_osdre.sections.TrainingConfig`.
        evaluation: See :class:`~ood_osdre.sections.EvaluationConfig`.

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
    network: NetworkConfig = NetworkConfig()
    basis: BasisConfig = BasisConfig()
    path: PathConfig = PathConfig()
    times: TimesConfig = TimesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "config") -> "Config":
        r"""Returns the configuration that a nested mapping describes, defaults filled in.

        Arguments:
            mapping: Sections of options, and top-level options.
            source: The file or origin to name in messages.
        """
        return _build([(source, _flat(mapping, source))], source)

    def digest(self) -> str:
        r"""Returns a hash of the contents, the same in every process and on every machine."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for key in ("id", "benchmark", "reference", "title", "note"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: got '', expected some text.")
        return self

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        objective, estimator = self.objective, self.estimator
        terms, extras = TERMS[estimator], EXTRAS[estimator]
        on = [term for term in terms if getattr(objective, term)]
        for term in ("class_weight", "outlier_exposure"):
            if getattr(objective, term) and not self.network.classes_head:
                raise ValueError(f"objective.{term}: is on, but network.classes_head is false.")
        if not on:
            raise ValueError(
                f"objective: no term trains the {estimator} estimator, set one of "
                f"{', '.join(terms)} above 0."
            )
        for term in sorted({t for group in (*TERMS.values(), *EXTRAS.values()) for t in group}):
            if getattr(objective, term) and term not in (*terms, *extras):
                raise ValueError(
                    f"objective.{term}: is on, but estimator {estimator} has no use for it."
                )
        if estimator == "time_conditioned" and len(on) > 1:
            raise ValueError(f"objective: got {' and '.join(on)}, expected one for {estimator}.")
        return self

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        network, objective, estimator = self.network, self.objective, self.estimator
        if estimator == "time_conditioned":
            if network.kind == "unet":
                raise ValueError(
                    "network.kind: got unet, expected resnet or mlp for its estimator."
                )
            if network.norm == "batch":
                raise ValueError(f"network.norm: got batch, expected group for {estimator}.")
        if objective.data_score:
            beside = [t for t in ("conditional", "time_score") if getattr(objective, t)]
            if network.kind == "resnet":
                raise ValueError(
                    "objective.data_score: is on, but network.kind resnet has no decoder; unet has."
                )
            if estimator != "one_step" or len(beside) != 1:
                raise ValueError(
                    "objective.data_score: is on, expected beside objective.conditional or "
                    f"objective.time_score of one_step, got {beside} of {estimator}."
                )
        per_block = objective.conditional and objective.conditional_form.endswith("per_block")
        if per_block and network.kind != "resnet":
            raise ValueError(
                f"objective.conditional_form: {objective.conditional_form} needs network.kind "
                f"resnet, got {network.kind}."
            )
        differentiated = objective.data_score or estimator == "time_conditioned"
        if self.training.compile and objective.time_score and differentiated:
            raise ValueError(
                "training.compile: is on, but this objective.time_score differentiates the network "
                "in its inputs, which a compiled one cannot do twice."
            )
        return self

    @model_validator(mode="after")
    def _check_learnable_path(self) -> Self:
        path = self.path
        if not self.objective.path_variance:
            return self
        if not path.schedule.startswith("kumaraswamy"):
            raise ValueError(
                f"objective.path_variance: is on, but path.schedule {path.schedule} has no "
                "parameters."
            )
        if path.noise != "dequantisation" and path.gamma2 == 0:
            raise ValueError("path.gamma2: got 0, expected more with objective.path_variance.")
        return self


SECTIONS = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Options)
}
TEXTS = [n for n, f in Config.model_fields.items() if f.annotation in (str, str | None)]

# Values by dotted key, with the file or argument that they come from.
Layer = tuple[str, dict[str, Any]]


def load_config(name: str | Path, overrides: Sequence[str | tuple[str, Any]] = ()) -> Config:
    r"""Returns the configuration of a name or file, with overrides.

    Arguments:
        name: The name of a configuration that the package ships, or the path of a YAML file.
        overrides: `"section.key=value"` texts with YAML values, or `(key, value)` pairs, in
            which text is read as YAML too, but for options that are text.
    """
    path = find("configs", str(name))
    mapping = _read(path)
    base = mapping.pop("extends", None)
    layers = [] if base is None else [_base(base, path)]
    layers.append((str(path), _flat(mapping, str(path))))
    return _build([*layers, *map(_override, overrides)], str(path))


def override_config(
    mapping: Mapping[str, Any], overrides: Sequence[str], source: str = "config"
) -> Config:
    r"""Returns the configuration of a nested mapping, with overrides as in :func:`load_config`.

    Arguments:
        mapping: Sections of options, and top-level options.
        overrides: `"section.key=value"` texts with YAML values.
        source: The file or origin to name in messages.
    """
    return _build([(source, _flat(mapping, source)), *map(_override, overrides)], source)


def _read(path: Path) -> dict[str, Any]:
    mapping = read_yaml(path)
    if not isinstance(mapping, dict | None):
        raise UserError(f"{path}: expected a mapping of sections, got {type(mapping).__name__}.")
    return mapping or {}


def _base(name: object, path: Path) -> Layer:
    r"""Returns the values of the configuration that the file at `path` extends."""
    if not isinstance(name, str):
        raise UserError(f"{path}: extends: got {shown(name)}, expected a configuration's name.")
    beside = path.parent / name
    try:
        base = beside if beside.is_file() else find("configs", name)
    except UserError as error:
        raise UserError(f"{path}: extends: {error}") from None
    mapping = _read(base)
    # One level also rules out cycles.
    if "extends" in mapping or base.resolve() == path.resolve():
        raise UserError(f"{path}: extends: {name!r} extends another; only one level is allowed.")
    return str(base), _flat(mapping, str(base))


def _flat(mapping: object, source: str) -> dict[str, Any]:
    r"""Returns the values of a nested mapping by dotted key."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{source}: got {shown(mapping)}, expected a mapping of sections.")
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in SECTIONS and isinstance(value, Mapping):
            values |= {f"{key}.{name}": item for name, item in value.items()}
        elif key not in SECTIONS or value is not None:  # an empty section is one of defaults
            values[str(key)] = value
    return values


def _override(override: str | tuple[str, Any]) -> Layer:
    if not isinstance(override, str):
        key, value = override
        literal = key in TEXTS  # a name or path may hold `#`, or be `null`
    else:
        key, equals, value = override.partition("=")
        literal = False
        if not equals:
            raise UserError(f"option {override!r}: expected section.key=value.")
    key = key.strip()
    if key in SECTIONS:
        raise UserError(f"option {key}: is a section, expected {key}.KEY=VALUE.")
    if isinstance(value, str) and not literal:
        text, value = value, parse_yaml(value, f"option {key}")
        # A title may well be a number: where text is expected, text it stays.
        if key in TEXTS and value is not None:
            value = text
    return "option", {key: value}


def _build(layers: Sequence[Layer], source: str) -> Config:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            section, dot, name = key.partition(".")
            if dot and section not in SECTIONS:
                raise UserError(f"{origin}: unknown key {key!r}; {advice(name, Config)}")
            target = values.setdefault(section, {}) if dot else values
            if not isinstance(target, dict):
                raise UserError(f"{sources[section]}: {section}: got {shown(target)}.")
            target[name if dot else key] = value
            sources[key] = origin
    return Config.of(values, source, sources)
