r"""Measures how much of a training gradient is signal, for each objective, at d = 3072.

For the gradient :math:`g` of one sample's loss, the signal-to-noise ratio is

.. math:: \mathrm{SNR} = \frac{\| \mathbb{E} g \|^2}{\mathrm{tr} \, \mathrm{Cov}(g)} \, ,

so that a batch of about 1 / SNR samples has a mean gradient with as much signal as noise. The
gradient is that of the coefficient head, at its start :math:`s = 0`, under a fixed random
backbone: random ReLU features of the flat vector, or a small convolutional network with a 4x4
feature map. The data are smooth synthetic images in clusters, others for ID than for reference.

The noise is measured from each form's own samples, through the losses of the package. The signal
of the noisy forms cannot be measured that way (it would take some 1e8 samples); but forms with
the same minimiser have the same expected gradient, up to :math:`O(\delta^2)`, as the path
difference, and that has little noise. The block forms have an expected gradient of their own: its
path difference moves one block at a time. Squared means come without bias from pairs of
independent groups, and standard errors from the jackknife over groups; "direct" is the signal
from the form's own samples, a check where it is well above 1 / samples.

Example:
    python benchmarks/gradient_snr.py --samples 4096
"""

import argparse
import csv
import io
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_tables
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ood_osdre.bases import RBFBasis
from ood_osdre.experiment import device_name
from ood_osdre.files import write_text_atomic
from ood_osdre.networks import Coefficients
from ood_osdre.noises import DDBINoise
from ood_osdre.objectives import (
    ConditionalScoreMatching,
    Draw,
    EndPointLoss,
    InverseVarianceWeight,
    PathDifference,
    Term,
    TimeScoreMatching,
)
from ood_osdre.paths import GaussianPath, Moments
from ood_osdre.ratio import OneStepRatio
from ood_osdre.records import RunRecord
from ood_osdre.schedules import TrigonometricSchedule

RESULTS = Path(__file__).parent / "results" / "gradient_snr"
GROUPS = 8
GRID = 4
GAMMA2, EPS = 0.01, 0.005


@dataclass
class Clusters:
    r"""Smooth images in clusters, of second moment about one a pixel.

    Arguments:
        seed: The seed of the clusters' centres.
        count: The number of clusters.
    """

    seed: int
    count: int = 10

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.centres = torch.randn(self.count, 3, 8, 8, generator=generator)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        r"""Draws images, with shape :math:`(n, 3, 32, 32)`."""
        cluster = torch.randint(self.count, (n,), generator=generator)
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
    r"""Sums over the samples of per-sample gradients, in groups."""

    means: Tensor
    second_moment: float

    @classmethod
    def of(cls, batches: Iterator[Tensor]) -> "Measurement":
        r"""Accumulates batches of per-sample gradients, each with shape :math:`(B, P)`."""
        groups: list[list[Tensor]] = [[] for _ in range(GROUPS)]
        squares = []
        for i, g in enumerate(batches):
            groups[i % GROUPS].append(g.mean(dim=0).double())
            squares.append(float(g.double().square().sum(dim=1).mean()))
        means = torch.stack([torch.stack(group).mean(dim=0) for group in groups])
        return cls(means, sum(squares) / len(squares))

    def signal(self) -> tuple[float, float]:
        r"""Returns the squared norm of the expected gradient and its standard error."""
        everything = _square_of_mean(self.means)
        keep = torch.eye(GROUPS) == 0
        parts = torch.tensor([_square_of_mean(self.means[k]) for k in keep])
        error = ((GROUPS - 1) / GROUPS * (parts - parts.mean()).square().sum()).sqrt()
        return everything, float(error)


def _square_of_mean(means: Tensor) -> float:
    n = len(means)
    return float((means.sum(0).square().sum() - means.square().sum()) / (n * (n - 1)))


