r"""Models of a log-ratio: the one-step ratio, what it folds to, and direct ratios.

With coefficients :math:`h(x) \in \mathbb{R}^K` and a temporal basis :math:`g`, the model of the
time score :math:`\partial_t \log p_t(x)` and its integral over the time are

.. math::
    s(x, t) & = K^{-1/2} \langle h(x), g(t) \rangle \, , \\
    \log \hat{r}(x) & = \int_0^1 s(x, t) \, dt = K^{-1/2} \langle h(x), \bar{g} \rangle \, ,

so the log-ratio of ID data (:math:`t = 1`) to the reference (:math:`t = 0`) costs one network
evaluation. It is in nats, and larger means more ID. The factor :math:`K^{-1/2}` keeps the scale
of the score, at given coefficients' scale, independent of the basis' size.

After training :math:`\bar{g}` is a constant. If the coefficients are an affine function
:math:`W f(x) + b` of the backbone's features, then :math:`\log \hat{r}` is one too, with weights
:math:`K^{-1/2} \bar{g}^\top W`: :meth:`OneStepRatio.fold` gives the same scorer without the basis
and with a single output. A :class:`DirectRatio` has that network from the start. It knows no paths
and no times; the loss alone (:class:`ood_osdre.objectives.EndPointLoss`) makes it one direct
estimator or another.

A :class:`SummedScore` adds what several networks say of an input, log-ratios and class energies,
each in units of its own spread over ID data: a score, and no log-ratio.

Scores and ratios are formed in float32 at least, also under autocast: log-ratios of images
exceed what float16 can hold and what bfloat16 can resolve.
"""

__all__ = ["DirectRatio", "FoldedRatio", "OneStepRatio", "RatioModel", "SummedScore"]

import abc
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .bases import TemporalBasis
from .networks import CoefficientNetwork, Coefficients, Prediction, zeroed
from .speed import deployed

# A part that varies less than this, as a share of its largest value, does not: that is rounding.
LEAST_SPREAD = 1e-6


