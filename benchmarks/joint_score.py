r"""The joint objectives on the eight Gaussians of the plane, against the exact scores.

    python benchmarks/joint_score.py [--steps 1500] [--out DIR]

An MLP gives the coefficients and, under a time-conditioned decoder, the data score; both are
trained together, by the conditional form and by the sliced (Hutchinson) one. At every time the
path's distribution is a mixture of Gaussians, so that data score and log-ratio have closed forms.
Prints the relative squared error of the data score at five times and how well the ratio fits,
beside a ratio trained without a data score for as many steps; draws the scores as arrows.

The ratio is judged as it is deployed, with averaged weights. The decoder, which no one deploys and
the trainer does not average, is judged with those of the last step, its own and the encoder's.
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
from outputs import require_writable
from torch import Tensor

from ood_osdre.errors import Parser, count, exit_status
from ood_osdre.evaluation.plots import save_png
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.files import local
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.models.unet import VectorDecoder, inverse_noise
from ood_osdre.objectives import (
    Batch,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    JointScoreMatching,
    Objective,
    Term,
    TimeScoreMatching,
)
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import TrigonometricSchedule
from ood_osdre.paths.times import InverseVarianceWeight, NoiseVarianceWeight
from ood_osdre.sections import TrainingConfig
from ood_osdre.tasks.partition import GaussianMixture
from ood_osdre.training.batches import Stream, step_generator
from ood_osdre.training.trainer import Trainer

OUT = Path("runs") / "joint_score"

GAMMA2 = EPS = 0.05
PATH = GaussianPath(TrigonometricSchedule(), DDBINoise(GAMMA2, EPS))
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
BATCH, WIDTH, SIZE, SEED = 512, 64, 16, 0
# The batch that the weights' moments are taken from, none that is trained on.
MOMENTS_STEP = 10**6
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


def batches(step: int) -> Batch:
    r"""Returns the batch of a step."""
    g = step_generator(SEED, Stream.BATCH, step, "cpu")
    x_0, noise, probe = torch.randn(3, BATCH, 2, generator=g)
    return Batch(
        x_0, DATA.sample(BATCH, g).float(), torch.rand(BATCH, generator=g), noise, probe=probe
    )


def training(steps: int) -> TrainingConfig:
    r"""Returns the options of training."""
    return TrainingConfig(
        steps=steps, batch_size=BATCH, lr=2e-3, warmup=50, ema=0.99, clip=10.0, amp="none"
    )


def fit(form: str, steps: int) -> tuple[OneStepRatio, VectorDecoder]:
    r"""Trains a ratio, and a decoder where the form has a data score."""
    torch.manual_seed(SEED)
    encoder = MLP(2, WIDTH, depth=3)
    ratio = OneStepRatio(CoefficientNetwork(encoder, WIDTH, SIZE), RBFBasis(size=SIZE))
    decoder = VectorDecoder(encoder, 2, scale=inverse_noise(PATH))
    draw = batches(MOMENTS_STEP)
    conditional = InverseVarianceWeight(PATH, Moments.of(draw.x_0, draw.x_1))
    marginal_weight = NoiseVarianceWeight(PATH)
    terms: dict[str, Term] = {
        "conditional": ConditionalJointScoreMatching(PATH, decoder, conditional, "antithetic"),
        "conditional alone": ConditionalScoreMatching(PATH, conditional, form="antithetic"),
        "sliced": JointScoreMatching(PATH, decoder, marginal_weight),
        "time score alone": TimeScoreMatching(PATH, marginal_weight),
    }
    objective = Objective({"loss": (1.0, terms[form])})
    trainer = Trainer(ratio, objective, batches, training(steps), select=None)
    trainer.run()
    kept = trainer.kept
    assert isinstance(kept, OneStepRatio)
    return kept, decoder


@torch.no_grad()
def score_errors(decoder: VectorDecoder, g: torch.Generator) -> dict[str, float]:
    r"""Returns the relative squared errors of the data score by time."""
    found = {}
    for t in TIMES:
        x = marginal(t).sample(4000, g).float()
        with torch.enable_grad():
            truth = exact_score(x, t)
        error = decoder(x, torch.full((len(x),), t)) - truth
        found[f"data score, t = {t}"] = (error.square().sum() / truth.square().sum()).item()
    return found


@torch.no_grad()
def ratio_errors(ratio: OneStepRatio, g: torch.Generator) -> dict[str, float]:
    r"""Returns how well the log-ratio fits, on points of both ends."""
    x = torch.cat([marginal(t).sample(2000, g) for t in (0.0, 1.0)]).float()
    truth = marginal(1.0).log_density(x) - marginal(0.0).log_density(x)
    value = ratio.log_ratio(x)
    correlation = torch.corrcoef(torch.stack([value, truth.float()]))[0, 1]
    return {
        "ratio, correlation": correlation.item(),
        "ratio, mean error (nats)": (value - truth).abs().mean().item(),
    }


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
    save_png(figure, path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Trains the four forms, prints the table and writes it with its record and figure."""
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=count(1), default=1500)
    parser.add_argument("--out", type=local, default=OUT)
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Trains the four forms, prints the table and writes it with its record and figure."""
    require_writable(args.out)
    results = {}
    for form in FORMS:
        ratio, decoder = fit(form, args.steps)
        g = torch.Generator().manual_seed(SEED + 1)
        results[form] = {} if form.endswith("alone") else score_errors(decoder, g)
        results[form] |= ratio_errors(ratio, g)
        if form == "conditional":
            plot(args.out / "data_score.png", decoder)
    print(bench_tables.joint_score(results))
    RunRecord(
        config={
            "steps": args.steps,
            "path": f"trigonometric; DDBI gamma2={GAMMA2} eps={EPS}",
            "width": WIDTH,
            "size": SIZE,
            "training": training(args.steps).to_dict(),
        },
        seed=SEED,
        device="cpu",
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