class Bench:
    r"""One backbone on one stream of draws.

    Arguments:
        backbone: A map from images to features of each cell, with shape :math:`(B, S, F)`.
        samples: The number of samples of a measurement.
        batch: The number of samples of a batch.
        seed: The seed of the draws.
    """

    def __init__(self, backbone: nn.Module, samples: int, batch: int, seed: int) -> None:
        self.backbone, self.samples, self.batch, self.seed = backbone, samples, batch, seed
        self.reference, self.id = Clusters(seed + 1), Clusters(seed + 2)
        self.ratio = OneStepRatio(nn.Identity(), RBFBasis("rq", 16, sigma=0.5))
        self.path = GaussianPath(TrigonometricSchedule(), DDBINoise(GAMMA2, EPS))
        generator = torch.Generator().manual_seed(seed)
        ends = (clusters.sample(8192, generator) for clusters in (self.reference, self.id))
        self.weight = InverseVarianceWeight(self.path, Moments.of(*ends))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        r"""Returns what multiplies the head's weight and bias in each cell, (B, S, F + 1)."""
        maps = self.backbone(x)
        return F.pad(maps, (0, 1), value=1.0) / maps.shape[1]

    def draws(self) -> Iterator[Draw]:
        r"""Yields the batches, the same for every measurement."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.samples // self.batch):
            x_0 = self.reference.sample(self.batch, generator)
            x_1 = self.id.sample(self.batch, generator)
            t = torch.rand(self.batch, generator=generator)
            yield Draw(x_0, x_1, t, torch.randn(x_0.shape, generator=generator))

    def gradients(self, term: Term) -> Iterator[Tensor]:
        r"""Yields the per-sample gradients of a term, each with shape :math:`(B, K (F + 1))`."""
        size = self.ratio.basis.size
        for draw in self.draws():
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


def measure(bench: Bench, model: str) -> list[dict[str, Any]]:
    r"""Returns one row a loss."""
    path, weight = bench.path, bench.weight
    forms = ["scalar", "antithetic"]
    if model == "images":
        forms += ["per_block", "antithetic_per_block"]
    terms: dict[str, Term] = {f: ConditionalScoreMatching(path, weight, f) for f in forms}
    terms["time score matching"] = TimeScoreMatching(path, weight)
    terms["path difference"] = PathDifference(path, weight)
    terms["end-point logistic"] = EndPointLoss(path)

    shared = Measurement.of(bench.gradients(PathDifference(path, weight, 0.005)))
    rows = []
    for name, term in terms.items():
        own = Measurement.of(bench.gradients(term))
        source = shared
        if name == "end-point logistic":
            source = own
        elif "per_block" in name:
            source = Measurement.of(bench.block_gradients(0.005))
        signal, error = source.signal()
        direct, direct_error = own.signal()
        noise = own.second_moment - signal
        rows.append(
            {
                "model": model,
                "loss": name,
                "points": len(term.points(next(bench.draws()))),
                "noise": noise**0.5,
                "signal": signal**0.5,
                "snr": signal / noise,
                "snr_error": error / noise,
                "samples_for_snr_1": noise / signal,
                "direct_snr": direct / noise,
                "direct_snr_error": direct_error / noise,
            }
        )
    return rows


def write(rows: list[dict[str, Any]], config: dict[str, Any], out: Path) -> str:
    r"""Writes the rows as CSV, with their record, and returns the table."""
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=[*rows[0], *config])
    writer.writeheader()
    writer.writerows({**row, **config} for row in rows)
    write_text_atomic(out / "gradient_snr.csv", file.getvalue())

    results = {f"{row['model']}, {row['loss']}": row for row in rows}
    RunRecord(
        config=config,
        seed=config["seed"],
        device=device_name(torch.device("cpu")),
        results=results,
    ).write(out / "run.json")
    return bench_tables.gradient_snr(results)


def main() -> None:
    r"""Runs both models and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=4096, help="samples a measurement")
    parser.add_argument("--batch", type=int, default=256, help="samples a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.samples < 2 * GROUPS * args.batch:
        parser.error(f"--samples should be at least {2 * GROUPS} batches, got {args.samples}.")

    start = time.process_time()
    models: dict[str, Callable[[], nn.Module]] = {
        "vectors": RandomFeatures,
        "images": RandomConvolutions,
    }
    rows = []
    for name, backbone in models.items():
        torch.manual_seed(args.seed)
        rows += measure(Bench(backbone(), args.samples, args.batch, args.seed), name)

    config: dict[str, Any] = {
        "path": f"trigonometric; DDBI gamma2={GAMMA2} eps={EPS}",
        "weight": "1 / V(t); times uniform; path-difference delta 0.02",
        "basis": "16 rational quadratics; sigma 0.5",
        "samples": args.samples,
        "batch": args.batch,
        "seed": args.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "CPU seconds": round(time.process_time() - start),
    }
    print(write(rows, config, args.out))


if __name__ == "__main__":
    main()
