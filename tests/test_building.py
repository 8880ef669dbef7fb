r"""Tests for the ood_osdre.models.build module: what a configuration offers is what is built."""

from collections.abc import Iterable
from typing import Any, get_args

import pytest
import torch
from ood_osdre.conflicts import OPEN_SCHEDULES, STAGES, WIDTH_STEP

from ood_osdre.config import Config, load_config
from ood_osdre.errors import UserError
from ood_osdre.models.bases import KERNELS
from ood_osdre.models.build import build_ratio
from ood_osdre.models.networks import MLP, NORMS, CoefficientNetwork, ResNetBackbone
from ood_osdre.objectives import FORMS, LOSSES, Batch, JointScoreMatching, TimeScoreMatching
from ood_osdre.objectives.build import (
    NOISES,
    SCHEDULES,
    WEIGHTS,
    build_decoder,
    build_objective,
    build_path,
    build_times,
    prepare_objective,
)
from ood_osdre.options import option_types
from ood_osdre.paths.gaussian import Moments
from ood_osdre.resources import names
from ood_osdre.sections import BasisConfig, NetworkConfig, ObjectiveConfig, PathConfig
from ood_osdre.training.trainer import Trainer

NETWORK = {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("section", "name", "register"),
    [
        (BasisConfig, "kernel", KERNELS),
        (NetworkConfig, "norm", NORMS),
        # A network for images has no cell a dimension.
        (ObjectiveConfig, "conditional_form", set(FORMS) - {"per_dimension"}),
        (ObjectiveConfig, "endpoint_loss", LOSSES),
        (ObjectiveConfig, "weight", WEIGHTS),
        (PathConfig, "noise", NOISES),
        (PathConfig, "schedule", SCHEDULES),
    ],
)
def test_choices_are_those_of_the_registers(
    section: type, name: str, register: Iterable[str]
) -> None:
    assert set(get_args(option_types(section)[name])) == set(register)


def test_facts_of_the_configuration_are_those_of_the_parts() -> None:
    assert set(OPEN_SCHEDULES) == {name for name, make in SCHEDULES.items() if not make().closed}
    ResNetBackbone(WIDTH_STEP, (1,) * STAGES)
    with pytest.raises(ValueError, match="'width'"):
        ResNetBackbone(1.5 * WIDTH_STEP)


TERMS = [
    {"endpoint": 1.0},
    {"endpoint": 1.0, "endpoint_loss": "lsif", "endpoint_clean": True, "shrinkage": 0.1},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "per_block"},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "antithetic"},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "antithetic_per_block"},
    {"endpoint": 0.0, "path_difference": 1.0, "weight": "noise_variance"},
    {"endpoint": 0.0, "time_score": 1.0, "weight": "bridge"},
    {"endpoint": 0.0, "path_difference": 1.0, "weight": "constant"},
    {"endpoint": 1.0, "time_score": 1.0, "weight": "bridge"},
]


@pytest.mark.parametrize("terms", TERMS, ids=lambda t: "-".join(t))
@pytest.mark.parametrize("times", ["uniform", "logit_normal", "inverse_variance"])
def test_every_configured_objective_gives_finite_losses_and_gradients(
    terms: dict[str, object], times: str
) -> None:
    config = Config.from_mapping(
        {"network": NETWORK, "objective": terms, "times": {"kind": times}}
    )
    ratio = build_ratio(config, classes=5)
    path = build_path(config)
    x_0, x_1, noise = torch.randn(3, 6, 3, 16, 16)
    moments = Moments.of(x_0, x_1)
    distribution = build_times(config, path, moments)
    objective = build_objective(config, path, distribution, moments)
    losses = objective(ratio, Batch(x_0, x_1, distribution.sample(6), noise))

    assert all(loss.shape == (6,) and loss.isfinite().all() for loss in losses.values())
    losses["total"].mean().backward()
    gradient = ratio.network.head.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("noise", NOISES)
def test_every_configured_path_samples_on_its_interval(schedule: str, noise: str) -> None:
    config = Config.from_mapping({"path": {"schedule": schedule, "noise": noise}})
    path = build_path(config)
    x_0, x_1, z = torch.randn(3, 4, 2)
    t = torch.linspace(*path.t_range, 4)
    assert path.time_score(x_0, x_1, t, z).isfinite().all()


@pytest.mark.parametrize("name", names("configs"))
def test_every_shipped_configuration_builds(name: str) -> None:
    config = load_config(name)
    config = config.replace(network=config.network.replace(width=0.125))
    ratio, path = build_ratio(config, classes=10), build_path(config)
    x_0, x_1, noise = torch.randn(3, 2, 3, 32, 32)
    moments = Moments.of(x_0, x_1)
    times = build_times(config, path, moments)
    label = torch.tensor([0, 1])
    draw = Batch(x_0, x_1, times.sample(2), noise, label)
    losses = build_objective(config, path, times, moments, ratio)(ratio, draw)
    assert losses["total"].isfinite().all()


# Time score matching needs a weight that tames its ends.
JOINT = [{"conditional": 1.0}, {"time_score": 1.0, "weight": "noise_variance"}]


