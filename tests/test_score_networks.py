r"""Tests of the networks of joint objectives, against the exact scores of a mixture."""

import math

import pytest
import torch
from torch import Tensor, nn

from ood_osdre.models.baselines import FiLM
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.models.unet import UNetDecoder, UNetEncoder, VectorDecoder, inverse_noise
from ood_osdre.objectives import (
    Batch,
    ConditionalJointScoreMatching,
    JointScoreMatching,
    Objective,
    Term,
)
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import TrigonometricSchedule
from ood_osdre.paths.times import InverseVarianceWeight, NoiseVarianceWeight
from ood_osdre.sections import TrainingConfig
from ood_osdre.tasks.partition import GaussianMixture
from ood_osdre.training.trainer import Trainer

PATH = GaussianPath(TrigonometricSchedule(), DDBINoise(0.05, 0.05))


def stir(module: nn.Module) -> None:
    r"""Makes parameters that start at zero differ from it."""
    for p in module.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)


def test_unet_encoder_takes_no_time_and_decoder_does() -> None:
    encoder = UNetEncoder((8, 16, 24))
    decoder = UNetDecoder(encoder)
    x = torch.randn(2, 3, 16, 16)
    assert [tuple(m.shape) for m in encoder.levels(x)] == [
        (2, 8, 16, 16),
        (2, 16, 8, 8),
        (2, 24, 4, 4),
    ]
    torch.testing.assert_close(encoder(x), encoder.feature_map(x).mean(dim=(2, 3)))
    assert not decoder(x, torch.rand(2)).any()
    stir(decoder)
    early, late = decoder(x, torch.zeros(2)), decoder(x, torch.ones(2))
    assert early.shape == x.shape
    assert not torch.allclose(early, late)
    # A point of a batch does not depend on the others.
    torch.testing.assert_close(decoder(x[:1], torch.zeros(1)), early[:1])


def test_unet_refuses_what_does_not_fit() -> None:
    with pytest.raises(AssertionError, match="divide by 4"):
        UNetEncoder((8, 16, 24))(torch.zeros(1, 3, 18, 16))


@pytest.mark.parametrize("kind", ["image", "vector"])
def test_encoder_belongs_to_the_ratio_alone(kind: str) -> None:
    encoder: nn.Module
    decoder: nn.Module
    if kind == "image":
        encoder = UNetEncoder((8, 16))
        decoder, x = UNetDecoder(encoder), torch.randn(2, 3, 8, 8)
    else:
        encoder = MLP(3, 16)
        decoder, x = VectorDecoder(encoder, 3), torch.randn(2, 3)
    own = {id(p) for p in decoder.parameters()}
    assert not own & {id(p) for p in encoder.parameters()}
    assert not any("encoder" in key for key in decoder.state_dict())
    # But the encoder gets the gradient of the data score.
    stir(decoder)
    decoder(x, torch.rand(2)).square().sum().backward()
    assert all(p.grad is not None for n, p in encoder.named_parameters() if "norm." not in n)


def test_scale_is_that_of_the_noise() -> None:
    encoder = MLP(2, 8)
    plain = VectorDecoder(encoder, 2)
    stir(plain)
    x, t = torch.randn(4, 2), torch.tensor([0.0, 0.3, 0.5, 1.0])
    before = plain(x, t)
    plain.scale = inverse_noise(PATH)
    v = 0.05 * t * (1 - t) + 0.05  # on a spherical path alpha^2 + beta^2 = 1
    torch.testing.assert_close(plain(x, t), before / v.sqrt()[:, None])


MEANS = torch.tensor([[2.0, 0.0], [-1.0, 1.5], [-1.0, -1.5]])
FACTORS = 0.4 * torch.eye(2).repeat(3, 1, 1)
DATA = GaussianMixture(MEANS.double(), FACTORS.double(), torch.ones(3).double() / 3)


