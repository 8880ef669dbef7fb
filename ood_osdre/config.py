r"""The configuration of a run: a YAML file, options of the command line, and defaults for the rest.

A file holds values only, in the sections of :mod:`ood_osdre.sections`; the section `head` has
sections of its own. `extends: NAME` starts from another configuration, one level deep. Overrides,
`section.key=value` with YAML values, come last.
A mistake is refused in one line that names the file or option, and the key.

Nothing here imports torch: `--help` and a mistyped key do not wait for it.
"""

__all__ = ["Config", "HeadConfig", "Trained", "load_config", "shortened", "with_seed"]

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from .options import Count, Options, Text, merged
from .resources import Layer, Override, flat_layer, override_layer, read_layers
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
    "gaussians": (),
}
EXTRAS = {
    "one_step": ("class_weight", "outlier_exposure", "shrinkage", "path_variance"),
    "direct": ("class_weight", "outlier_exposure", "shrinkage"),
    "time_conditioned": (),
    "classifier": ("outlier_exposure",),
    "gaussians": (),
}
MLP_FEATURES = 256  # of an MLP of width 1


class Trained(Options):
    r"""What the networks of a run and the head on their features have in common, but no options."""

    if TYPE_CHECKING:

        @property
        def estimator(self) -> str: ...  # noqa: D102
        @property
        def network(self) -> NetworkConfig: ...  # noqa: D102
        @property
        def basis(self) -> BasisConfig: ...  # noqa: D102
        @property
        def path(self) -> PathConfig: ...  # noqa: D102
        @property
        def times(self) -> TimesConfig: ...  # noqa: D102
        @property
        def objective(self) -> ObjectiveConfig: ...  # noqa: D102
        @property
        def training(self) -> TrainingConfig: ...  # noqa: D102
        @property
        def evaluation(self) -> EvaluationConfig: ...  # noqa: D102

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
        if terms and not on:
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


class HeadConfig(Trained):
    r"""A ratio of a frozen classifier's features (:mod:`ood_osdre.models.representation`).

    Sections are those of a run, with defaults for whitened features.

    Attributes:
        layers: The layers to read, by their names in the classifier's network; none for the
            features that it classifies by.
        id_from: The ID images whose features it is trained on: those of the classifier, which has
            fitted them, or those of `data.hold_out_id`, which it has not seen.
        rank: The number of whitened principal components; null for all there are.
        estimator: What the head is; a one-step ratio, or a baseline, of which `gaussians` has a closed
            form (:mod:`ood_osdre.models.gaussians`), with terms of the objective all 0.
        tied: Whether the Gaussians of the classes have one covariance.
        backbone: What stands between the features and the coefficients: a residual MLP, all
            squares and products, or nothing, which makes the log-ratio affine in the features.
        width: The width of the MLP.
        depth: The number of its residual layers.
        held_out: The share of both sets' features that is not trained on but watched.
        select: The step that is kept: the last, the one with the least end-point loss on features
            held out, or with their largest AUROC.
    """

    layers: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    id_from: Literal["train", "held_out"] = "train"
    rank: Count | None = None
    estimator: Literal["one_step", "direct", "time_conditioned", "gaussians"] = "one_step"
    tied: bool = True
    backbone: Literal["mlp", "quadratic", "linear"] = "mlp"
    width: Count = 128
    depth: Count = 3
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    select: Literal["last", "held_out", "held_out_auroc"] = "last"
    basis: BasisConfig = BasisConfig()
    # The bridge has the scale of the data, which are whitened.
    path: PathConfig = PathConfig(gamma2=0.5, eps=1e-3)
    times: TimesConfig = TimesConfig()
    objective: ObjectiveConfig = ObjectiveConfig(endpoint=0.0, time_score=1.0)
    training: TrainingConfig = TrainingConfig.short(3000).replace(
        batch_size=512, lr=2e-3, weight_decay=0.0, clip=10.0, ema=0.99, checkpoint_every=500
    )

    @property
    def network(self) -> NetworkConfig:
        r"""The network of vectors that the head is, if its backbone is the MLP."""
        width, depths = self.width / MLP_FEATURES, (1,) * self.depth
        return NetworkConfig(
            kind="mlp", width=width, depths=depths, norm="group", classes_head=False
        )

    @property
    def evaluation(self) -> EvaluationConfig:
        r"""How a time-conditioned head integrates until a run says otherwise."""
        return EvaluationConfig()

    def _conflicts(self) -> Iterator[str]:
        objective = self.objective
        for term in ("class_weight", "outlier_exposure"):
            if getattr(objective, term):
                yield f"objective.{term}: is on, but a head has no classes."
        if objective.conditional and objective.conditional_form.endswith("per_block"):
            yield (
                f"objective.conditional_form: got {objective.conditional_form}, features have no "
                "cells."
            )
        if self.backbone != "mlp":
            for key, on in (
                ("estimator", self.estimator in ("time_conditioned", "gaussians")),
                ("objective.data_score", objective.data_score > 0),
            ):
                if on:
                    yield f"{key}: expected with backbone mlp alone, got {self.backbone}."
        if self.select != "last" and (not self.held_out or self.estimator == "gaussians"):
            yield f"select: got {self.select}, expected last where held_out is 0, and of gaussians."
        yield from super()._conflicts()


