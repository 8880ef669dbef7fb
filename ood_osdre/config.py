r"""The configuration of a run: a YAML file, options of the command line, and defaults for the rest.

A file holds values only, in the sections of :mod:`ood_osdre.sections`. `extends: NAME` starts from
another configuration, one level deep. Overrides, `section.key=value` with YAML values, come last.
A mistake is refused in one line that names the file or option, and the key.

Nothing here imports torch: `--help` and a mistyped key do not wait for it.
"""

__all__ = ["Config", "load_config"]

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .errors import UserError
from .options import Options, Text, shown
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

# The objective's terms that train each estimator, and those that it takes besides.
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

# Values by dotted key, and the file or option that they come from.
Layer: TypeAlias = tuple[str, dict[str, Any]]
Override: TypeAlias = str | tuple[str, Any]


class Config(Options):
    r"""A whole run.

    Attributes:
        id: The in-distribution data set.
        benchmark: The manifest that lists the reference and OOD sets; null for the first of the
            ID data set's own that is whole on disk.
        reference: The reference set; null for the manifest's own.
        estimator: The one-step ratio, or a baseline: a direct ratio, a time-conditioned score, a
            classifier.
        title: The title of tables and plots.
        note: Anything worth recording with the run.

    The other attributes are sections, see :mod:`ood_osdre.sections`.

    Example:
        >>> config = Config.from_mapping({"training": {"steps": 100}})
        >>> config.training.steps, config.network.kind
        (100, 'resnet')
    """

    id: Text = "cifar10"
    benchmark: Text | None = None
    reference: Text | None = None
    estimator: Literal["one_step", "direct", "time_conditioned", "classifier"] = "one_step"
    title: Text | None = None
    note: Text | None = None
    network: NetworkConfig = NetworkConfig()
    basis: BasisConfig = BasisConfig()
    path: PathConfig = PathConfig()
    times: TimesConfig = TimesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def from_mapping(
        cls, mapping: object, source: str = "config", overrides: Sequence[Override] = ()
    ) -> "Config":
        r"""Returns the configuration that a nested mapping describes, defaults filled in.

        Arguments:
            mapping: Sections of options, and top-level options.
            source: The file or argument to name in messages.
            overrides: As in :func:`load_config`.

        Raises:
            UserError: If a key is unknown, a value is not one of its option's, or options do not go
                together.
        """
        return _merge([(source, _flat(mapping, source)), *map(_override, overrides)], source)

    def _conflicts(self) -> Iterator[str]:
        yield from self._term_conflicts()
        yield from self._network_conflicts()
        if self.objective.path_variance:
            path = self.path
            if path.noise == "dequantisation" and not path.schedule.startswith("kumaraswamy"):
                yield (
                    "objective.path_variance: is on, but a path with path.schedule "
                    f"{path.schedule} and path.noise {path.noise} has no parameters."
                )
            if path.noise != "dequantisation" and path.gamma2 == 0:
                yield "path.gamma2: got 0, expected more with objective.path_variance."

    def _term_conflicts(self) -> Iterator[str]:
        objective, estimator = self.objective, self.estimator
        terms, extras = TERMS[estimator], EXTRAS[estimator]
        on = [term for term in terms if getattr(objective, term)]
        for term in ("class_weight", "outlier_exposure"):
            if getattr(objective, term) and not self.network.classes_head:
                yield f"objective.{term}: is on, but network.classes_head is false."
        if not on:
            choices = ", ".join(terms)
            yield f"objective: no term trains estimator {estimator}, set one of {choices} above 0."
        for term in sorted({t for group in (*TERMS.values(), *EXTRAS.values()) for t in group}):
            if getattr(objective, term) and term not in (*terms, *extras):
                yield f"objective.{term}: is on, but estimator {estimator} has no use for it."
        if estimator == "time_conditioned" and len(on) > 1:
            yield f"objective: got {' and '.join(on)}, expected one for estimator {estimator}."

    def _network_conflicts(self) -> Iterator[str]:
        network, objective, estimator = self.network, self.objective, self.estimator
        if estimator == "time_conditioned":
            if network.kind in ("speed", "unet"):
                yield (
                    f"network.kind: got {network.kind}, expected resnet or mlp for estimator "
                    f"{estimator}."
                )
            if network.norm == "batch":
                yield f"network.norm: got batch, expected group for estimator {estimator}."
        if objective.data_score:
            beside = [t for t in ("conditional", "time_score") if getattr(objective, t)]
            if network.kind in ("resnet", "speed"):
                yield (
                    f"objective.data_score: is on, but network.kind {network.kind} has no decoder; "
                    "unet has."
                )
            if estimator != "one_step" or len(beside) != 1:
                yield (
                    "objective.data_score: is on, expected beside objective.conditional or "
                    "objective.time_score of estimator one_step, got "
                    f"{' and '.join(beside) or 'neither'} of estimator {estimator}."
                )
        form = objective.conditional_form
        if objective.conditional and form.endswith("per_block") and network.kind != "resnet":
            yield (
                f"objective.conditional_form: {form} needs network.kind resnet, got {network.kind}."
            )
        differentiated = objective.data_score or estimator == "time_conditioned"
        if self.training.compile and objective.time_score and differentiated:
            yield (
                "training.compile: is on, but this objective.time_score differentiates the network "
                "in its inputs, which a compiled one cannot do twice."
            )


