r"""The joint objectives on the eight Gaussians of the plane, against the exact scores.

    python benchmarks/joint_score.py [--steps 1500] [--out DIR]

An MLP gives the coefficients and, under a time-conditioned decoder, the data score; both are
trained together, by the conditional form and by the sliced (Hutchinson) one. At every time the
path's distribution is a mixture of Gaussians, so that data score and log-ratio have closed forms.
Prints the relative squared error of the data score at five times and how well the ratio fits,
beside a ratio trained without a data score for as many steps; draws the scores as arrows.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_tables
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from ood_osdre.bases import RBFBasis
from ood_osdre.data.batches import step_generator
from ood_osdre.files import atomic_path
from ood_osdre.networks import MLP, CoefficientNetwork
from ood_osdre.noises import DDBINoise
from ood_osdre.objectives import (
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    Draw,
    InverseVarianceWeight,
    JointScoreMatching,
    NoiseVarianceWeight,
    Objective,
    Term,
    TimeScoreMatching,
)
from ood_osdre.paths import GaussianPath, Moments
from ood_osdre.ratio import OneStepRatio
from ood_osdre.records import RunRecord
from ood_osdre.schedules import TrigonometricSchedule
from ood_osdre.score_networks import VectorDecoder, inverse_noise
from ood_osdre.sections import TrainingConfig
from ood_osdre.tasks.mixtures import GaussianMixture
from ood_osdre.training import Trainer

RESULTS = Path(__file__).parent / "results" / "joint_score"

PATH = GaussianPath(TrigonometricSchedule(), DDBINoise(0.05, 0.05))
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
BATCH, WIDTH = 512, 64
ANGLES = torch.arange(8) * math.pi / 4
SPREAD = 0.5 / 1.414
DATA = GaussianMixture(
    4 / 1.414 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1).double(),
    SPREAD * torch.eye(2).repeat(8, 1, 1).double(),
    torch.full((8,), 1 / 8, dtype=torch.float64),
)
FORMS = ("conditional", "conditional alone", "sliced", "time score alone")


def marginal(t: float) -> GaussianMixture:
    r"""Returns the exact distribution of the path at a time."""
    alpha, beta, v = (rate.item() for rate in PATH.rates(torch.tensor([t]))[:3])
    sigma = math.sqrt(alpha**2 + (beta * SPREAD) ** 2 + v)
    factors = sigma * torch.eye(2).repeat(8, 1, 1).double()
    return GaussianMixture(beta * DATA.means, factors, DATA.weights)


def exact_score(x: Tensor, t: float) -> Tensor:
    r"""Returns the exact data score of points, with shape :math:`(N, 2)`."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(marginal(t).log_density(x).sum(), x)[0]


def batches(step: int) -> Draw:
    r"""Returns the batch of a step."""
    g = step_generator(0, 0, step, "cpu")
    x_0, noise, probe = torch.randn(3, BATCH, 2, generator=g)
    return Draw(
        x_0, DATA.sample(BATCH, g).float(), torch.rand(BATCH, generator=g), noise, probe=probe
    )


def fit(form: str, steps: int) -> tuple[OneStepRatio, VectorDecoder]:
    r"""Trains a ratio, and a decoder where the form has a data score."""
    torch.manual_seed(0)
    encoder = MLP(2, WIDTH, depth=3)
    ratio = OneStepRatio(CoefficientNetwork(encoder, WIDTH, 16), RBFBasis(size=16))
    decoder = VectorDecoder(encoder, 2, scale=inverse_noise(PATH))
    draw = batches(10**6)
    conditional = InverseVarianceWeight(PATH, Moments.of(draw.x_0, draw.x_1))
    marginal_weight = NoiseVarianceWeight(PATH)
    terms: dict[str, Term] = {
        "conditional": ConditionalJointScoreMatching(PATH, decoder, conditional, "antithetic"),
        "conditional alone": ConditionalScoreMatching(PATH, conditional, form="antithetic"),
        "sliced": JointScoreMatching(PATH, decoder, marginal_weight),
        "time score alone": TimeScoreMatching(PATH, marginal_weight),
    }
    options = TrainingConfig(
        steps=steps, batch_size=BATCH, lr=2e-3, warmup=50, ema=0.99, clip=10.0, amp="none"
    )
    objective = Objective({"loss": (1.0, terms[form])})
    trainer = Trainer(ratio, objective, batches, options, select=None)
    trainer.run()
    kept = trainer.kept
    assert isinstance(kept, OneStepRatio)
    return kept, decoder


@torch.no_grad()
def judge(ratio: OneStepRatio, decoder: VectorDecoder | None) -> dict[str, float]:
    r"""Returns relative squared errors of the data score by time, and the fit of the log-ratio."""
    g = torch.Generator().manual_seed(1)
    found = {}
    for t in TIMES if decoder is not None else ():
        x = marginal(t).sample(4000, g).float()
        with torch.enable_grad():
            truth = exact_score(x, t)
        assert decoder is not None
        error = decoder(x, torch.full((len(x),), t)) - truth
        found[f"data score, t = {t}"] = (error.square().sum() / truth.square().sum()).item()
    x = torch.cat([marginal(t).sample(2000, g) for t in (0.0, 1.0)]).float()
    truth = marginal(1.0).log_density(x) - marginal(0.0).log_density(x)
    value = ratio.log_ratio(x)
    found["ratio, correlation"] = torch.corrcoef(torch.stack([value, truth.float()]))[0, 1].item()
    found["ratio, mean error (nats)"] = (value - truth).abs().mean().item()
    return found


def plot(path: Path, decoder: VectorDecoder, t: float = 0.7) -> None:
    r"""Draws the learnt and the exact data score at a time, side by side."""
    side = torch.linspace(-4, 4, 25)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        learnt = decoder(grid, torch.full((len(grid),), t))
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    for ax, score, title in zip(
        figure.subplots(1, 2, sharey=True),
        (learnt, exact_score(grid, t).float()),
        ("learnt", "exact"),
        strict=True,
    ):
        ax.quiver(*grid.T, *score.T, angles="xy", scale=60, width=0.003)
        ax.set_title(f"data score at t = {t}, {title}")
        ax.set_aspect("equal")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Trains the four forms, prints the table and writes it with its record and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    results = {}
    for form in FORMS:
        ratio, decoder = fit(form, args.steps)
        own = None if form.endswith("alone") else decoder
        results[form] = judge(ratio, own)
        if form == "conditional":
            plot(args.out / "data_score.png", decoder)
    print(bench_tables.joint_score(results))
    RunRecord(config={"steps": args.steps}, seed=0, device="cpu", results=results).write(
        args.out / "run.json"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
