r"""Laws of the training loop, on vectors, where a step costs nothing."""

import ast
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

import ood_osdre
from ood_osdre.config import Config
from ood_osdre.data.transforms import Standardise
from ood_osdre.errors import UserError
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork, ResNetBackbone
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import (
    Batch,
    ConditionalScoreMatching,
    EndPointLoss,
    Objective,
    PathVariance,
)
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import KumaraswamySchedule
from ood_osdre.progress import Bar
from ood_osdre.sections import TrainingConfig
from ood_osdre.training import checkpoint as checkpoints
from ood_osdre.training import optimisation
from ood_osdre.training.batches import VectorBatches
from ood_osdre.training.build import build_ratio, prepare_objective
from ood_osdre.training.fit import fit
from ood_osdre.training.optimisation import (
    PATH_RATE,
    average_into,
    build_optimizer,
    faster_precision,
    learning_rate_factor,
    settled_precision,
)
from ood_osdre.training.trainer import Trainer, distributed

OPTIONS = TrainingConfig(
    steps=30, batch_size=32, lr=1e-2, warmup=5, ema=0.9, eval_every=10, checkpoint_every=7
)


def batches(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    x_0, noise = torch.randn(2, 32, 2, generator=g)
    x_1 = torch.randn(32, 2, generator=g) + 1
    return Batch(x_0, x_1, torch.rand(32, generator=g), noise)


def validate(ratio: OneStepRatio) -> dict[str, float]:
    with torch.no_grad():
        batch = batches(10_000)
        gap = ratio.log_ratio(batch.x_1).mean() - ratio.log_ratio(batch.x_0).mean()
    return {"val_auroc": float(gap)}


def make(folder: Path | None = None, options: TrainingConfig = OPTIONS, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    # With dropout, whose random numbers no batch holds.
    backbone = nn.Sequential(MLP(2, 16, depth=1), nn.Dropout(0.1))
    ratio = OneStepRatio(CoefficientNetwork(backbone, 16, 4), RBFBasis(size=4))
    path = GaussianPath(KumaraswamySchedule(2), DDBINoise(gamma2=0.1, eps=0.1))
    objective = Objective(
        {
            "endpoint": (1.0, EndPointLoss(path)),
            "conditional": (0.1, ConditionalScoreMatching(path)),
            "variance": (0.1, PathVariance(path, Moments(2, 2.0, 0.0, 4.0))),
        }
    )
    return Trainer(ratio, objective, batches, options, validate, folder=folder)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{part}.{key}": value
        for part, module in trainer.modules().items()
        for key, value in module.state_dict().items()
    }


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_identical(a: Trainer, b: Trainer) -> None:
    for (key, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), key


def test_training_learns_and_every_parameter_moves(tmp_path: Path) -> None:
    trainer = make(tmp_path, OPTIONS.replace(steps=120))
    before = {k: v.clone() for k, v in weights(trainer).items()}
    outcome = trainer.run(progress=False)

    assert outcome.finished
    assert outcome.step == 120
    # The true gap of two unit Gaussians at distance sqrt(2) is 2 nats.
    assert outcome.best["val_auroc"] == pytest.approx(2, abs=0.8)
    for key, value in weights(trainer).items():
        frozen = "centers" in key or "centres" in key or "num_batches" in key
        if key.startswith(("ratio", "objective")) and not frozen:
            assert not torch.equal(value, before[key]), key
    last = logged(tmp_path)[-1]
    assert last["step"] == 120
    assert {"loss_endpoint", "loss_total", "images_per_second", "val_auroc"} <= set(last)


def test_the_best_validation_is_kept_and_written(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    scripted = iter([0.3, 0.9, 0.5])
    seen = []

    def script(ratio: OneStepRatio) -> dict[str, float]:
        seen.append({k: v.clone() for k, v in ratio.state_dict().items()})
        return {"val_auroc": next(scripted)}

    trainer.validate, trainer.select = script, "val_auroc"
    outcome = trainer.run(progress=False)

    assert [h["val_auroc"] for h in outcome.history] == [0.3, 0.9, 0.5]
    assert outcome.best["step"] == 20
    tensors, _, _ = checkpoints.read_checkpoint(tmp_path, checkpoints.MODEL)
    for key, value in seen[1].items():
        assert torch.equal(value, tensors[key])
        assert torch.equal(value, trainer.kept.state_dict()[key])


@pytest.mark.parametrize("stop", [7, 20])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    whole = make(tmp_path / "whole")
    whole.run(progress=False)

    part = make(tmp_path / "part")
    part.batches = _raise_at(stop)
    with pytest.raises(KeyboardInterrupt):
        part.run(progress=False)  # as a kill: nothing is saved after the last checkpoint
    resumed = make(tmp_path / "part", seed=1)
    outcome = resumed.run(progress=False, resume=True)

    assert outcome.finished
    assert outcome.history == [
        h | {"seconds": o["seconds"]}
        for h, o in zip(whole.outcome.history, outcome.history, strict=True)
    ]
    assert_identical(whole, resumed)
    steps = [entry["step"] for entry in logged(tmp_path / "part")]
    assert steps == sorted(set(steps))


def _raise_at(stop: int) -> Callable[[int], Batch]:
    def interrupted(step: int) -> Batch:
        if step == stop:
            raise KeyboardInterrupt
        return batches(step)

    return interrupted


def test_a_time_budget_stops_resumably_without_changing_the_schedule(tmp_path: Path) -> None:
    options = OPTIONS.replace(steps=6)
    whole = make(options=options)
    whole.run(progress=False)

    for _ in range(10):
        trainer = make(tmp_path, options)
        outcome = trainer.run(time_budget=0.0, progress=False, resume=True)
        if outcome.finished:
            break
        assert outcome.reason == "time budget"
    assert_identical(whole, trainer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_first(tmp_path: Path, number: signal.Signals) -> None:
    def slow(step: int) -> Batch:
        if step == 11:
            (tmp_path / "ready").touch()
        time.sleep(0.05 if step >= 11 else 0)
        return batches(step)

    trainer = make(tmp_path)
    trainer.batches = slow
    pid = os.fork()
    if not pid:  # with the parent's imports, which take longer than the run
        try:
            outcome = trainer.run(progress=False)
            (tmp_path / "outcome").write_text(f"{outcome.reason} {outcome.step}")
        finally:
            os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    reason, step = (tmp_path / "outcome").read_text().split()
    assert reason == number.name
    assert 11 < int(step) < 30
    assert checkpoints.read_checkpoint(tmp_path, checkpoints.STATE)[1]["step"] == int(step)

    whole, resumed = make(), make(tmp_path)
    whole.run(progress=False)
    resumed.run(progress=False, resume=True)
    assert_identical(whole, resumed)


def test_a_loss_that_is_not_finite_is_reported_and_not_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path)

    def poisoned(step: int) -> Batch:
        batch = batches(step)
        return batch._replace(x_0=batch.x_0 * math.nan) if step >= 16 else batch

    trainer.batches = poisoned
    with pytest.raises(UserError, match=r"not finite at step 2\d"):
        trainer.run(progress=False)
    _, metadata, _ = checkpoints.read_checkpoint(tmp_path, checkpoints.STATE)
    assert metadata["step"] == 14


@pytest.mark.parametrize("other", ["configuration", "file"])
def test_another_run_cannot_be_resumed(tmp_path: Path, other: str) -> None:
    trainer = make(tmp_path, OPTIONS.replace(steps=8))
    trainer.metadata = {"config": {"training": {"steps": 8, "lr": 0.1}}, "classes": 3}
    trainer.run(progress=False)
    resumed = make(tmp_path, OPTIONS.replace(steps=8))
    resumed.metadata = {"config": {"training": {"steps": 9, "lr": 0.1}}, "classes": 3}
    found = r"; it has 1 key: training\.steps=8 \(not 9\)\.$"
    if other == "file":  # a selected model is no state of a run
        paths = [checkpoints.checkpoint_path(tmp_path, n) for n in ("model", "state")]
        paths[0].replace(paths[1])
        found = r", cannot be resumed by this one\.$"
    with pytest.raises(UserError, match=rf"state\.safetensors: .* another configuration.*{found}"):
        resumed.run(progress=False, resume=True)


def test_an_unknown_selection_key_names_the_known_ones() -> None:
    trainer = make()
    trainer.select = "val_auc"
    with pytest.raises(UserError, match="'val_auc' among val_auroc"):
        trainer.run(progress=False)


@pytest.mark.parametrize("name", ["val_auroc", "held_out_auroc"])
def test_progress_shows_the_validation_of_networks_and_of_heads(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Bar, "set_postfix", lambda bar, told: shown.append(told["val"]))
    trainer = make(options=OPTIONS.replace(steps=20, eval_every=20))
    trainer.validate = lambda model: {"held_out": -1.0, name: 0.25}
    trainer.run(progress=False)
    assert shown == ["0.2500"]


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_gradients_are_clipped_together(clip: float) -> None:
    trainer = make(options=OPTIONS.replace(clip=clip))
    trainer.step(batches(0))
    parameters = [*trainer.ratio.parameters(), *trainer.objective.parameters()]
    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    if clip:
        assert float(norm) == pytest.approx(clip, rel=1e-2)
    else:
        assert norm > 0.1


def test_the_average_follows_closely_at_first() -> None:
    trainer = make(options=OPTIONS.replace(ema=0.999))
    for decay in (1 / 10, 2 / 11):
        before = trainer.averaged.network.head.weight.clone()
        trainer.step(batches(trainer.outcome.step))
        expected = decay * before + (1 - decay) * trainer.ratio.network.head.weight
        torch.testing.assert_close(trainer.averaged.network.head.weight, expected.detach())


def test_processes_agree_on_when_to_stop_about_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make()
    looks = []
    monkeypatch.setattr(distributed, "share", lambda size: slice(0, size))
    monkeypatch.setattr(distributed, "mean_over_processes", lambda value: value)
    monkeypatch.setattr(distributed, "from_first", lambda v: looks.append(v) or v)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    assert [trainer._stride(10.0)] == [1]
    trainer.outcome.step = 50
    assert [trainer._stride(t) for t in (1.0, 10.0, 100.0)] == [20, 5, 1]

    trainer.outcome.step = 0
    assert trainer.run(time_budget=1e9, progress=False).finished
    assert 1 <= len(looks) < OPTIONS.steps / 2


def test_a_signal_on_the_last_step_finishes(tmp_path: Path) -> None:
    trainer = make(tmp_path, OPTIONS.replace(steps=1, warmup=0))
    outcome = trainer.run(time_budget=0.0, progress=False)
    assert outcome.finished
    assert checkpoints.checkpoint_path(tmp_path, checkpoints.MODEL).is_file()


def test_a_fresh_run_starts_its_log_anew(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 10}) + "\n{cut sho")
    make(tmp_path).run(progress=False)
    assert [entry["step"] for entry in logged(tmp_path)] == [10, 20, 30]


