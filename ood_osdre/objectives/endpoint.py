r"""Losses of a density ratio on the log-ratio itself, at the two ends of the path.

A closed-form ratio allows them *during* training: the log-ratio is one inner product away from the
network's outputs.

**The bounds** of Donsker and Varadhan, and of Nguyen, Wainwright and Jordan (NWJ), lie below the
divergence :math:`\mathrm{KL}(p_1 \| p_0)` whatever the log-ratio :math:`f`, and touch it at the
true one.

**The likelihood.** With a known reference :math:`p_0 = \mathcal{N}(0, I)`, a ratio is a density,
:math:`\log \hat p = f + \log p_0`, and a log-ratio in closed form can be trained on the divergence
itself. The KLIEP loss :math:`\mathbb{E}_{p_0}[e^f] - \mathbb{E}_{p_1}[f]` is, up to a constant,
:math:`\mathrm{KL}(p_1 \| \hat p) + \hat Z - 1` with :math:`\hat Z = \int \hat p`: it is least
where :math:`\hat p = p_1`, which has :math:`\hat Z = 1`. What stands in its way is that a batch of
:math:`p_0` hardly ever visits the places where the ratio is large, so the first term is drawn from
a wider proposal of known density instead and weighted. A solver-based model would have to
differentiate through its solver to be trained like this.
"""

__all__ = [
    "LOSSES",
    "EndPointLoss",
    "EndTerm",
    "NormalisedLikelihood",
    "Proposal",
    "capped_exp",
    "log_normal",
]

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F

from ..paths import GaussianPath
from .base import Batch, Ratio, Term

# The public code of the paper adds these shares of second moments: of the ratio at the reference,
# of u = sqrt(r) / 2 at both ends.
CHISQ_RIDGE, PW_RIDGE = 0.1, 0.01

# Beyond, the norm of gradients overflows single precision, and clipping by it makes them zero.
LARGEST_EXPONENT = 30.0


