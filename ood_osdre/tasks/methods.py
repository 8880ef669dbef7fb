r"""The ways to estimate a density ratio on vectors: models, objectives and their options.

All methods of a comparison have the same backbone and differ in what the title of the row says:
the objective, and whether the time is in a temporal basis (one step), in the network (a solver)
or nowhere (direct).

The objectives of `os-dre` and `dre-inf` are not the same one. Both start from the squared error of
the marginal time score and have its minimiser, but `os-dre` trains
:class:`ood_osdre.objectives.PathDifference`, a central difference along the path (hence its
minimiser up to the error of the difference), and `dre-inf` time score matching, with the score's
time derivative by automatic differentiation. `os-dre-tsm` shares the objective of `dre-inf`, with
the derivative in closed form.
"""

__all__ = [
    "METHODS",
    "RATES",
    "Context",
    "FitOptions",
    "Method",
    "OptionsLike",
    "check_method",
    "direct",
    "fit_options",
    "likelihood",
    "one_step",
]

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field
from torch import nn

from ..errors import UserError, did_you_mean
from ..models import (
    MLP,
    CoefficientNetwork,
    DirectRatio,
    OneStepRatio,
    QuadraticFeatures,
    RatioModel,
    RBFBasis,
    TimeConditionedMLP,
    TimeConditionedRatio,
)
from ..objectives import (
    ConditionalScoreMatching,
    EndPointLoss,
    NormalisedLikelihood,
    Objective,
    PathDifference,
    Proposal,
    Term,
    TimeConditionedConditionalMatching,
    TimeConditionedScoreMatching,
    TimeScoreMatching,
)
from ..options import BatchSize, Count, Options, Positive, Weight, shown
from ..paths import DDBINoise, GaussianPath, InverseVarianceWeight, Moments
from ..sections import KernelName, Seed
from ..training.distributed import find_device
from .features import OrthonormalBasis, TimeConditionedFeatures

# The bridge's variance rate and the floor of D3RE's path, for standardised data.
D3RE_NOISE = 0.5, 0.005


# The peak learning rates of backbones: a linear head on fixed features takes steps a hundred times
# as large as a network, which they leave constant, and learns nothing at those of a network.
RATES = {"mlp": 2e-3, "quadratic": 0.1, "block_quadratic": 0.3}


class FitOptions(Options):
    r"""How a ratio is fitted; the same for every method of a comparison.

    Attributes:
        steps: The number of steps.
        batch_size: The number of pairs in a batch.
        lr: The peak learning rate; where options are given by name and change the backbone, that of
            :data:`RATES`, unless it is given, too.
        weight_decay: The weight decay of matrices.
        clip: The largest gradient norm; 0 for no clipping.
        ema: The decay of the averaged weights.
        seed: The seed of weights and batches.
        backbone: Features: a residual MLP, all quadratic ones, or quadratic ones within `block`.
        features: The width of an MLP.
        depth: The number of residual layers of an MLP.
        block: The size of the blocks of coordinates that block-quadratic features couple.
        kernel: The kernel of the temporal basis.
        size: Its number of atoms.
        sigma: The shapes of its atoms.
        learnable: Whether the shapes are trained.
        schedule: The schedule of the path.
        eps: The dequantisation floor of the path, a variance of the standardised data.
        gamma2: The variance rate of the path's bridge.
        standardise: How points are standardised to the moments of both sources pooled: not at
            all, by coordinate, or by the covariance, within blocks if the features have them.
        evaluations: The number of network evaluations of solver-based methods.
        cap: The log-ratio in nats beyond which exponential losses go on linearly, see
            :class:`ood_osdre.objectives.EndPointLoss`. Least squares, KLIEP and PW find no larger
            one.
        device: The device.
    """

    steps: Count = 1000
    batch_size: BatchSize = 512
    lr: Positive = 2e-3
    weight_decay: Weight = 0.0
    clip: Weight = 10.0
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.99
    seed: Seed = 0
    backbone: Literal["mlp", "quadratic", "block_quadratic"] = "mlp"
    features: Count = 128
    depth: Count = 3
    block: Count = 2
    kernel: KernelName = "rq"
    size: Count = 16
    sigma: Annotated[float, Field(gt=0.05)] = 0.5  # the floor of a basis
    learnable: bool = False
    schedule: Literal["linear", "trigonometric", "kumaraswamy_spherical"] = "trigonometric"
    eps: Positive = 1e-3
    gamma2: Weight = 0.0
    standardise: Literal["no", "scale", "whiten"] = "scale"
    evaluations: Annotated[int, Field(ge=2)] = 50
    cap: Positive = 30.0
    device: str = "cpu"

    def given(self, device: str, steps: int | None, lr: float | None) -> "FitOptions":
        r"""Returns the options with what a command line gives in place of its own.

        Arguments:
            device: The device.
            steps: The number of steps; None leaves it.
            lr: The peak learning rate; None leaves it.
        """
        steps = self.steps if steps is None else steps
        return self.replace(device=device, steps=steps, lr=self.lr if lr is None else lr)


