r"""The sections of a configuration: every option's meaning, type, range and default.

A section is a group of options that one part of the package reads. :mod:`ood_osdre.config` puts the
sections together and holds the rules between them. The weight of an objective's term is a number
from 0, and 0 turns the term off.
"""

__all__ = [
    "FITTED",
    "BasisConfig",
    "DataConfig",
    "EvaluationConfig",
    "KernelName",
    "NetworkConfig",
    "ObjectiveConfig",
    "PathConfig",
    "Seed",
    "TimesConfig",
    "TrainingConfig",
]

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .options import BatchSize, Count, Natural, Options, Positive, Share, Text, Weight

KernelName: TypeAlias = Literal["matern32", "gaussian", "imq", "rq"]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000_000)]

# A width scales channels that are multiples of 64, and groups have 8 channels.
WIDTH_STEP, RESNET_STAGES = 1 / 8, 4
# The momentum of stochastic gradient descent, unless an option says another.
MOMENTUM = 0.9
# The scores of a classifier that ID training images are needed for.
FITTED = ("knn", "relative_mahalanobis")
# The score of a network by itself.
ALONE: tuple[Literal["log_ratio", "energy"], ...] = ("log_ratio",)


class NetworkConfig(Options):
    r"""The network :math:`x \mapsto h(x)` (:mod:`ood_osdre.models.networks`).

    Attributes:
        kind: A ResNet for images, an MLP for vectors, a small network of images that trains fast
            (:mod:`ood_osdre.models.speed`), or the encoder of a U-Net for images, whose decoder is
            trained where `objective.data_score` is on, and not deployed.
        width: A factor on the ResNet's channels 64, 128, 256, 512, the fast network's 32, 128, 128
            or the U-Net's 128, 256, 512, a multiple of 1/8; or on the MLP's 256 features.
        depths: The number of basic blocks in each of the ResNet's four stages; an MLP has one
            layer an entry.
        stem_stride: The stride of the ResNet's stem; 2 trades detail for a fourfold speed-up. A
            U-Net and the fast network take neither this nor `depths`.
        norm: Batch or group normalisation.
        classes_head: Whether a class head is built where `objective.class_weight` trains it.
        octaves: The number of frequencies in which a time-conditioned network sees the time.
    """

    kind: Literal["resnet", "mlp", "speed", "unet"] = "resnet"
    width: Positive = 1.0
    depths: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (2, 2, 2, 2)
    stem_stride: Count = 1
    norm: Literal["batch", "group"] = "batch"
    classes_head: bool = True
    octaves: Count = 5

    def _conflicts(self) -> Iterator[str]:
        if self.kind != "mlp" and self.width % WIDTH_STEP:
            yield f"width: got {self.width:g}, expected a multiple of {WIDTH_STEP:g}."
        if self.kind == "resnet" and len(self.depths) != RESNET_STAGES:
            yield f"depths: got {len(self.depths)} entries, expected {RESNET_STAGES}."
        if self.kind == "unet" and self.norm != "group":
            yield f"norm: got {self.norm}, expected group for network.kind unet."
        if self.kind == "speed" and self.norm != "batch":
            yield f"norm: got {self.norm}, expected batch for network.kind speed."


class BasisConfig(Options):
    r"""The temporal basis :math:`g(t)` (:mod:`ood_osdre.models.bases`).

    Attributes:
        kernel: The radial kernel.
        size: The number of atoms :math:`K`.
        sigma: The initial shape :math:`\sigma` of every atom; larger than `floor`.
        floor: The lower bound of the shapes.
        learnable: Whether the shapes are trained.
    """

    kernel: KernelName = "rq"
    size: Count = 16
    sigma: Positive = 0.5
    floor: Weight = 0.05
    learnable: bool = True

    def _conflicts(self) -> Iterator[str]:
        if self.sigma <= self.floor:
            yield f"sigma: got {self.sigma:g}, expected more than basis.floor ({self.floor:g})."


class PathConfig(Options):
    r"""The path :math:`x_t = \alpha x_0 + \beta x_1 + \sqrt{v} z` (:mod:`ood_osdre.paths.gaussian`).

    Attributes:
        schedule: The schedule of :math:`\alpha` and :math:`\beta`; the Kumaraswamy mixtures
            have parameters, trained through `objective.path_variance`.
        noise: The noise model of :math:`v`.
        gamma2: The bridge's variance :math:`\gamma^2`; with `objective.path_variance` its start.
        eps: The dequantisation variance :math:`\varepsilon`, never learnt.
        t_min: The distance of training times from 0 and 1; null for the schedule's own.
    """

    schedule: Literal[
        "linear",
        "trigonometric",
        "vp",
        "follmer",
        "kumaraswamy_affine",
        "kumaraswamy_spherical",
    ] = "trigonometric"
    noise: Literal["dequantisation", "bridge", "ddbi"] = "ddbi"
    gamma2: Weight = 0.01
    eps: Positive = 0.005
    t_min: Annotated[float, Field(ge=0, lt=0.5)] | None = None

    def _conflicts(self) -> Iterator[str]:
        if self.schedule in ("vp", "follmer") and self.t_min == 0:
            yield f"t_min: got 0, expected more, or null, with path.schedule {self.schedule}."