def marginal(t: float) -> GaussianMixture:
    r"""The exact distribution of the path at a time, from N(0, I) to the mixture."""
    rates = PATH.rates(torch.tensor([t]))
    a, b, v = (r.item() for r in rates[:3])
    factors = math.sqrt(a**2 + v + (0.4 * b) ** 2) * torch.eye(2)
    return GaussianMixture(b * DATA.means, factors.repeat(3, 1, 1).double(), DATA.weights)


def exact_score(x: Tensor, t: float) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(marginal(t).log_density(x).sum(), x)[0]


def batches(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    x_0, noise, probe = torch.randn(3, 256, 2, generator=g)
    return Batch(x_0, DATA.sample(256, g), torch.rand(256, generator=g), noise, probe=probe)


@pytest.mark.parametrize("form", ["conditional", pytest.param("sliced", marks=pytest.mark.slow)])
def test_joint_objectives_learn_both_scores(form: str) -> None:
    encoder = MLP(2, 32, depth=2)
    ratio = OneStepRatio(CoefficientNetwork(encoder, 32, 8), RBFBasis(size=8))
    decoder = VectorDecoder(encoder, 2, scale=inverse_noise(PATH))
    batch = batches(10**6)
    term: Term
    if form == "conditional":
        weight = InverseVarianceWeight(PATH, Moments.of(batch.x_0, batch.x_1))
        term = ConditionalJointScoreMatching(PATH, decoder, weight)
    else:
        term = JointScoreMatching(PATH, decoder, NoiseVarianceWeight(PATH))
    options = TrainingConfig(
        steps=300, batch_size=256, lr=5e-3, warmup=20, ema=0.95, clip=10.0, amp="none"
    )
    trainer = Trainer(ratio, Objective({"joint": (1.0, term)}), batches, options, select=None)
    trainer.run(progress=False)

    g = torch.Generator().manual_seed(1)
    for t in (0.2, 0.5, 0.9):
        x = marginal(t).sample(2000, g)
        truth = exact_score(x, t)
        with torch.no_grad():
            error = decoder(x, torch.full((2000,), t)) - truth
        assert error.square().mean() < 0.25 * truth.square().mean(), (form, t)

    # The ratio of the dequantised ends.
    x = torch.cat([marginal(0.0).sample(1000, g), marginal(1.0).sample(1000, g)])
    truth = marginal(1.0).log_density(x) - marginal(0.0).log_density(x)
    correlation = torch.corrcoef(torch.stack([trainer.kept.log_ratio(x).detach(), truth]))[0, 1]
    assert correlation > 0.7


def test_joint_objective_trains_a_unet_on_images() -> None:
    encoder = UNetEncoder((8, 16))
    ratio = OneStepRatio(CoefficientNetwork(encoder, 16, 4), RBFBasis(size=4))
    decoder = UNetDecoder(encoder, inverse_noise(PATH))
    # Images of noise with two brightnesses: only their mean matters.
    g = torch.Generator().manual_seed(0)
    x_0, x_1, noise, probe = 0.5 * torch.randn(4, 32, 3, 8, 8, generator=g)
    batch = Batch(x_0 - 0.5, x_1 + 0.5, torch.rand(32, generator=g), 2 * noise, probe=2 * probe)
    weight = InverseVarianceWeight(PATH, Moments.of(batch.x_0, batch.x_1))
    term = ConditionalJointScoreMatching(PATH, decoder, weight, form="antithetic")
    options = TrainingConfig(steps=20, batch_size=32, lr=1e-2, warmup=2, ema=0.5, amp="none")
    trainer = Trainer(ratio, Objective({"j": (1.0, term)}), lambda s: batch, options, select=None)
    first = trainer.step(batch)["total"]
    trainer.run(progress=False)
    film = decoder.films[0]
    assert isinstance(film, FiLM)
    assert film.layer.weight.any()
    with torch.no_grad():
        assert trainer.objective(trainer.ratio, batch)["total"].mean() < 0.9 * first
        scores = [trainer.kept.log_ratio(x).mean().item() for x in (batch.x_0, batch.x_1)]
    assert scores[1] > scores[0]