def _logistic(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return F.softplus(f_0) + F.softplus(-f_1)


def _lsif(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    cap = min(cap, LARGEST_EXPONENT / 2)
    return capped_exp(2 * f_0, 2 * cap) / 2 - f_1.clamp(max=cap).exp()


def _kliep(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return capped_exp(f_0, cap) - f_1.clamp(max=min(cap, LARGEST_EXPONENT))


def _chisq(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return _lsif(f_0, f_1, cap) + CHISQ_RIDGE * capped_exp(2 * f_0, 2 * cap)


def _pw(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    cap = min(cap, LARGEST_EXPONENT / 1.5)
    return capped_exp(1.5 * f_0, 1.5 * cap) / 6 - (f_1.clamp(max=cap) / 2).exp() / 2


def _pw_ridge(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    ridge = PW_RIDGE / 4 * (capped_exp(f_0, cap) + capped_exp(f_1, cap))
    return _pw(f_0, f_1, cap) + ridge


def _infonce(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return F.softplus(f_0.logsumexp(dim=0) - f_1)


def _nwj(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return capped_exp(f_0, cap) - f_1


def _mine(f_0: Tensor, f_1: Tensor, cap: float) -> Tensor:
    return f_0.logsumexp(dim=0) - math.log(len(f_0)) - f_1


def capped_exp(f: Tensor, cap: float) -> Tensor:
    r"""Returns an exponential that goes on as its tangent, so that it still pulls back.

    Arguments:
        f: The exponents, with any shape.
        cap: Where the tangent begins; at most 30, whatever is given.
    """
    cap = min(cap, LARGEST_EXPONENT)
    return f.clamp(max=cap).exp() * (1 + (f - cap).clamp(min=0))


#: The losses by name, of (f_0, f_1, cap) with log-ratios (B,), to (B,).
LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "logistic": _logistic,
    # With as many reference points as ID points, noise-contrastive estimation is the logistic
    # loss.
    "nce": _logistic,
    "infonce": _infonce,
    "chisq": _chisq,
    "pw": _pw,
    "pw_ridge": _pw_ridge,
    "lsif": _lsif,
    "kliep": _kliep,
    "nwj": _nwj,
    "mine": _mine,
}


class EndTerm(Term):
    r"""Abstract term on the ends of the path.

    Arguments:
        path: The path, whose dequantised ends are used; None only for clean ends.
        clean: Whether to use the clean ends in place of the dequantised ones.

    Attributes:
        ends: Which of the two ends, reference and ID, the term needs.
        names: The names of their points.
    """

    ends = slice(0, 2)

    def __init__(self, path: GaussianPath | None = None, clean: bool = False) -> None:
        super().__init__()
        assert path is not None or clean, "no path to dequantise the ends"
        self.path, self.clean = path, clean
        self.names = (("x_0", "x_1") if clean else ("start", "end"))[self.ends]

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        ends = batch.x_0, batch.x_1
        if self.path is not None and not self.clean:
            ends = self.path.start(batch.x_0, batch.noise), self.path.end(batch.x_1, batch.noise)
        return dict(zip(self.names, ends[self.ends], strict=True))


class EndPointLoss(EndTerm):
    r"""A loss of a density ratio on the log-ratio at the two ends.

    With :math:`f_0` and :math:`f_1` the log-ratios at a reference and an ID point, the loss is

    - `"logistic"`: :math:`\log(1 + e^{f_0}) + \log(1 + e^{-f_1})`,
    - `"nce"`: the same, as a batch holds as many reference as ID points,
    - `"infonce"`: :math:`\log(1 + e^{-f_1} \sum e^{f_0})`, summed over the batch: to tell the ID
      point among itself and all reference points,
    - `"lsif"`: :math:`\frac{1}{2} e^{2 f_0} - e^{f_1}`,
    - `"chisq"`: the same and :math:`0.1 \, e^{2 f_0}`, the penalised least squares of the paper's
      code,
    - `"pw"`: :math:`\frac{1}{6} e^{3 f_0 / 2} - \frac{1}{2} e^{f_1 / 2}`, which weighs large
      ratios more than the logistic loss does and less than least squares,
    - `"pw_ridge"`: the same and :math:`\frac{0.01}{4} (e^{f_0} + e^{f_1})`, as the paper's code,
    - `"kliep"`: :math:`e^{f_0} - f_1`, which also normalises,
      :math:`\mathbb{E}_{p_0}[e^{f}] = 1` at its minimum,
    - `"nwj"`: the same, the bound of NWJ at the critic :math:`f + 1`; the gain of an ID point does
      not stop growing at the cap,
    - `"mine"`: :math:`\log \frac{1}{B} \sum e^{f_0} - f_1`, summed over the batch: the bound of
      Donsker and Varadhan.

    The minimiser of each is the log-ratio of the densities of those points: of the dequantised
    ends, as for the path losses, or of the clean ends. For `"chisq"` it is lower by
    :math:`\log 1.2`; for `"infonce"` and `"mine"` it is known up to a constant, which no AUROC
    notices; for `"pw_ridge"` it is an increasing function of the log-ratio that stays below
    :math:`2 \log 100 = 9.2`.

    For `"pw"`, the code that the paper builds on trains :math:`u = e^{f/2} / 2` and reads the
    ratio off as :math:`\sqrt{2u}`. The loss is minimised by :math:`(2u)^2 = r`, which is what this
    one says; the order of the scores is the same.

    Exponentials are capped at a log-ratio :math:`c`. Beyond :math:`c` the loss of a reference
    point goes on along its tangent and the gain of an ID point stops growing, so that gradients
    stay bounded, still pull an overshooting reference point back, and the minimiser becomes
    :math:`\min(\log r, c)`; with `"nwj"` it has no bound where :math:`\log r > c`. For single
    precision's sake no exponent is larger than 30: a cap above 30 for `"kliep"` and `"nwj"`, 20
    for `"pw"` and 15 for least squares counts as that. The logistic loss, InfoNCE and `"mine"`
    need no cap and ignore it.

    All but `"infonce"`, `"mine"`, `"chisq"` and `"pw_ridge"` are proper composite losses: they match the
    ratio in a Bregman divergence.

    Takes the arguments of :class:`EndTerm`, and:

    Arguments:
        loss: One of the keys of :data:`LOSSES`.
        cap: The cap :math:`c` in nats.

    References:
        | Density-ratio matching under the Bregman divergence (Sugiyama et al., 2012)
        | https://doi.org/10.1007/s10463-011-0343-8

        | Noise-contrastive estimation (Gutmann and Hyvärinen, 2010): `"logistic"`, `"nce"`
        | https://proceedings.mlr.press/v9/gutmann10a.html

        | Representation learning with contrastive predictive coding (van den Oord et al., 2018):
          `"infonce"`
        | https://arxiv.org/abs/1807.03748

        | A least-squares approach to direct importance estimation (Kanamori et al., 2009):
          `"lsif"`, `"chisq"`
        | https://jmlr.org/papers/v10/kanamori09a.html

        | Direct importance estimation for covariate shift adaptation (Sugiyama et al., 2008):
          `"kliep"`
        | https://doi.org/10.1007/s10463-008-0197-x

        | Binary losses for density ratio estimation (Zellinger, 2025): `"pw"`
        | https://arxiv.org/abs/2407.01371

        | Estimating divergence functionals and the likelihood ratio by convex risk minimization
          (Nguyen et al., 2010): `"nwj"`
        | https://arxiv.org/abs/0809.0853

        | Mutual Information Neural Estimation (Belghazi et al., 2018): `"mine"`
        | https://arxiv.org/abs/1801.04062
    """

    def __init__(
        self,
        path: GaussianPath | None = None,
        loss: str = "logistic",
        clean: bool = False,
        cap: float = 10.0,
    ) -> None:
        super().__init__(path, clean)
        assert loss in LOSSES, f"loss is {loss!r}, expected one of {tuple(LOSSES)}"
        assert cap > 0, f"cap is {cap}, expected more than 0"
        self.kind, self.cap = loss, cap

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f_0, f_1 = (ratio.log_ratio_at(at[name]) for name in self.names)
        return LOSSES[self.kind](f_0, f_1, self.cap)


class Proposal(Protocol):
    r"""A distribution of known density that random numbers are mapped to."""

    def place(self, u: Tensor, z: Tensor, /) -> Tensor:
        r"""Maps uniform numbers, :math:`(B)`, and normal ones, :math:`(B, d)`, to points."""

    def log_density(self, x: Tensor, /) -> Tensor:
        r"""Returns the log-density of points, in nats, with shape :math:`(B)`."""


class NormalisedLikelihood(Term):
    r"""The KLIEP loss against :math:`\mathcal{N}(0, I)`, its mass by importance sampling.

    .. math:: e^{f(y)} \, \frac{p_0(y)}{q(y)} - f(x_1) \, , \qquad y \sim q

    Its mean is that of the KLIEP loss, whatever the proposal :math:`q`, as long as it covers
    :math:`\hat p` and no weighted ratio is beyond the cap; its variance is small if :math:`q` is
    close to it. The batch's probe and time are what :math:`y` is made of; its reference points are
    not looked at, as the density of :math:`p_0` is known.

    Arguments:
        proposal: The proposal :math:`q`.
        t_range: The interval that the batch's times are uniform on; they choose the component.
        cap: The weighted log-ratio beyond which the exponential goes on linearly; at most 30.

    References:
        | Direct importance estimation with model selection (Sugiyama et al., 2008), KLIEP
        | https://papers.nips.cc/paper/3248
    """

    needs_probe = True

    def __init__(
        self,
        proposal: Proposal,
        t_range: tuple[float, float] = (0.0, 1.0),
        cap: float = 30.0,
    ) -> None:
        super().__init__()
        self.proposal, self.t_range, self.cap = proposal, t_range, cap

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        assert batch.probe is not None, "the likelihood needs the batch's probe"
        low, high = self.t_range
        y = self.proposal.place((batch.t - low) / (high - low), batch.probe)
        return {"proposal": y, "x_1": batch.x_1}

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f, f_1 = (ratio.log_ratio_at(at[name]) for name in ("proposal", "x_1"))
        y = self.points(batch)["proposal"]
        log_weight = log_normal(y) - self.proposal.log_density(y)
        return capped_exp(f + log_weight.to(f), self.cap) - f_1


def log_normal(x: Tensor) -> Tensor:
    r"""Returns the log-density of :math:`\mathcal{N}(0, I)` in double precision.

    Arguments:
        x: The points, with shape :math:`(N, d)`.

    Returns:
        The log-densities, in nats, with shape :math:`(N)`.
    """
    x = x.double()
    return -x.square().sum(dim=1) / 2 - x.shape[1] / 2 * math.log(2 * math.pi)