def test_nobody_but_the_assembler_makes_a_trainer() -> None:
    root = Path(ood_osdre.__file__).parent
    makers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "Trainer(" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Trainer"
    }
    assert makers == {"training/fit.py"}


# The parts of a step.

PEAKS = TrainingConfig(steps=30, lr=1e-2, warmup=5, weight_decay=0.1, basis_lr_factor=0.5)


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    rates = [learning_rate_factor(s, PEAKS) for s in range(PEAKS.steps + 1)]
    assert rates[0] == pytest.approx(1 / 5)
    assert max(rates) == rates[4]
    assert rates[-1] == pytest.approx(0)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_a_linear_decay_is_a_trapezium_without_a_flat_top() -> None:
    options = PEAKS.replace(decay="linear")
    rates = [learning_rate_factor(s, options) for s in range(options.steps + 1)]
    # Rises by fifths over the five steps of the warm-up, falls by 25ths over the 25 others.
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates[5:] == pytest.approx([k / 25 for k in range(25, -1, -1)])
    for warmup in (0, options.steps, 2 * options.steps):
        one = options.replace(warmup=warmup)
        rates = [learning_rate_factor(s, one) for s in range(one.steps + 1)]
        assert 0.4 < max(rates) <= 1
        assert min(rates) == rates[-1] == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_nesterovs(tmp_path: Path, momentum: float) -> None:
    sgd = {"optimizer": "sgd", "momentum": momentum, "weight_decay": 0.1, "clip": 0, "lr": 0.05}
    options = OPTIONS.replace(steps=8, checkpoint_every=5, **sgd)
    trainer = make(tmp_path / "part", options)
    p = trainer.ratio.network.head.weight
    theta, velocity = p.detach().clone(), torch.zeros_like(p)
    for step in range(4):
        trainer.step(batches(step))
        gradient = p.grad + 0.1 * theta
        velocity = momentum * velocity + gradient
        rate = 0.05 * learning_rate_factor(step, options)
        theta = theta - rate * (gradient + momentum * velocity)
        torch.testing.assert_close(p.detach(), theta)

    # Its state, a velocity or none, is in the checkpoint.
    whole = make(tmp_path / "whole", options)
    whole.run(progress=False)
    part = make(tmp_path / "part", options)
    part.batches = _raise_at(6)
    with pytest.raises(KeyboardInterrupt):
        part.run(progress=False)
    resumed = make(tmp_path / "part", options, seed=1)
    resumed.run(progress=False, resume=True)
    assert_identical(whole, resumed)


