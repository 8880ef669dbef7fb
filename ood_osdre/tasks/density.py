r"""The density of a user's own rows of numbers, normalised as far as its mass is known.

A one-step ratio to :math:`p_0 = \mathcal{N}(0, I)` in coordinates without correlations,
:math:`z = L^{-1} (x - m)`, is a density there, :math:`\log \hat p(x) = \log \hat r(z) +
\log p_0(z) - \log |L| - \log \hat Z`, in nats: one forward pass a row, but for the solver methods.

The mass :math:`\hat Z` is estimated by importance sampling, from a mixture of Gaussians fitted to
training rows, and by annealing (:mod:`ood_osdre.tasks.partition`); both miss mass sooner than
invent it.
"""

__all__ = [
    "DEFAULTS",
    "OPTIONS",
    "PROPOSED",
    "Density",
    "draw_pairs_of",
    "fit_density",
    "likelihood_or",
    "masses",
]

import numbers
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor

from ..errors import UserError
from ..files import local
from ..options import shown
from ..training import checkpoint
from ..training.batches import Stream, step_generator
from .draws import error_of_mean, whitened_parts
from .fit import DrawPairs, RatioFit, empty_model, fit_ratio, log_density
from .methods import (
    METHODS,
    FitOptions,
    Method,
    OptionsLike,
    check_method,
    direct,
    fit_options,
    likelihood,
    one_step,
)
from .partition import (
    GaussianMixture,
    LogMass,
    annealed_mass,
    importance_mass,
    proposal_of,
    trusted,
)
from .rows import Affine, Whitening, read_rows

#: How a ratio to :math:`p_0` is fitted: to points as they are, of which its density is known.
OPTIONS = FitOptions(steps=600, standardise="no", lr=1e-3)
#: The same for a user's own rows.
DEFAULTS = OPTIONS.replace(steps=1000)

# Draws of importance sampling, and of how many such lots rows are drawn at most.
DRAWS, LOTS = 20_000, 100
# The checkpoint of a density, and the points along the side of its plot.
NAME, POINTS = "density", 121

#: Labels and models of the methods that are trained on a likelihood, and need a proposal for it.
PROPOSED = {
    "os-dre-likelihood": ("OS-DRE (likelihood)", one_step),
    "direct-likelihood": ("Direct (likelihood)", direct),
}
LABELS = {name: m.label for name, m in METHODS.items()} | {k: v[0] for k, v in PROPOSED.items()}