class RatioModel(nn.Module, abc.ABC):
    r"""Abstract model of a log-ratio: what training, evaluation and checkpoints work with.

    Attributes:
        in_nats: Whether its score is a log-ratio, in nats, that can be calibrated as one.
    """

    in_nats = True

    @abc.abstractmethod
    def outputs(self, x: Tensor) -> Coefficients | Prediction:
        r"""Evaluates the network, once, for the terms of an objective.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.

        Returns:
            The coefficients of a one-step ratio, the prediction of any other model.
        """

    def log_ratio_at(self, outputs: Any) -> Tensor:  # noqa: ANN401
        r"""Returns the log-ratios of outputs, with shape :math:`(B)`; of a classifier its score.

        Arguments:
            outputs: What :meth:`outputs` returned for :math:`B` inputs, or a part of it.
        """
        return outputs.score

    def predict(self, x: Tensor) -> Prediction:
        r"""Returns the scores and the class logits of inputs :math:`(B, *)`, in one pass."""
        outputs = self.outputs(x)
        parts = getattr(outputs, "parts", None)  # coefficients have none
        return Prediction(self.log_ratio_at(outputs), outputs.logits, parts)

    def log_ratio(self, x: Tensor) -> Tensor:
        r"""Returns the log-ratios in nats (larger = more ID), with shape :math:`(B)`.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
        """
        return self.predict(x).score

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the log-ratio, as :meth:`log_ratio` does."""
        return self.log_ratio(x)

    @torch.no_grad()
    def fold(self) -> "RatioModel":
        r"""Returns the model to deploy, in evaluation mode, sharing no memory with this one."""
        return deployed(self)


class OneStepRatio(RatioModel):
    r"""The time score and the log-ratio of a network and a basis.

    Arguments:
        network: A module from inputs :math:`(B, *)` to :class:`Coefficients`, or to a plain
            tensor of coefficients with shape :math:`(B, K)`. It takes no time.
        basis: A temporal basis of :math:`K` functions.

    Example:
        >>> from ood_osdre.models.bases import RBFBasis
        >>> from ood_osdre.models.networks import MLP
        >>> network = CoefficientNetwork(MLP(2, 16), features=16, size=8)
        >>> ratio = OneStepRatio(network, RBFBasis(size=8))
        >>> ratio.log_ratio(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(self, network: nn.Module, basis: TemporalBasis) -> None:
        super().__init__()
        self.network = network
        self.basis = basis
        self.scale = basis.size**-0.5

    def coefficients(self, x: Tensor) -> Coefficients:
        r"""Returns the :math:`K` coefficients of inputs :math:`(B, *)`, in one pass."""
        output = self.network(x)
        h = output if isinstance(output, Coefficients) else Coefficients(output)
        found, size = h.total.shape[-1], self.basis.size
        assert found == size, f"network: got {found} coefficients for a basis of {size}."
        return h

    def outputs(self, x: Tensor) -> Coefficients:
        r"""Returns the coefficients, as :meth:`coefficients` does."""
        return self.coefficients(x)

    def log_ratio_at(self, outputs: Coefficients) -> Tensor:
        r"""Returns the log-ratios in nats of coefficients, with shape :math:`(B)`."""
        return self.log_ratio_of(outputs.total)

    def score(self, h: Tensor, t: Tensor) -> Tensor:
        r"""Returns the time score :math:`K^{-1/2} \langle h, g(t) \rangle` of coefficients.

        Arguments:
            h: The coefficients, with shape :math:`(B, K)`, or those of each cell, with shape
                :math:`(B, S, K)`.
            t: The time, with shape :math:`(B)`.

        Returns:
            The scores, with shape :math:`(B)` or :math:`(B, S)`.
        """
        return self._contract(h, self.basis(t))

    def score_derivative(self, h: Tensor, t: Tensor) -> Tensor:
        r"""Returns :math:`\partial_t s = K^{-1/2} \langle h, g'(t) \rangle`.

        Arguments and shapes are those of :meth:`score`.
        """
        return self._contract(h, self.basis.derivative(t))

    def log_ratio_of(self, h: Tensor) -> Tensor:
        r"""Returns :math:`\log \hat{r} = K^{-1/2} \langle h, \bar{g} \rangle`, in nats.

        Arguments:
            h: The coefficients, with shape :math:`(*, K)`, for log-ratios with shape :math:`(*)`.
        """
        return self._contract(h, self.basis.integral())

    def time_score(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the time scores :math:`s(x, t)`, with shape :math:`(B)`.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
            t: The times, with shape :math:`(B)`.
        """
        return self.score(self.coefficients(x).total, t)

    @torch.no_grad()
    def fold(self) -> "FoldedRatio":
        r"""Returns the same scorer with the basis folded into a head of one output.

        The folded scorer shares no memory with this one and is in evaluation mode. In float32 it
        agrees up to rounding: within 1e-6 of :math:`K^{-1/2} \sum_k | h_k(x) \, \bar{g}_k |`, and
        what merged norms of the fast network add.

        Raises:
            TypeError: If the network is not a :class:`CoefficientNetwork` whose head is an affine
                `nn.Linear`, without forward hooks: then no such head exists.
        """
        network = self.network
        head = getattr(network, "head", network)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (network, head))
        # Exact types: a subclass, like a hook, may do something else to the head's output.
        if type(network) is not CoefficientNetwork or type(head) is not nn.Linear or hooked:
            hooks = f"head {type(head).__name__}, {'with' if hooked else 'without'} hooks"
            wanted = "expected a plain CoefficientNetwork with a plain nn.Linear, without"
            raise TypeError(f"fold: got {type(network).__name__} with {hooks}; {wanted}.")
        # In float64, so that the only rounding is that of the weights themselves.
        integral = copy.deepcopy(self.basis).double().integral()
        folded = nn.Linear(head.in_features, 1).to(head.weight)
        folded.weight.copy_((self.scale * integral @ head.weight.double())[None])
        bias = head.bias if head.bias is not None else torch.zeros_like(head.weight[:, 0])
        folded.bias.copy_(self.scale * integral @ bias.double())
        backbone, class_head = deployed(network.backbone), copy.deepcopy(network.class_head)
        return FoldedRatio(backbone, folded, class_head).eval()

    def _contract(self, h: Tensor, g: Tensor) -> Tensor:
        assert g.ndim <= h.ndim, f"t: got shape {tuple(g.shape[:-1])}, h has {tuple(h.shape)}."
        # Elementwise products and a sum, not a matrix product, which autocast would take to half
        # precision and some GPUs to TF32.
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        g = g.reshape(g.shape[:-1] + (1,) * (h.ndim - g.ndim) + g.shape[-1:])
        return self.scale * (h * g).sum(dim=-1)


class FoldedRatio(RatioModel):
    r"""The deployed scorer: a backbone under an affine head of one output, the log-ratio.

    Made by :meth:`OneStepRatio.fold`.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        head: The affine map from features to the log-ratio, one output.
        class_head: The affine map from features to class logits, or None.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Linear, class_head: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.class_head = backbone, head, class_head

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns the log-ratios and the class logits of inputs :math:`(B, *)`."""
        features = self.backbone(x).to(self.head.weight.dtype)
        logits = None if self.class_head is None else self.class_head(features)
        return Prediction(self._log_ratio(features), logits)

    def log_ratio(self, x: Tensor) -> Tensor:
        r"""Returns the log-ratio, without evaluating the class head."""
        return self._log_ratio(self.backbone(x))

    def _log_ratio(self, features: Tensor) -> Tensor:
        features = features.to(self.head.weight.dtype)
        found = self.head(features)
        if found.dtype != features.dtype:  # autocast; to switch it off costs more than a head
            with torch.autocast(features.device.type, enabled=False):
                found = self.head(features)
        return found.squeeze(-1)


class DirectRatio(FoldedRatio):
    r"""A backbone under an affine head of one output, the log-ratio in nats (larger = more ID).

    The head starts at zero. The network is that of a folded one-step ratio: both are deployed at
    the same cost.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
        classes: The number of classes :math:`C`; 0 for no class head.

    Example:
        >>> import torch
        >>> from ood_osdre.models.networks import MLP
        >>> ratio = DirectRatio(MLP(2, 16), features=16)
        >>> ratio.log_ratio(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(self, backbone: nn.Module, features: int, classes: int = 0) -> None:
        head = zeroed(nn.Linear(features, 1))
        super().__init__(backbone, head, nn.Linear(features, classes) if classes else None)


class SummedScore(RatioModel):
    r"""The sum of standardised parts of one or several networks: a score without a unit.

    With the parts :math:`a_i(x)`, their means :math:`m_i` and their standard deviations
    :math:`d_i` over ID validation images, the score is :math:`\sum_i (a_i(x) - m_i) / d_i`. So no
    weight is tuned, and larger means more ID; but it is no log-ratio. Each network is evaluated
    once. Logits are those of the first.

    Arguments:
        networks: The models, which are not copied. A model's part `log_ratio` is its score.
        names: What to call them.
        kinds: The parts of each: `"log_ratio"`, and `"energy"`, the log-sum-exp of its logits, for
            which it needs a class head.
    """

    in_nats = False

    def __init__(
        self, networks: Sequence[RatioModel], names: Sequence[str], kinds: Sequence[str]
    ) -> None:
        super().__init__()
        self.networks: Any = nn.ModuleList(networks)
        self.names, self.kinds = tuple(names), tuple(kinds)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(len(self.parts)).float())
        self.register_buffer("std", torch.ones(len(self.parts)).float())

    @property
    def parts(self) -> list[str]:
        r"""The names of the :math:`P` parts, those of one network side by side."""
        return [f"{name} {kind}" for name in self.names for kind in self.kinds]

    @property
    def network(self) -> nn.Module:
        r"""What holds the first network's `backbone` and `class_head`, if it has such."""
        return getattr(self.networks[0], "network", self.networks[0])

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns scores (no unit, larger = more ID), first logits and parts of inputs."""
        given = [network.predict(x) for network in self.networks]
        parts = torch.stack([_part(p, kind) for p in given for kind in self.kinds], dim=1)
        score = ((parts - self.mean) / self.std).sum(dim=1)
        return Prediction(score, given[0].logits, parts)

    @torch.no_grad()
    def standardise(self, parts: Tensor) -> None:
        r"""Takes the means and deviations of parts of ID data, with shape :math:`(N, P)`.

        Raises:
            UserError: If one is not finite or does not vary.
        """
        std, mean = torch.std_mean(parts.double(), dim=0, correction=0)
        for i, name in enumerate(self.parts):
            # A constant has a deviation of rounding; NaN compares as false.
            if not LEAST_SPREAD * parts[:, i].abs().max() < std[i] < torch.inf:
                raise UserError(
                    f"evaluation.parts: {name} has mean {mean[i]:.3g} and deviation {std[i]:.3g} "
                    f"over {len(parts)} ID images, expected finite numbers that vary."
                )
        self.mean.copy_(mean)
        self.std.copy_(std)

    @torch.no_grad()
    def fold(self) -> "SummedScore":
        r"""Returns the same sum of the folded networks."""
        folded = SummedScore([n.fold() for n in self.networks], self.names, self.kinds)
        folded.mean, folded.std = self.mean.clone(), self.std.clone()
        return folded.eval()


def _part(prediction: Prediction, kind: str) -> Tensor:
    r"""Returns a part of a model's prediction, with shape :math:`(B)`, in float32 at least."""
    given = prediction.score if kind == "log_ratio" else prediction.logits
    assert given is not None, "energy: needs class logits"
    single = given.to(torch.promote_types(given.dtype, torch.float32))
    return single if kind == "log_ratio" else single.logsumexp(dim=1)