SECTIONS = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Options)
}
TEXTS = ("id", "benchmark", "reference", "title", "note")


def load_config(name: str | Path, overrides: Sequence[Override] = ()) -> Config:
    r"""Returns the configuration of a name or file, with overrides.

    Arguments:
        name: The name of a configuration that the package ships, or the path of a YAML file.
        overrides: `"section.key=value"` texts with YAML values, or `(key, value)` pairs, in
            which text is read as YAML too, except for options that are text.

    Raises:
        UserError: As :meth:`Config.from_mapping`, or if a file cannot be read.
    """
    path = find("configs", str(name))
    source = str(path)
    values = _flat(read_yaml(path), source)
    base = values.pop("extends", None)
    layers = [] if base is None else [_base(str(base), path)]
    return _merge([*layers, (source, values), *map(_override, overrides)], source)


def _base(name: str, path: Path) -> Layer:
    r"""Returns the values of the configuration that the file at `path` extends."""
    beside = path.parent / name
    try:
        base = beside if os.path.isfile(beside) else find("configs", name)
    except UserError as error:
        raise UserError(f"{path}: extends: {error}") from None
    values = _flat(read_yaml(base), str(base))
    # One level also rules out circles.
    if "extends" in values or base.resolve() == path.resolve():
        raise UserError(f"{path}: extends: {name!r} extends another; only one level is allowed.")
    return str(base), values


def _flat(mapping: object, source: str) -> dict[str, Any]:
    r"""Returns the values of a nested mapping by dotted key; an empty section has none."""
    if not isinstance(mapping, Mapping | None):
        raise UserError(f"{source}: got {shown(mapping)}, expected a mapping of sections.")
    values: dict[str, Any] = {}
    for key, value in (mapping or {}).items():
        if key in SECTIONS and isinstance(value, Mapping):
            values |= {f"{key}.{name}": item for name, item in value.items()}
        elif key not in SECTIONS or value is not None:
            values[str(key)] = value
    return values


def _override(override: Override) -> Layer:
    if isinstance(override, str):
        key, equals, value = override.partition("=")
        key = key.strip()
        if not equals or key in SECTIONS:
            raise UserError(f"option {shown(override)}: expected SECTION.KEY=VALUE.")
        read = parse_yaml(value, f"option {key}")
        # A title may well be a number: where text is expected, text it stays.
        return "option", {key: value if key in TEXTS and read is not None else read}
    key, value = override
    # A name or path may hold `#`, or be `null`.
    is_yaml = isinstance(value, str) and key not in TEXTS
    return "option", {key: parse_yaml(value, f"option {key}") if is_yaml else value}


def _merge(layers: Sequence[Layer], source: str) -> Config:
    r"""Returns the configuration of several layers, of which the last wins."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            section, _, name = key.partition(".")
            inner = values.setdefault(section, {}) if name else values
            if isinstance(inner, dict):
                inner[name or key] = value
            else:  # an option that is no section is given as one: an unknown key
                values[key] = value
            sources.pop(key, None)
            sources[key] = origin
    return Config.of(values, source, sources)