class Config(Trained):
    r"""A whole run.

    Attributes:
        id: The in-distribution data set.
        benchmark: The manifest that lists the reference and OOD sets; null for the first of the
            ID data set's own that is whole on disk.
        reference: The reference set; null for the manifest's own.
        estimator: The one-step ratio, or a baseline: a direct ratio, a time-conditioned score, a
            classifier.
        classifier: The classifier below `head`: null to train one first, by the other sections; or
            a run folder, of several seeds for that of the run's own, a file of weights (OpenOOD's
            ResNet18_32x32, or our network as its trainer saves it), or `timm:NAME@FILE`.
        title: The title of tables and plots.
        note: Anything worth recording with the run.
        head: The ratio of a classifier's features that scores, see :class:`HeadConfig`; null for
            none, so that the network itself scores.

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
    classifier: Text | None = None
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
    # Last: a key that is mistaken is more often one of the above.
    head: HeadConfig | None = None

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
        return _merge(
            [flat_layer(mapping, source, _is_section), *map(_override, overrides)], source
        )

    @property
    def has_classes(self) -> bool:
        r"""Whether the network has a class head, which some term trains."""
        trained = self.objective.class_weight or self.objective.outlier_exposure
        return bool(self.network.classes_head and trained)

    def _conflicts(self) -> Iterator[str]:
        if self.head is not None and self.estimator != "classifier":
            yield f"estimator: got {self.estimator}, expected classifier, which head is on."
        if self.head and self.head.id_from == "held_out" and not self.data.hold_out_id:
            yield "head.id_from: got held_out, expected train where data.hold_out_id is 0."
        if "energy" in self.evaluation.parts and not self.has_classes:
            yield "evaluation.parts: got energy, which needs a class head; train one."
        if self.classifier is not None and self.head is None:
            yield "classifier: is given, but there is no head on it."
        yield from super()._conflicts()


SECTIONS = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Options)
}
TEXTS = ("id", "benchmark", "reference", "classifier", "title", "note")


def load_config(name: str | Path, overrides: Sequence[Override] = ()) -> Config:
    r"""Returns the configuration of a name or file, with overrides.

    Arguments:
        name: The name of a configuration that the package ships, or the path of a YAML file.
        overrides: `"section.key=value"` texts with YAML values, or `(key, value)` pairs, in
            which text is read as YAML too, except for options that are text.

    Raises:
        UserError: As :meth:`Config.from_mapping`, or if a file cannot be read.
    """
    layers = read_layers("configs", str(name), _is_section)
    return _merge([*layers, *map(_override, overrides)], layers[-1][0])


def shortened(config: Config, most: int) -> Config:
    r"""Returns a configuration whose trainings, a head's too, have at most some number of steps."""

    def cut(t: TrainingConfig) -> TrainingConfig:
        steps = min(t.steps, most)
        shorter = {"warmup": min(t.warmup, steps // 5), "eval_every": min(t.eval_every, steps)}
        return t if steps == t.steps else t.replace(steps=steps, **shorter)

    head = config.head and config.head.replace(training=cut(config.head.training))
    return config.replace(training=cut(config.training), head=head)


def with_seed(config: Config, seed: int) -> Config:
    r"""Returns the configuration with another seed; that of a head moves along with it."""
    training, head = config.training.replace(seed=seed), config.head
    if head is not None:
        own = head.training.seed + seed - config.training.seed
        head = head.replace(training=head.training.replace(seed=own))
    return config.replace(training=training, head=head)


def _is_section(key: str) -> bool:
    return key.removeprefix("head.") in SECTIONS


def _override(override: Override) -> Layer:
    return override_layer(override, _is_section, TEXTS)


def _merge(layers: Sequence[Layer], source: str) -> Config:
    r"""Returns the configuration of several layers, of which the last wins."""
    values, sources = merged(layers)
    return Config.of(values, source, sources)