@pytest.mark.parametrize("terms", JOINT, ids=lambda t: next(iter(t)))
@pytest.mark.parametrize("kind", ["unet", "mlp"])
def test_a_data_score_trains_its_decoder_and_what_it_shares(
    kind: str, terms: dict[str, object]
) -> None:
    network = {"kind": kind, "width": 0.125, "norm": "group", "depths": [1, 1]}
    terms = {"endpoint": 0.0, "data_score": 1.0, **terms}
    config = Config.from_mapping({"network": network, "objective": terms})
    shape, features = ((3, 8, 8), None) if kind == "unet" else ((5,), 5)
    ratio = build_ratio(config, classes=0, features=features)
    x_0, x_1, noise = torch.randn(3, 6, *shape)
    times, objective = prepare_objective(config, Moments.of(x_0, x_1), ratio)
    draw = Batch(x_0, x_1, times.sample(6), noise, probe=torch.randn(x_0.shape))
    shared = set(map(id, ratio.parameters()))
    assert not shared & set(map(id, objective.parameters()))

    optimizer = torch.optim.Adam([*ratio.parameters(), *objective.parameters()], 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(objective(ratio, draw)["total"].mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    # A head that starts at zero lets no gradient through before its first step.
    assert all(p.grad is not None for p in objective.parameters())
    assert ratio.fold().log_ratio(x_1).shape == (6,)


def test_the_sliced_data_score_trains_on_images_through_a_configuration() -> None:
    config = Config.from_mapping(
        {
            "network": {"kind": "unet", "width": 0.125, "norm": "group"},
            "objective": {
                "endpoint": 0.0, "time_score": 1.0, "weight": "noise_variance", "data_score": 0.5,
            },
            "training": {"steps": 3, "batch_size": 4, "warmup": 1, "ema": 0.5},
        }
    )  # fmt: skip
    ratio = build_ratio(config, classes=0)
    x_0, x_1, noise = torch.randn(3, 4, 3, 16, 16)
    times, objective = prepare_objective(config, Moments.of(x_0, x_1), ratio)
    term = objective.terms["time_score"]
    assert isinstance(term, JointScoreMatching)
    assert term.balance == 0.5
    draws = []

    def batches(step: int) -> Batch:
        return Batch(x_0, x_1, times.sample(4), noise)

    objective.register_forward_pre_hook(lambda _, args: draws.append(args[1]))
    trainer = Trainer(ratio, objective, batches, config.training, select=None)
    before = {k: v.clone() for k, v in ratio.network.backbone.state_dict().items()}
    trainer.run(progress=False)
    # The trainer drew the directions: others in each step, the same in a run that is resumed.
    probes = [draw.probe for draw in draws]
    assert all(probe is not None and probe.shape == x_0.shape for probe in probes)
    assert not torch.equal(probes[0], probes[1])
    trainer.outcome.step = 0
    assert torch.equal(trainer._with_probe(batches(0)).probe, probes[0])

    moved = [
        k for k, v in ratio.network.backbone.state_dict().items() if not torch.equal(v, before[k])
    ]
    assert len(moved) == len(before)

    # The data score by itself reaches the encoder and the decoder.
    draw = draws[-1]
    at = {name: ratio.coefficients(x) for name, x in term.points(draw).items()}
    time_score = TimeScoreMatching(term.path, term.weight, term.times)
    only_data = (term.loss(ratio, draw, at) - time_score.loss(ratio, draw, at)).mean()
    for p in (ratio.network.backbone.stem.weight, term.data_score.head.weight):
        (gradient,) = torch.autograd.grad(only_data, p, retain_graph=True)
        assert gradient.abs().max() > 0


def test_options_of_the_end_point_loss_and_the_solver_arrive() -> None:
    config = Config.from_mapping({"objective": {"endpoint_loss": "chisq", "endpoint_cap": 5}})
    path, moments = build_path(config), Moments(4, 4.0, 0.0, 8.0)
    objective = build_objective(config, path, build_times(config, path, moments), moments)
    term = objective.terms["endpoint"]
    assert (term.kind, term.cap) == ("chisq", 5.0)
    timed = Config.from_mapping(
        {
            "estimator": "time_conditioned",
            "network": {**NETWORK, "norm": "group"},
            "objective": {"endpoint": 0, "time_score": 1},
            "evaluation": {"solver": "ode", "tolerance": 1e-5},
        }
    )
    ratio = build_ratio(timed, classes=0)
    assert (ratio.solver, ratio.tolerance) == ("ode", 1e-5)


@pytest.mark.parametrize("network", [NETWORK, {"kind": "mlp"}], ids=["resnet", "mlp"])
def test_the_octaves_of_the_time_arrive(network: dict[str, Any]) -> None:
    config = Config.from_mapping(
        {
            "estimator": "time_conditioned",
            "network": {**network, "norm": "group", "octaves": 2},
            "objective": {"endpoint": 0, "time_score": 1},
        }
    )
    ratio = build_ratio(config, classes=0, features=3)
    assert len(ratio.network.embedding.frequencies) == 2


@pytest.mark.parametrize("kind", ["uniform", "logit_normal", "inverse_variance"])
def test_stratified_times_arrive(kind: str) -> None:
    for stratified in (False, True):
        config = Config.from_mapping({"times": {"kind": kind, "stratified": stratified}})
        times = build_times(config, build_path(config), Moments(4, 4.0, 0.0, 8.0))
        assert times.stratified is stratified


def test_a_data_score_needs_a_backbone_with_a_decoder() -> None:
    config = Config.from_mapping({"network": NETWORK})
    path = build_path(config)
    with pytest.raises(UserError, match=r"objective\.data_score: needs a backbone"):
        build_decoder(path, build_ratio(config, classes=0))


def test_an_mlp_needs_the_dimension_of_its_inputs() -> None:
    config = Config.from_mapping({"network": {"kind": "mlp"}})
    with pytest.raises(UserError, match=r"network\.kind: got mlp, .* expected resnet for images"):
        build_ratio(config, classes=0)
    ratio = build_ratio(config, classes=0, features=3)
    assert isinstance(ratio.network, CoefficientNetwork)
    assert isinstance(ratio.network.backbone, MLP)
    assert ratio(torch.randn(2, 3)).shape == (2,)
