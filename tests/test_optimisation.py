r"""Tests for the ood_osdre.training.optimisation module."""

import itertools

import pytest
import torch
from torch import nn

from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import CoefficientNetwork, ResNetBackbone
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import EndPointLoss, Objective
from ood_osdre.paths.gaussian import GaussianPath
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import KumaraswamySchedule
from ood_osdre.sections import TrainingConfig
from ood_osdre.training.optimisation import (
    adamw,
    autocast_dtype,
    average_into,
    learning_rate_factor,
)

OPTIONS = TrainingConfig(steps=30, lr=1e-2, warmup=5, weight_decay=0.1, basis_lr_factor=0.5)


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    rates = [learning_rate_factor(s, OPTIONS) for s in range(OPTIONS.steps + 1)]
    assert rates[0] == pytest.approx(1 / 5)
    assert max(rates) == rates[4]
    assert rates[-1] == pytest.approx(0)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_only_weights_decay_and_every_parameter_is_trained_once() -> None:
    backbone = ResNetBackbone(0.125, (1, 1, 1, 1))
    network = CoefficientNetwork(backbone, backbone.features, 4, classes=3)
    ratio = OneStepRatio(network, RBFBasis(size=4))
    path = GaussianPath(KumaraswamySchedule(2), DDBINoise(0.1, 0.1, learnable=True))
    objective = Objective({"endpoint": (1.0, EndPointLoss(path))})
    groups = adamw(ratio, objective, OPTIONS).param_groups

    trained = [id(p) for g in groups for p in g["params"]]
    assert sorted(trained) == sorted(map(id, [*ratio.parameters(), *path.parameters()]))
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    peak = {id(p): g["peak"] for g in groups for p in g["params"]}
    for p in network.parameters():
        assert decay[id(p)] == (0.1 if p.ndim > 1 else 0.0)
        assert peak[id(p)] == 1e-2
    assert all(decay[id(p)] == 0 and peak[id(p)] == 1e-2 for p in path.parameters())
    assert all(decay[id(p)] == 0 and peak[id(p)] == 5e-3 for p in ratio.basis.parameters())


def test_the_average_holds_parameters_and_statistics_and_copies_counts() -> None:
    old, new = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    new(torch.randn(8, 3))
    nn.init.normal_(new.weight)
    expected = {k: 0.75 * v + 0.25 * new.state_dict()[k] for k, v in old.state_dict().items()} | {
        "num_batches_tracked": torch.tensor(1)
    }
    average_into(old, new, decay=0.75)

    for key, value in old.state_dict().items():
        torch.testing.assert_close(value, expected[key])


def test_automatic_precision_on_the_cpu_is_full() -> None:
    cpu = torch.device("cpu")
    types = [autocast_dtype(amp, cpu) for amp in ("auto", "none", "bf16", "fp16")]
    assert types == [None, None, torch.bfloat16, torch.float16]