class TimesConfig(Options):
    r"""The distribution of training times.

    Attributes:
        kind: Uniform, logit-normal (mean -0.4, std 1), or proportional to :math:`1 / V(t)`.
        stratified: Whether the times of a batch are spread evenly, which can take most of its noise
            out of time score matching.
    """

    kind: Literal["uniform", "logit_normal", "inverse_variance"] = "uniform"
    stratified: bool = False


class ObjectiveConfig(Options):
    r"""The terms of the loss (:mod:`ood_osdre.objectives`) and their weights; 0 is off.

    Attributes:
        endpoint: The weight of the proper loss on :math:`\log \hat r` at the ends.
        endpoint_loss: Its form.
        endpoint_clean: Whether it sees the clean ends, not the path's dequantised ones.
        endpoint_cap: The log-ratio, in nats, from which its exponentials go on as tangents.
        class_weight: The weight of the class head's cross-entropy on ID data.
        label_smoothing: The share of its target that is spread evenly over all classes.
        outlier_exposure: The weight of the class head's uniformity on the reference.
        conditional: The weight of conditional score matching.
        conditional_form: Its form; all share one minimiser.
        data_score: The factor on the data score that a decoder learns beside `conditional`, by
            denoising, or beside `time_score`, by slices.
        time_score: The weight of time score matching with boundary terms.
        path_difference: The weight of the path-difference loss.
        delta: The step of the path difference.
        shrinkage: The weight of the squared log-ratio, which bounds it.
        path_variance: The weight of the path's own measure, :math:`\log \int V(t) \, dt`, which
            alone trains :math:`\gamma^2` of a bridge, and a Kumaraswamy schedule.
        weight: The weighting :math:`\lambda(t)` of the score-matching terms.
        separate_forwards: Whether reference and ID images pass the network apart, as in the paper's
            baselines. With batch normalisation that lets a network tell them apart in training only.
    """

    endpoint: Weight = 1.0
    endpoint_loss: Literal[
        "logistic", "nce", "infonce", "chisq", "pw", "pw_ridge", "lsif", "kliep"
    ] = "logistic"
    endpoint_clean: bool = False
    endpoint_cap: Positive = 10.0
    class_weight: Weight = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    outlier_exposure: Weight = 0.0
    conditional: Weight = 0.0
    conditional_form: Literal["scalar", "antithetic", "per_block", "antithetic_per_block"] = (
        "scalar"
    )
    data_score: Weight = 0.0
    time_score: Weight = 0.0
    path_difference: Weight = 0.0
    delta: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    shrinkage: Weight = 0.0
    path_variance: Weight = 0.0
    weight: Literal["constant", "bridge", "inverse_variance", "noise_variance"] = (
        "inverse_variance"
    )
    separate_forwards: bool = False


class DataConfig(Options):
    r"""What a batch is made of; ID and reference images get the same augmentation.

    Attributes:
        flip: Whether images are mirrored: never, at random, or alternating: in every other epoch,
            from the first or from the second at random (in OpenOOD, whose loaders name none, at random).
        crop: The padding, in pixels, of random crops; 0 for none.
        broaden: The share of the reference batch replaced by strong transforms of its images.
        mixture: The share of the reference batch replaced by ID images; with `broaden` at most 1.
        train_limit: The number of training images used of each set; null for all.
        reference_limit: That of the reference set, in place of `train_limit`; null for the same.
        val_limit: The number of validation images used of each set; null for all, but of the
            near images no more than twice as many as of the ID ones.
        hold_out_id: The number of a benchmark's ID training images that are left out of training,
            the same for every seed; `val_accuracy` is then theirs. Of a final run 0.
        hold_out_reference: The number of images at the end of a benchmark's reference that validate
            in place of ten of its classes, or of a tenth; null for those.
    """

    flip: Literal["none", "random", "alternating"] = "random"
    crop: Natural = 4
    broaden: Share = 0.0
    mixture: Annotated[float, Field(ge=0, lt=1)] = 0.0
    train_limit: Count | None = None
    reference_limit: Count | None = None
    val_limit: Count | None = None
    hold_out_id: Natural = 0
    hold_out_reference: Count | None = None

    def _conflicts(self) -> Iterator[str]:
        if self.broaden + self.mixture > 1:
            yield (
                f"mixture: got {self.mixture:g}, expected at most {1 - self.broaden:g}, what "
                f"data.broaden ({self.broaden:g}) leaves."
            )