def test_only_weights_decay_and_every_parameter_is_trained_once() -> None:
    backbone = ResNetBackbone(0.125, (1, 1, 1, 1))
    network = CoefficientNetwork(backbone, backbone.features, 4, classes=3)
    ratio = OneStepRatio(network, RBFBasis(size=4))
    path = GaussianPath(KumaraswamySchedule(2), DDBINoise(0.1, 0.1, learnable=True))
    objective = Objective({"endpoint": (1.0, EndPointLoss(path))})
    groups = build_optimizer(ratio, objective, PEAKS).param_groups

    trained = [id(p) for g in groups for p in g["params"]]
    assert sorted(trained) == sorted(map(id, [*ratio.parameters(), *path.parameters()]))
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    peak = {id(p): g["peak"] for g in groups for p in g["params"]}
    for p in network.parameters():
        assert decay[id(p)] == (0.1 if p.ndim > 1 else 0.0)
        assert peak[id(p)] == 1e-2
    assert all(decay[id(p)] == 0 and peak[id(p)] == PATH_RATE for p in path.parameters())
    assert all(decay[id(p)] == 0 and peak[id(p)] == 5e-3 for p in ratio.basis.parameters())


def log_mean_variance(gamma2: float, eps: float, dim: int) -> float:
    r"""Returns log ∫V of whitened ends and x_t = cos x_0 + sin x_1 + sqrt(v) z, by quadrature."""

    def variance(t: float) -> float:
        v, slope = gamma2 * t * (1 - t) + eps, gamma2 * (1 - 2 * t)
        return dim / 2 * (slope / v) ** 2 + (math.pi / 2) ** 2 * dim / v

    near_ends = [x for s in (eps, 10 * eps) for x in (s / gamma2, 1 - s / gamma2) if 0 < x < 1]
    return math.log(integrate.quad(variance, 0, 1, points=near_ends, limit=500)[0])


