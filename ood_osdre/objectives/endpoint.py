r"""Losses of a density ratio on the log-ratio itself, at the two ends of the path.

A closed-form ratio allows them *during* training: the log-ratio is one inner product away from the
network's outputs.
"""

__all__ = ["LOSSES", "EndPointLoss", "EndTerm", "capped_exp"]

from collections.abc import Callable, Mapping
from typing import Any

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
      :math:`\mathbb{E}_{p_0}[e^{f}] = 1` at its minimum.

    The minimiser of each is the log-ratio of the densities of those points: of the dequantised
    ends, as for the path losses, or of the clean ends. For `"chisq"` it is lower by
    :math:`\log 1.2`; for `"infonce"` it is known up to a constant, which no AUROC notices; for
    `"pw_ridge"` it is an increasing function of the log-ratio that stays below
    :math:`2 \log 100 = 9.2`.

    For `"pw"`, the code that the paper builds on trains :math:`u = e^{f/2} / 2` and reads the
    ratio off as :math:`\sqrt{2u}`. The loss is minimised by :math:`(2u)^2 = r`, which is what this
    one says; the order of the scores is the same.

    Exponentials are capped at a log-ratio :math:`c`. Beyond :math:`c` the loss of a reference
    point goes on along its tangent and the gain of an ID point stops growing, so that gradients
    stay bounded, still pull an overshooting reference point back, and the minimiser becomes
    :math:`\min(\log r, c)`. For single precision's sake no exponent is larger than 30: a cap above
    30 for `"kliep"`, 20 for `"pw"` and 15 for least squares counts as that. The logistic loss and
    InfoNCE need no cap and ignore it.

    All but `"infonce"`, `"chisq"` and `"pw_ridge"` are proper composite losses: they match the
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