class TrainingConfig(Options):
    r"""The training loop (:mod:`ood_osdre.training.trainer`); every length is in steps.

    Attributes:
        steps: The number of steps.
        batch_size: The number of (reference, ID) pairs in a batch.
        optimizer: AdamW, or stochastic gradient descent with Nesterov's momentum.
        lr: The peak learning rate.
        momentum: The momentum of `sgd`; 0 for none.
        weight_decay: The weight decay; none on norms, biases, basis and path. That of `sgd` is a
            part of the gradient.
        basis_lr_factor: A factor on the learning rate of the basis shapes.
        warmup: The steps of linear warm-up.
        decay: How the learning rate falls to zero: by a cosine over all steps, of which the warm-up
            is a factor, or linearly from the end of the warm-up.
        clip: The largest gradient norm; 0 for no clipping.
        ema: The decay of the averaged weights; 0 for none.
        eval_every: The steps between validations.
        amp: The autocast type. `auto` takes bf16 where a GPU has it, else fp16. On a CPU that has
            instructions for bf16 it times the first steps on images and takes the faster of bf16 and
            none; the choice is stored, so that a resumed run is the same run.
        compile: Whether the network is compiled.
        channels_last: Whether images are laid out channels-last, which convolutions like.
        checkpoint_every: The steps between checkpoints.
        seed: The seed of weights, batches and noise.
    """

    steps: Count = 10_000
    batch_size: BatchSize = 128
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    weight_decay: Weight = 5e-4
    basis_lr_factor: Weight = 0.1
    warmup: Natural = 500
    decay: Literal["cosine", "linear"] = "cosine"
    clip: Weight = 1.0
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eval_every: Count = 500
    amp: Literal["auto", "none", "bf16", "fp16"] = "auto"
    compile: bool = False
    channels_last: bool = True
    checkpoint_every: Count = 500
    seed: Seed = 0

    def _conflicts(self) -> Iterator[str]:
        if self.optimizer == "adamw" and self.momentum != MOMENTUM:
            yield f"momentum: got {self.momentum:g}, expected training.optimizer sgd with it."

    @classmethod
    def short(cls, steps: int) -> "TrainingConfig":
        r"""Returns a training of vectors from memory: single precision, validated 20 times."""
        twentieth = max(steps // 20, 1)
        return cls(
            steps=steps,
            warmup=twentieth,
            eval_every=twentieth,
            checkpoint_every=steps,
            amp="none",
            channels_last=False,
        )


class EvaluationConfig(Options):
    r"""Scoring and selection (:mod:`ood_osdre.evaluation.evaluate`).

    Attributes:
        batch_size: The number of images scored at once.
        select: Which step's averaged weights are kept: the last one's, or those with the largest of
            a validation quantity.
        use_ood_val: Whether selection sees the OOD validation lists; recorded in the run file.
        solver: How a time-conditioned score is integrated: by the trapezoidal rule, or by an
            adaptive Runge-Kutta method; the run record says how many evaluations it took.
        evaluations: The number of network evaluations of its trapezoidal rule.
        tolerance: The tolerance of its adaptive method, relative and, in nats, absolute. Errors
            differ from batch to batch, so it has to be well below the spread of the log-ratios.
        score: The score of a classifier (:mod:`ood_osdre.models.baselines`).
        neighbours: The :math:`k` of its nearest-neighbour score.
        parts: What of each network is the score: its log-ratio (of a classifier its score) or its
            energy, the log-sum-exp of its class logits. Two are summed, each standardised on ID
            validation images; such a score has no unit.
        together: Whose parts join in the sum: names of configurations, to be trained in the run
            folder, or folders of finished runs, of several seeds for that of the run's own.
    """

    batch_size: Count = 512
    select: Literal["last", "val_auroc", "val_near", "val_far"] = "last"
    use_ood_val: bool = False
    solver: Literal["trapezoid", "ode"] = "trapezoid"
    evaluations: Annotated[int, Field(ge=2)] = 10
    tolerance: Positive = 1e-3
    score: Literal["msp", "energy", "knn", "relative_mahalanobis"] = "msp"
    neighbours: Count = 50
    parts: Annotated[
        tuple[Literal["log_ratio", "energy"], ...], Field(strict=False, min_length=1)
    ] = ALONE
    together: Annotated[tuple[Text, ...], Field(strict=False)] = ()

    @property
    def is_sum(self) -> bool:
        r"""Whether the score is a sum, which has no unit, and no log-ratio."""
        return self.parts != ALONE or bool(self.together)

    @property
    def alone(self) -> "EvaluationConfig":
        r"""The same for the network alone."""
        return self.replace(parts=ALONE, together=())

    def _conflicts(self) -> Iterator[str]:
        for key, values in (("parts", self.parts), ("together", self.together)):
            if len(set(values)) < len(values):
                yield f"{key}: got {', '.join(values)}, expected each once."
        if self.is_sum and self.score in FITTED:
            yield f"score: got {self.score}, expected msp or energy where parts are summed."

    @property
    def selected_by(self) -> str | None:
        r"""The validation quantity that selects the step, as the trainer takes it; None: the last."""
        return None if self.select == "last" else self.select