#: What a caller may give for options: all of them, those that differ from the defaults, or none.
OptionsLike: TypeAlias = FitOptions | Mapping[str, Any] | None
# How a divergence is read off a fitted ratio.
Bound: TypeAlias = Literal["mean", "nwj", "dv", "infonce"]


def fit_options(options: OptionsLike, defaults: FitOptions) -> FitOptions:
    r"""Returns the options of a fit, defaults filled in.

    Arguments:
        options: All of them, or those that differ from the defaults by name; None for none.
        defaults: The defaults of what is fitted; their rate is for their backbone alone.

    Raises:
        UserError: If they are no options, one is unknown or out of range, or the device is not
            available.
    """
    if options is None:
        return defaults
    if isinstance(options, Mapping):
        backbone = options.get("backbone", defaults.backbone)
        suited = (
            {"lr": RATES.get(str(backbone), defaults.lr)} if backbone != defaults.backbone else {}
        )
        options = {**dict(defaults), **suited, **options}
    if not isinstance(options, FitOptions):
        options = FitOptions.of(options, "options")
    find_device(options.device, "options: device")
    return options


class Context(NamedTuple):
    r"""What a method builds its model and objective from.

    Attributes:
        dim: The dimension of the vectors.
        options: The options.
        path: The path between the standardised sources.
        moments: The moments of the standardised sources.
    """

    dim: int
    options: FitOptions
    path: GaussianPath
    moments: Moments


@dataclass(frozen=True)
class Method:
    r"""A way to estimate a ratio.

    Attributes:
        label: Its name in tables.
        model: Builds the untrained model.
        objective: Builds the objective.
        kernel: Whether it has a temporal basis.
        solver: Whether inference takes `evaluations` network evaluations rather than one.
        bound: How a divergence is read off, see :func:`ood_osdre.tasks.fit.divergence`.
    """

    label: str
    model: Callable[[Context], RatioModel]
    objective: Callable[[Context], Objective]
    kernel: bool = False
    solver: bool = False
    bound: Bound = "mean"


#: From a context to a backbone and the number of its features.
BuildBackbone: TypeAlias = Callable[[Context], tuple[nn.Module, int]]


def check_method(name: object, known: Iterable[str]) -> None:
    r"""Refuses a method that is not among those that can be used.

    Raises:
        UserError: If it is not.
    """
    known = tuple(known)
    if not isinstance(name, str) or name not in known:  # an array is equal to no text
        near = did_you_mean(name, known) if isinstance(name, str) else ""
        raise UserError(f"method: got {shown(name)}{near}, expected one of {', '.join(known)}.")


def one_step(context: Context, build: BuildBackbone | None = None) -> RatioModel:
    r"""Builds a one-step ratio, on an orthonormal recombination of the basis.

    Arguments:
        context: What it is built from.
        build: Builds the backbone; None for the one of the options.
    """
    o = context.options
    backbone, features = (build or _backbone)(context)
    basis = OrthonormalBasis(RBFBasis(o.kernel, o.size, o.sigma, learnable=o.learnable))
    return OneStepRatio(CoefficientNetwork(backbone, features, o.size), basis)