@dataclass(frozen=True)
class Density:
    r"""A fitted density.

    Attributes:
        fit: The ratio, of whitened rows.
        whitening: The map to them.
        log_mass: What was divided by, :math:`\log \hat Z`, in nats.
        importance: Its estimate by importance sampling, with error and effective draws.
        annealed: Its estimate by annealing, None for solvers. Both miss mass sooner than invent
            it: where they differ by more than their errors, the likelihoods below are too high,
            if anything.
        log_likelihood: The mean normalised log-density of rows that were not fitted to, in nats.
        standard_error: That of this mean, without the error of :math:`\log \hat Z`.
        proposal: The mixture that rows are drawn from, those of :meth:`sample` after rejection.
    """

    fit: RatioFit
    whitening: Whitening
    log_mass: float
    importance: LogMass | None
    annealed: LogMass | None
    log_likelihood: float
    standard_error: float
    proposal: GaussianMixture

    def __repr__(self) -> str:
        return (
            f"Density({self.fit.method.label}, {len(self.whitening.mean)} columns, "
            f"{self.log_likelihood:.4g} ± {self.standard_error:.2g} nats a row)"
        )

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        r"""Returns the normalised log-density of rows, in nats and the units of the data.

        Arguments:
            x: The rows, with shape :math:`(N, d)`, or :math:`(N)` if they have one column.

        Returns:
            The log-densities, with shape :math:`(N)`.

        Raises:
            UserError: If the rows are no finite numbers, of another dimension, or too far from the
                data for single precision.
        """
        mean = self.whitening.mean
        rows = torch.as_tensor(read_rows("x", x, len(mean))).to(mean)
        z = self.whitening(rows).to(self.fit.standardise.mean)
        value = log_density(self.fit, z) + self.whitening.log_volume - self.log_mass
        if bad := int((~torch.isfinite(value)).sum()):
            raise UserError(f"x: {bad} of {len(rows)} rows are too far from the data of the fit.")
        return value.cpu().numpy()

    def sample(self, n: int, seed: int = 0) -> NDArray[np.float64]:
        r"""Draws independent rows, in the units of the data, with shape :math:`(n, d)`.

        They are draws of a mixture of Gaussians that are accepted in proportion to the density over
        the mixture's; where that is larger than in the first 20 000 draws, rows are too few.

        Arguments:
            n: The number of rows.
            seed: The seed; of one, the rows are the same at every call.

        Raises:
            UserError: If `n` is no count, or so few are accepted that two million draws do not give
                the rows.
        """
        if not isinstance(n, numbers.Integral) or n < 0:
            raise UserError(f"sample: got {shown(n)}, expected a number of rows.")
        device = self.fit.standardise.mean.device
        generator = step_generator(seed, Stream.TEST, 1, device)
        kept, count, bound = [], 0, None
        for _ in range(LOTS):
            z = self.proposal.sample(DRAWS, generator)
            weights = log_density(self.fit, z) - self.proposal.log_density(z)
            bound = weights.max() if bound is None else bound
            u = torch.rand(DRAWS, generator=generator, device=device, dtype=torch.float64)
            kept.append(z[u.log() < weights - bound])
            count += len(kept[-1])
            if count >= n:
                return self._placed(torch.cat(kept)[:n])
        raise UserError(
            f"sample: {count} of {DRAWS * LOTS} draws are accepted, expected {n}; the mixture that "
            "they are drawn from is not close to a density in so many dimensions."
        )

    def _placed(self, z: Tensor) -> NDArray[np.float64]:
        r"""Returns whitened rows in the units of the data."""
        mean, root = self.whitening
        return (z.to(mean) @ root.T + mean).cpu().numpy()

    def plot(self, ax: Any = None) -> Any:  # noqa: ANN401
        r"""Draws the density of one column as a curve, of two as an image, and returns the axes.

        Arguments:
            ax: Axes of matplotlib's; None for new ones.

        Raises:
            UserError: If there are more columns.
        """
        import matplotlib.pyplot as plt

        mean = self.whitening.mean.cpu().numpy()
        if len(mean) > 2:
            raise UserError(f"plot: got a density of {len(mean)} columns, expected one or two.")
        reach = 4 * np.linalg.norm(self.whitening.root.cpu().numpy(), axis=1)
        axes = [np.linspace(m - r, m + r, POINTS) for m, r in zip(mean, reach, strict=True)]
        ax = plt.subplots()[1] if ax is None else ax
        grid = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, len(mean))
        density = np.exp(self.log_density(grid))
        if len(mean) == 1:
            ax.plot(axes[0], density)
            ax.set(xlabel="x", ylabel="density")
        else:
            ax.pcolormesh(*axes, density.reshape(POINTS, POINTS), shading="nearest")
            ax.set(xlabel="column 0", ylabel="column 1")
        return ax

    def save(self, folder: str | os.PathLike[str]) -> None:
        r"""Writes the density, as safetensors, into a folder, which is created if needed."""
        fit = self.fit
        tensors = {
            f"{name}.{key}": tensor
            for name, part in (
                ("whitening", self.whitening._asdict()),
                ("standardise", {"mean": fit.standardise.mean, "matrix": fit.standardise.matrix}),
                ("proposal", vars(self.proposal)),
                ("model", fit.model.state_dict()),
            )
            for key, tensor in part.items()
        }
        metadata = {
            "method": next(k for k, label in LABELS.items() if label == fit.method.label),
            "options": fit.options.to_dict(),
            "fit": [fit.seconds, fit.history],
            "masses": [None if m is None else list(m) for m in (self.importance, self.annealed)],
            "numbers": [self.log_mass, self.log_likelihood, self.standard_error],
        }
        checkpoint.write_checkpoint(local(folder), NAME, tensors, metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], device: str = "cpu") -> "Density":
        r"""Reads a density that :meth:`save` wrote.

        Arguments:
            folder: The folder.
            device: Where to evaluate it.

        Raises:
            UserError: If the folder holds none, or it is damaged.
        """
        tensors, metadata, _ = checkpoint.read_checkpoint(local(folder), NAME)
        source = checkpoint.checkpoint_path(local(folder), NAME)
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = tensor.to(device)
        try:
            options = FitOptions.of({**metadata["options"], "device": device}, str(source))
            whitening, proposal = (
                Whitening(**parts["whitening"]),
                GaussianMixture(**parts["proposal"]),
            )
            method = likelihood_or(metadata["method"], proposal)
            model = empty_model(method, len(whitening.mean), options).to(device)
            checkpoint.restore(model, parts["model"], source)
            # In the precision that they were written in, whatever the default is now.
            model.load_state_dict(parts["model"], assign=True)
            affine = Affine(**parts["standardise"], dtype=next(model.parameters()).dtype)
            fit = RatioFit(method, model.eval(), options, affine, *metadata["fit"])
            importance, annealed = (m and LogMass(*m) for m in metadata["masses"])
            log_mass, mean, deviation = metadata["numbers"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{source}: not a density ({error}).") from None
        return cls(fit, whitening, log_mass, importance, annealed, mean, deviation, proposal)


def fit_density(
    x: ArrayLike, method: str = "os-dre", options: OptionsLike = None, progress: bool = False
) -> Density:
    r"""Fits a density to rows of numbers.

    A tenth of the rows selects the step, another the likelihood that is told. Copies of a row are
    all in one of these parts, and count as often as they occur; a warning says that there are
    some, and another that rows depend on their neighbours, as those of a time series do.

    Arguments:
        x: The rows, continuous numbers with shape :math:`(N, d)`, or :math:`(N)` for one column.
        method: One of those of the tabular suite: `os-dre` (along the path), `os-dre-likelihood`
            (better in a few dimensions, not to be trusted in many), `dre-inf`, `d3re`,
            `direct-likelihood`; or one of :data:`ood_osdre.tasks.methods.METHODS`.
        options: How the ratio is fitted: options by name that differ from :data:`DEFAULTS`, such
            as `{"steps": 3000}`, or :class:`ood_osdre.tasks.methods.FitOptions`.
        progress: Whether to show a progress bar.

    Raises:
        UserError: If the rows are no finite numbers, too few, or do not span their dimensions, or
            the method or an option is unknown.

    Example:
        >>> x = np.random.default_rng(0).normal(3.0, 2.0, size=(500, 2))
        >>> density = fit_density(x, options={"steps": 20})
        >>> density.log_density(x[:5]).shape
        (5,)
    """
    check_method(method, dict.fromkeys(("os-dre", *PROPOSED, *METHODS)))
    options = fit_options(options, DEFAULTS)
    whitening, marks, (test, val, train) = whitened_parts(read_rows("x", x), options)
    proposal = proposal_of(train)
    generator = step_generator(options.seed, Stream.TEST, 0, options.device)
    x_0 = torch.randn(val.shape, generator=generator, device=generator.device, dtype=val.dtype)
    fit = fit_ratio(
        likelihood_or(method, proposal),
        draw_pairs_of(train),
        train.shape[1],
        options,
        held_out=(x_0, val),
        progress=progress,
    )
    importance, annealed = masses(fit, proposal, train.shape[1], generator)
    log_mass = trusted(importance, annealed)
    value = log_density(fit, test) + whitening.log_volume - log_mass
    error = error_of_mean(value.cpu().numpy(), marks)
    return Density(
        fit, whitening, log_mass, importance, annealed, value.mean().item(), error, proposal
    )


def draw_pairs_of(train: Tensor) -> DrawPairs:
    r"""Returns the sampler of batches of the reference and of a table's rows."""

    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        x_0 = torch.randn(n, train.shape[1], generator=generator, device=device)
        i = torch.randint(len(train), (n,), generator=generator, device=device)
        return x_0, train[i]

    return draw_pairs


def likelihood_or(name: str, proposal: GaussianMixture | None) -> Method:
    r"""Returns one of :data:`METHODS`, or of :data:`PROPOSED`, which need a proposal."""
    if name not in PROPOSED:
        return METHODS[name]
    assert proposal is not None, f"the method {name!r} needs a proposal"
    label, model = PROPOSED[name]
    return Method(
        label, model, lambda context: likelihood(context, proposal), kernel=model is one_step
    )


def masses(
    fit: RatioFit, proposal: GaussianMixture | None, dim: int, generator: Generator
) -> tuple[LogMass | None, LogMass | None]:
    r"""Returns estimates of a density's log-mass by importance sampling and by annealing.

    The first is None without a proposal, the second for solvers, whose gradients cost too much.
    """
    importance = annealed = None
    if proposal is not None:
        importance = importance_mass(lambda y: log_density(fit, y), proposal, DRAWS, generator)
    if not fit.method.solver:
        # With gradients, hence not by the fit's own method.
        annealed = annealed_mass(lambda z: fit.model.log_ratio(fit.standardise(z)), dim, generator)
    return importance, annealed
