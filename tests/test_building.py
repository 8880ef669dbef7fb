r"""What a configuration offers is what is built: networks, paths, times and objectives."""

from collections.abc import Iterable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ood_osdre.config import Config, load_config
from ood_osdre.errors import UserError
from ood_osdre.models.bases import KERNELS
from ood_osdre.models.networks import NORMS
from ood_osdre.models.ratio import RatioModel
from ood_osdre.objectives import FORMS, LOSSES, Batch, Objective
from ood_osdre.options import Options
from ood_osdre.paths import Moments, Times
from ood_osdre.resources import names
from ood_osdre.sections import BasisConfig, NetworkConfig, ObjectiveConfig, PathConfig
from ood_osdre.training.build import (
    NOISES,
    SCHEDULES,
    WEIGHTS,
    build_objective,
    build_path,
    build_ratio,
    build_times,
    prepare_objective,
)

NETWORK = {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2}
MOMENTS = Moments(4, 4.0, 0.0, 8.0)


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def make(
    shape: tuple[int, ...], classes: int = 0, **sections: object
) -> tuple[RatioModel, Times, Objective, Batch]:
    config = Config.from_mapping(sections)
    features = None if len(shape) == 3 else shape[0]
    ratio = build_ratio(config, classes, dim=features)
    x_0, x_1, noise, probe = torch.randn(4, 6, *shape)
    times, objective = prepare_objective(config, Moments.of(x_0, x_1), ratio)
    label = torch.arange(6) % max(classes, 1)
    return ratio, times, objective, Batch(x_0, x_1, times.sample(6), noise, label, probe)


@pytest.mark.parametrize(
    ("section", "name", "register"),
    [
        (BasisConfig, "kernel", KERNELS),
        (NetworkConfig, "norm", NORMS),
        # A network for images has no cell a dimension.
        (ObjectiveConfig, "conditional_form", set(FORMS) - {"per_dimension"}),
        # The bounds on a divergence are objectives of the tasks.
        (ObjectiveConfig, "endpoint_loss", set(LOSSES) - {"nwj", "mine"}),
        (ObjectiveConfig, "weight", WEIGHTS),
        (PathConfig, "noise", NOISES),
        (PathConfig, "schedule", SCHEDULES),
    ],
)
def test_choices_are_what_can_be_built(
    section: type[Options], name: str, register: Iterable[str]
) -> None:
    assert set(get_args(section.model_fields[name].annotation)) == set(register)


TERMS = [
    {"endpoint": 1.0, "endpoint_loss": "lsif", "endpoint_clean": True, "shrinkage": 0.1},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "per_block"},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "antithetic"},
    {"endpoint": 0.0, "conditional": 1.0, "conditional_form": "antithetic_per_block"},
    {"endpoint": 0.0, "path_difference": 1.0, "weight": "noise_variance"},
    {"endpoint": 1.0, "time_score": 1.0, "weight": "bridge"},
    {"endpoint": 0.0, "path_difference": 1.0, "weight": "constant"},
]


@pytest.mark.parametrize("terms", TERMS, ids=lambda t: "-".join(t))
@pytest.mark.parametrize("times", ["uniform", "logit_normal", "inverse_variance"])
def test_every_configured_objective_gives_finite_losses_and_gradients(
    terms: dict[str, object], times: str
) -> None:
    ratio, _, objective, batch = make(
        (3, 16, 16), network=NETWORK, objective=terms, times={"kind": times}
    )
    losses = objective(ratio, batch)
    assert all(loss.shape == (6,) and loss.isfinite().all() for loss in losses.values())
    losses["total"].mean().backward()
    gradient = ratio.network.head.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


