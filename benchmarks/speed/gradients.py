r"""Per-sample gradients of the losses on synthetic images, and their moments.

The gradient is that of the coefficient head, at its start :math:`s = 0`, under a fixed random
backbone: random ReLU features of the flat vector, or a small convolutional network with a 4x4
feature map. The data are smooth images in clusters, others for ID than for reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import Coefficients
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import Batch, Term
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import TrigonometricSchedule
from ood_osdre.paths.times import InverseVarianceWeight, Times, UniformTimes
from ood_osdre.training.batches import Stream, step_generator

GROUPS = 8
GRID = 4
GAMMA2, EPS = 0.01, 0.005
# The samples of each end from which the weight is made.
MOMENTS = 8192


@dataclass
class Clusters:
    r"""Smooth images in clusters, of second moment about one a pixel.

    Arguments:
        centres: The centres, with shape :math:`(C, 3, 8, 8)`.
    """

    centres: Tensor

    @classmethod
    def random(cls, generator: torch.Generator, count: int = 10) -> "Clusters":
        r"""Draws the centres."""
        return cls(torch.randn(count, 3, 8, 8, generator=generator))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        r"""Draws images, with shape :math:`(n, 3, 32, 32)`."""
        cluster = torch.randint(len(self.centres), (n,), generator=generator)
        coarse = self.centres[cluster] + torch.randn(n, 3, 8, 8, generator=generator)
        return F.interpolate(coarse, scale_factor=4, mode="bicubic") / 1.3


class RandomFeatures(nn.Module):
    r"""Random ReLU features of the flat image, as a feature map of one cell."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(3072, features)
        nn.init.normal_(self.linear.weight, std=3072**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.linear(x.flatten(1)).relu()[:, None]


class RandomConvolutions(nn.Module):
    r"""Random convolutions, as a feature map of 4x4 cells."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, 16), (16, 32), (32, features)):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()]
            nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.layers(x).flatten(2).transpose(1, 2)


@dataclass
class Measurement:
    r"""The moments of per-sample gradients.

    Attributes:
        means: The mean of each group of samples, with shape :math:`(G, P)`.
        second_moment: The mean squared norm.
        batch_noise: The trace of the covariance of a batch's mean, times the size of the batch: the
            noise of a sample, where those of a batch are independent.
    """

    means: Tensor
    second_moment: float
    batch_noise: float

    @classmethod
    def of(cls, batches: Iterator[Tensor]) -> "Measurement":
        r"""Accumulates batches of per-sample gradients, each with shape :math:`(B, P)`."""
        of_batches, squares, size = [], [], 0
        for g in batches:
            of_batches.append(g.mean(dim=0).double())
            squares.append(float(g.double().square().sum(dim=1).mean()))
            size = len(g)
        stacked = torch.stack(of_batches)
        return cls(
            means=torch.stack([stacked[i::GROUPS].mean(dim=0) for i in range(GROUPS)]),
            second_moment=sum(squares) / len(squares),
            batch_noise=size * float(stacked.var(dim=0).sum()),
        )

    def signal(self) -> float:
        r"""Returns the squared norm of the expected gradient."""
        return _square_of_mean(self.means)


def _square_of_mean(means: Tensor) -> float:
    n = len(means)
    return float((means.sum(0).square().sum() - means.square().sum()) / (n * (n - 1)))


class Bench:
    r"""One backbone on one stream of draws.

    Arguments:
        backbone: A map from images to features of each cell, with shape :math:`(B, S, F)`.
        samples: The number of samples of a measurement.
        batch: The number of samples of a batch.
        seed: The seed of the clusters and of the draws.
    """

    def __init__(self, backbone: nn.Module, samples: int, batch: int, seed: int) -> None:
        self.backbone, self.samples, self.batch, self.seed = backbone, samples, batch, seed
        generator = step_generator(seed, Stream.BATCH, 0, "cpu")
        self.reference, self.id = Clusters.random(generator), Clusters.random(generator)
        self.ratio = OneStepRatio(nn.Identity(), RBFBasis("rq", 16, sigma=0.5))
        self.path = GaussianPath(TrigonometricSchedule(), DDBINoise(GAMMA2, EPS))
        ends = (clusters.sample(MOMENTS, generator) for clusters in (self.reference, self.id))
        self.weight = InverseVarianceWeight(self.path, Moments.of(*ends))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        r"""Returns what multiplies the head's weight and bias in each cell, (B, S, F + 1)."""
        maps = self.backbone(x)
        return F.pad(maps, (0, 1), value=1.0) / maps.shape[1]

    def draws(self, times: Times | None = None) -> Iterator[Batch]:
        r"""Yields the batches, the same for every measurement with the same times.

        Arguments:
            times: The distribution of times; independent uniform ones if None.
        """
        times = UniformTimes() if times is None else times
        for step in range(self.samples // self.batch):
            generator = step_generator(self.seed, Stream.MOMENTS, step, "cpu")
            x_0 = self.reference.sample(self.batch, generator)
            x_1 = self.id.sample(self.batch, generator)
            t = times.sample(self.batch, generator)
            yield Batch(x_0, x_1, t, torch.randn(x_0.shape, generator=generator))

    def gradients(self, term: Term, times: Times | None = None) -> Iterator[Tensor]:
        r"""Yields the per-sample gradients of a term, each with shape :math:`(B, K (F + 1))`.

        Arguments:
            term: The term.
            times: The distribution of times; independent uniform ones if None.
        """
        size = self.ratio.basis.size
        for draw in self.draws(times):
            maps = {name: self.features(x) for name, x in term.points(draw).items()}
            cells = [torch.zeros(*m.shape[:2], size, requires_grad=True) for m in maps.values()]
            at = {n: Coefficients(c.sum(dim=1), c) for n, c in zip(maps, cells, strict=True)}
            loss = term.loss(self.ratio, draw, at)
            # A sample's loss depends on its own outputs only: one backward pass for all.
            slopes = torch.autograd.grad(loss.sum(), cells)
            parts = [_head_gradient(s, m) for s, m in zip(slopes, maps.values(), strict=True)]
            yield torch.stack(parts).sum(dim=0)

    @torch.no_grad()
    def block_gradients(self, delta: float) -> Iterator[Tensor]:
        r"""Yields low-noise gradients with the expectation of the block forms'."""
        path, side = self.path, 32 // GRID
        for draw in self.draws():
            t = draw.t
            times = (t + delta).clamp(max=1), (t - delta).clamp(min=0)
            later, earlier = (path.sample(draw.x_0, draw.x_1, u, draw.noise) for u in times)
            x_t = path.sample(draw.x_0, draw.x_1, t, draw.noise)
            changes = []
            for b in range(GRID**2):
                row, column = (slice(side * i, side * (i + 1)) for i in divmod(b, GRID))
                ends = [x_t.clone(), x_t.clone()]
                for moved, source in zip(ends, (later, earlier), strict=True):
                    moved[:, :, row, column] = source[:, :, row, column]
                f_later, f_earlier = self.features(torch.cat(ends))[:, b].chunk(2)
                changes.append((f_later - f_earlier) / (times[0] - times[1])[:, None])
            slope = -2 * self.weight.value(t)[:, None] * self.ratio.scale * self.ratio.basis(t)
            yield _head_gradient(slope[:, None], torch.stack(changes, dim=1).sum(1, True))


def _head_gradient(slopes: Tensor, features: Tensor) -> Tensor:
    r"""Chains slopes in the cells (B, S, K) to the head's parameters, (B, K (F + 1))."""
    return torch.einsum("bsk,bsf->bkf", slopes, features).flatten(1)