@pytest.mark.parametrize(
    ("start", "eps", "least"), [(0.5, 0.001, 0.14), (0.01, 0.005, 0.27), (0.01, 0.05, 0.61)]
)
def test_the_bridge_comes_to_the_scale_of_whitened_data(
    tmp_path: Path, start: float, eps: float, least: float
) -> None:
    torch.set_default_dtype(torch.float32)
    n, dim = 512, 8
    x_0, x_1 = torch.randn(2, n, dim)
    # Exactly white: no mean, second moments of one.
    x_0, x_1 = (n**0.5 * torch.linalg.qr(x - x.mean(dim=0))[0] for x in (x_0, x_1))
    config = Config.from_mapping(
        {
            "network": {"kind": "mlp", "width": 1 / 16, "depths": [1]},
            "path": {"gamma2": start, "eps": eps},
            "objective": {"endpoint": 0, "conditional": 1, "path_variance": 1},
            "training": TrainingConfig.short(200).to_dict(),
        }
    )
    batches = VectorBatches(
        x_1, torch.full((n,), -1), x_0, Standardise([0.0] * dim, [1.0] * dim), 32, seed=0
    )
    fitted = fit(
        build_ratio(config, 0, dim),
        lambda moments, model: prepare_objective(config, moments, model),
        batches,
        config.training,
        folder=tmp_path,
        progress=False,
    )
    path = fitted.outcome.learnt["path"]
    assert path.keys() == {"gamma2", "eps"}
    assert path["eps"] == eps
    assert logged(tmp_path)[-1]["path"] == path

    grid = np.geomspace(1e-3, 10, 61)
    values = [log_mean_variance(g, eps, dim) for g in grid]
    assert grid[np.argmin(values)] == pytest.approx(least, rel=0.15)
    reached = log_mean_variance(path["gamma2"], eps, dim)
    assert log_mean_variance(start, eps, dim) > min(values) + 0.01
    assert reached < min(values) + math.log(1.1)
    # The term's own quadrature agrees with this one.
    assert logged(tmp_path)[-1]["loss_path_variance"] == pytest.approx(reached, abs=0.01)


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