def direct(context: Context, build: BuildBackbone | None = None) -> RatioModel:
    r"""Builds a network whose one output is the log-ratio; arguments as for :func:`one_step`."""
    return DirectRatio(*(build or _backbone)(context))


def _time_conditioned(context: Context) -> RatioModel:
    r"""Builds a time-conditioned network under the trapezoidal rule."""
    o = context.options
    network: nn.Module
    if o.backbone == "mlp":
        network = TimeConditionedMLP(context.dim, o.features, o.depth)
    else:
        network = TimeConditionedFeatures(*_backbone(context))
    return TimeConditionedRatio(network, o.evaluations, context.path.t_range)


def _backbone(context: Context) -> tuple[nn.Module, int]:
    r"""Builds the backbone of the options and returns it with its number of features."""
    o = context.options
    if o.backbone == "mlp":
        return MLP(context.dim, o.features, o.depth), o.features
    quadratic = QuadraticFeatures(context.dim, None if o.backbone == "quadratic" else o.block)
    return quadratic, quadratic.features


def likelihood(context: Context, proposal: Proposal) -> Objective:
    r"""Builds the objective of the normalised likelihood.

    Arguments:
        context: What it is built from; its points are those of the reference as they are.
        proposal: The proposal.

    Raises:
        UserError: If the points are standardised, in which :math:`p_0` is another.
    """
    if (found := context.options.standardise) != "no":
        raise UserError(
            f"standardise: got {found!r} with a likelihood, expected 'no'; its reference is "
            "N(0, I) of the points as they are."
        )
    term = NormalisedLikelihood(proposal, context.path.t_range, context.options.cap)
    return Objective({"loss": (1.0, term)})


def _single(make: Callable[[Context], Term]) -> Callable[[Context], Objective]:
    return lambda context: Objective({"loss": (1.0, make(context))})


def _one_step(label: str, make: Callable[[Context], Term]) -> Method:
    return Method(label, one_step, _single(make), kernel=True)


def _direct(label: str, loss: str, bound: Bound = "mean") -> Method:
    make = _single(lambda c: EndPointLoss(loss=loss, clean=True, cap=c.options.cap))
    return Method(label, direct, make, bound=bound)


def _d3re(context: Context) -> Term:
    # A bridge of the data's own scale: with a thin one the target's noise drowns the rest.
    path = GaussianPath(context.path.schedule, DDBINoise(*D3RE_NOISE))
    weight = InverseVarianceWeight(path, context.moments)
    return TimeConditionedConditionalMatching(path, weight)


#: The methods by name.
METHODS: dict[str, Method] = {
    "os-dre": _one_step("OS-DRE", lambda c: PathDifference(c.path)),
    "os-dre-tsm": _one_step("OS-DRE (closed-form TSM)", lambda c: TimeScoreMatching(c.path)),
    "os-dre-conditional": _one_step(
        "OS-DRE (conditional)",
        lambda c: ConditionalScoreMatching(c.path, InverseVarianceWeight(c.path, c.moments)),
    ),
    "os-dre-logistic": _one_step("OS-DRE (logistic)", lambda c: EndPointLoss(c.path)),
    "dre-inf": Method(
        "DRE-∞",
        _time_conditioned,
        _single(lambda c: TimeConditionedScoreMatching(c.path)),
        solver=True,
    ),
    "d3re": Method("D³RE", _time_conditioned, _single(_d3re), solver=True),
    "logistic": _direct("Logistic", "logistic"),
    "kliep": _direct("KLIEP", "kliep"),
    "lsif": _direct("LSIF", "lsif"),
    "chisq": _direct("ChiSq", "chisq"),
    "pw": _direct("PW", "pw"),
    "nwj": _direct("NWJ", "nwj", bound="nwj"),
    "infonce": _direct("InfoNCE", "infonce", bound="infonce"),
    "mine": _direct("MINE", "mine", bound="dv"),
}