LEARNT = {"schedule": "kumaraswamy_spherical", "noise": "ddbi", "gamma2": 0.3, "eps": 0.05}
BESIDE = {
    "all": {
        "class_weight": 1.0,
        "outlier_exposure": 1.0,
        "conditional": 1.0,
        "conditional_form": "antithetic",
        "time_score": 1.0,
        "path_difference": 1.0,
        "shrinkage": 1.0,
    },
    "denoising": {"conditional": 1.0, "data_score": 1.0},
    "slices": {"time_score": 1.0, "data_score": 1.0},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("times", ["uniform", "inverse_variance"])
def test_the_path_hears_of_its_own_measure_alone(beside: str, weight: str, times: str) -> None:
    ratio, _, objective, batch = make(
        (3,),
        classes=4,
        network={"kind": "mlp"},
        path=LEARNT,
        times={"kind": times},
        objective={**BESIDE[beside], "path_variance": 1.0, "weight": weight},
    )
    for p in ratio.parameters():  # zero heads would hide what depends on the scores
        torch.nn.init.normal_(p, std=0.3)
    for p in objective.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = list(objective.terms["path_variance"].path.parameters())
    assert len(path) == 4  # logits, two shapes, and the bridge's variance

    losses = objective(ratio, batch)
    for name in losses.keys() - {"path_variance", "total"}:
        grads = torch.autograd.grad(losses[name].sum(), path, allow_unused=True, retain_graph=True)
        assert all(g is None for g in grads), name
    own, whole = (
        torch.autograd.grad(losses[name].sum(), path, retain_graph=True)
        for name in ("path_variance", "total")
    )
    for g, h in zip(own, whole, strict=True):
        assert g.abs().sum() > 0
        torch.testing.assert_close(g, h, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("noise", NOISES)
def test_every_configured_path_samples_on_its_interval(schedule: str, noise: str) -> None:
    path = build_path(Config.from_mapping({"path": {"schedule": schedule, "noise": noise}}))
    x_0, x_1, z = torch.randn(3, 4, 2)
    assert path.time_score(x_0, x_1, torch.linspace(*path.t_range, 4), z).isfinite().all()
    # The configuration knows which schedules are not closed.
    if not path.schedule.closed:
        with pytest.raises(ValueError, match="t_min: got 0, expected more"):
            PathConfig(schedule=schedule, t_min=0.0)
    else:
        assert PathConfig(schedule=schedule, t_min=0.0).t_min == 0


@pytest.mark.parametrize("name", names("configs"))
def test_every_shipped_configuration_builds(name: str) -> None:
    config = load_config(name)
    config = config.replace(network=config.network.replace(width=0.125))
    shape = (5,) if config.network.kind == "mlp" else (3, 32, 32)
    ratio, _, objective, batch = make(shape, 10, **config.to_dict())
    assert objective(ratio, batch)["total"].isfinite().all()


# Time score matching needs a weight that tames its ends.
JOINT = [{"conditional": 1.0}, {"time_score": 1.0, "weight": "noise_variance"}]


@pytest.mark.parametrize("terms", JOINT, ids=lambda t: next(iter(t)))
@pytest.mark.parametrize("kind", ["unet", "mlp"])
def test_a_data_score_trains_its_decoder_and_what_it_shares(
    kind: str, terms: dict[str, object]
) -> None:
    network = {"kind": kind, "width": 0.125, "norm": "group", "depths": [1, 1]}
    shape = (3, 8, 8) if kind == "unet" else (5,)
    ratio, _, objective, batch = make(
        shape, network=network, objective={"endpoint": 0.0, "data_score": 0.5, **terms}
    )
    assert objective.needs_probe == ("time_score" in terms)
    term = objective.terms["time_score" if "time_score" in terms else "conditional"]
    assert term.balance == 0.5
    shared = set(map(id, ratio.parameters()))
    assert not shared & set(map(id, objective.parameters()))

    optimizer = torch.optim.Adam([*ratio.parameters(), *objective.parameters()], 1e-2)
    losses: list[Tensor] = []
    for _ in range(25):
        optimizer.zero_grad()
        losses.append(objective(ratio, batch)["total"].mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    # A head that starts at zero lets no gradient through before its first step.
    assert all(p.grad is not None for p in objective.parameters())
    assert ratio.fold().log_ratio(batch.x_1).shape == (6,)

    # The data score by itself reaches the encoder and the decoder.
    at = {name: ratio.outputs(x) for name, x in term.points(batch).items()}
    whole = term.loss(ratio, batch, at)
    term.balance = 0.0
    only_data = (whole - term.loss(ratio, batch, at)).mean()
    for p in (next(ratio.network.backbone.parameters()), next(term.data_score.parameters())):
        (gradient,) = torch.autograd.grad(only_data, p, retain_graph=True)
        assert gradient.abs().max() > 0


def test_options_arrive() -> None:
    _, _, objective, _ = make(
        (3, 16, 16),
        classes=3,
        network=NETWORK,
        objective={
            "endpoint_loss": "chisq", "endpoint_cap": 5, "class_weight": 1, "label_smoothing": 0.2,
        },
    )  # fmt: skip
    term = objective.terms["endpoint"]
    assert (term.kind, term.cap) == ("chisq", 5.0)
    assert objective.terms["class"].smoothing == 0.2
    for stratified in (False, True):
        for kind in ("uniform", "logit_normal", "inverse_variance"):
            config = Config.from_mapping({"times": {"kind": kind, "stratified": stratified}})
            assert build_times(config, build_path(config), MOMENTS).stratified is stratified


@pytest.mark.parametrize("network", [NETWORK, {"kind": "mlp"}], ids=["resnet", "mlp"])
@pytest.mark.parametrize("term", ["time_score", "conditional"])
def test_a_time_conditioned_baseline_has_one_term_and_its_options(
    network: dict[str, Any], term: str
) -> None:
    shape = (5,) if "kind" in network else (3, 16, 16)
    ratio, _, objective, batch = make(
        shape,
        estimator="time_conditioned",
        network={**network, "norm": "group", "octaves": 2},
        objective={"endpoint": 0, term: 0.3},
        evaluation={"solver": "ode", "tolerance": 1e-5},
    )
    assert objective.weights == {term: 1.0}
    losses = objective(ratio, batch)
    assert torch.equal(losses["total"], losses[term])
    losses["total"].mean().backward()
    assert ratio.network.head.weight.grad.abs().max() > 0
    assert (ratio.solver, ratio.tolerance) == ("ode", 1e-5)
    assert len(ratio.network.embedding.frequencies) == 2


def test_a_data_score_needs_a_backbone_with_a_decoder() -> None:
    # As somebody's own backbone may not have.
    plain = build_ratio(Config.from_mapping({"network": NETWORK}), classes=0)
    config = Config.from_mapping(
        {"network": {"kind": "mlp"}, "objective": {"conditional": 1.0, "data_score": 1.0}}
    )
    path = build_path(config)
    times = build_times(config, path, MOMENTS)
    with pytest.raises(UserError, match=r"objective\.data_score: needs a backbone"):
        build_objective(config, path, times, MOMENTS, plain)


def test_an_mlp_needs_the_dimension_of_its_inputs() -> None:
    config = Config.from_mapping({"network": {"kind": "mlp"}})
    with pytest.raises(
        UserError, match=r"network\.kind: got mlp, expected resnet, speed or unet for images"
    ):
        build_ratio(config, classes=0)
    assert build_ratio(config, classes=0, dim=3)(torch.randn(2, 3)).shape == (2,)