def test_what_precisions_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def meant(device: torch.device) -> list[str]:
        return [settled_precision(amp, device) for amp in ("auto", "none", "bf16", "fp16")]

    assert meant(cpu) == ["none", "none", "bf16", "fp16"]
    monkeypatch.setattr(optimisation, "_has_bf16_instructions", lambda: True)
    assert meant(cpu)[0] == ""
    for has, name in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert meant(cuda) == [name, "none", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("half", "chosen", "steps"),
    [(0.8, "bf16", 12), (0.95, "none", 12), (2.0, "none", 12), (30.0, "none", 4)],
)
def test_bf16_is_taken_where_it_is_a_tenth_faster(
    half: float, chosen: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, taken = [0.0], []

    def step(amp: str) -> None:
        taken.append(amp)
        # The first of single precision is slow, and one of the others in bf16.
        delay = 50.0 if len(taken) in (1, 6) and steps == 12 else 0.0
        clock[0] += {"none": 1.0, "bf16": half}[amp] + delay

    monkeypatch.setattr(optimisation, "TRIAL_SECONDS", 1e3 if steps == 12 else 20.0)
    monkeypatch.setattr(optimisation, "perf_counter", lambda: clock[0])
    assert faster_precision(step) == chosen
    assert taken == ["none", "bf16"] * (steps // 2)


def test_the_first_process_chooses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimisation, "_has_bf16_instructions", lambda: True)
    trainer = make()
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    monkeypatch.setattr(distributed, "from_first", lambda value: value or "bf16")
    trainer.step(batches(0))
    assert trainer.outcome.amp == "bf16"
    assert trainer.autocast.fast_dtype == torch.bfloat16


def test_vectors_stay_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimisation, "_has_bf16_instructions", lambda: True)
    trainer = make()
    assert trainer.outcome.amp == ""
    trainer.step(batches(0))
    assert trainer.outcome.amp == "none"
