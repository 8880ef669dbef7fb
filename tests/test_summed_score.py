r"""Sums of standardised parts: numbers by hand, one run of several models, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.special import logsumexp
from torch import Tensor, nn

from ood_osdre import OneStepDetector, load_scorer
from ood_osdre.cli import UNFINISHED, main, members_of, parser, read_config
from ood_osdre.data import load_digits_benchmark
from ood_osdre.errors import FAILED, UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.export import TOLERANCE, DeployedScorer, export_scorer
from ood_osdre.models import FoldedRatio, SummedScore
from ood_osdre.plugin import pytorch_ood
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor, OSDRETrainer
from ood_osdre.training.checkpoint import read_checkpoint, write_checkpoint

PIXELS: dict[str, Any] = {
    "id": "digits",
    "benchmark": "digits",
    "network": {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2},
    "objective": {"class_weight": 0.5},
    "data": {"flip": "none", "train_limit": 60, "reference_limit": 50, "val_limit": 10},
    "training": {"steps": 3, "batch_size": 8, "warmup": 1, "checkpoint_every": 1},
}
OWN_CLASSES = {"endpoint": 0.0, "class_weight": 1.0}
HEAD: dict[str, Any] = {
    **PIXELS,
    "estimator": "classifier",
    "objective": OWN_CLASSES,
    "head": {
        "rank": 6,
        "width": 16,
        "depth": 1,
        "training": {"steps": 3, "batch_size": 16, "warmup": 1, "checkpoint_every": 1},
    },
}
BOTH = ["evaluation.parts=[log_ratio, energy]"]
PARTS = [
    f"{level} {kind}" for level in ("pixels", "representation") for kind in ("log_ratio", "energy")
]


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


# The model


class Counted(nn.Linear):
    r"""An affine backbone that counts how often it is evaluated."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


def network(classes: int) -> FoldedRatio:
    head = nn.Linear(classes, classes) if classes else None
    return FoldedRatio(Counted(4, classes or 3), nn.Linear(classes or 3, 1), head).eval()


def numbers(linear: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()


def test_the_sum_is_that_of_numbers_by_hand_in_one_pass_of_each_network() -> None:
    nets = [network(3), network(5)]
    total = SummedScore(nets, ["a", "b"], ["log_ratio", "energy"]).eval()
    assert total.parts == ["a log_ratio", "a energy", "b log_ratio", "b energy"]
    x = torch.randn(50, 4)
    columns = []
    for net in nets:
        features = numbers(net.backbone, x.numpy())
        columns += [numbers(net.head, features)[:, 0]]
        columns += [logsumexp(numbers(net.class_head, features), axis=1)]
    parts = np.stack(columns, axis=1)
    total.standardise(total.predict(x).parts)
    Counted.calls = 0
    with torch.no_grad():
        found = total.predict(x)
    assert Counted.calls == 2
    np.testing.assert_allclose(found.parts, parts, atol=1e-5)
    expected = ((parts - parts.mean(axis=0)) / parts.std(axis=0)).sum(axis=1)
    np.testing.assert_allclose(found.score, expected, atol=1e-4)
    np.testing.assert_allclose(found.logits, nets[0].predict(x).logits.detach(), atol=1e-6)
    folded = total.fold()
    assert torch.equal(folded(x), found.score)
    folded.mean += 1  # shares no memory
    assert torch.equal(total(x), found.score)
    assert not total.in_nats


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3.0])
def test_a_part_that_does_not_vary_or_is_not_finite_is_one_line(bad: float) -> None:
    total = SummedScore([network(3)], ["pixels"], ["log_ratio", "energy"])
    parts = torch.randn(20, 2)
    parts[:, 1] = bad
    with pytest.raises(UserError, match=r"^evaluation.parts: pixels energy has mean .*vary\.$"):
        total.standardise(parts)
    assert torch.equal(total.std, torch.ones(2))


# The command


def command(folder: Path, config: dict[str, Any], *options: str) -> list[str]:
    file = folder / "own.yml"
    file.write_text(yaml.safe_dump(config))
    return ["--config", str(file), "--quiet", "--device", "cpu", *options]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    r"""Returns the folder of a run from pixels with a representation, and its command."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("both")
    other = folder / "head.yml"
    other.write_text(yaml.safe_dump(HEAD))
    run = command(folder, PIXELS, *BOTH, f"evaluation.together=[{other}]")
    assert main([*run, "--out", str(folder / "out")]) == 0
    return folder / "out", run


def test_a_run_leaves_its_sum_and_every_part_of_it(both: tuple[Path, list[str]]) -> None:
    out, _ = both
    data, scorer = load_digits_benchmark(), load_scorer(out)
    # Each alone, from what its stage left, and the sum of them by numpy.
    x = {"val": data.id_val.images, "test": data.id_test.images}
    states = read_checkpoint(out, "state")[0], read_checkpoint(out / "together-1", "model")[0]
    assert states[0]
    own = scorer.ratio.networks[0]
    member = load_scorer(out / "together-1")
    found: dict[str, list[np.ndarray]] = {}
    for name, images in x.items():
        inputs = scorer.preprocess(torch.as_tensor(images))
        with torch.no_grad():
            given = own.predict(inputs), member.ratio.predict(inputs)
        columns = [(p.score.numpy(), logsumexp(p.logits.numpy(), axis=1)) for p in given]
        found[name] = [part for pair in columns for part in pair]
    expected = sum(
        (test - val.mean()) / val.std()
        for val, test in zip(found["val"], found["test"], strict=True)
    )
    spread = np.std(expected)
    np.testing.assert_allclose(scorer.score(x["test"]), expected, atol=1e-3 * spread)

    scores = read_scores(out / "scores.npz")
    assert list(scores.parts) == PARTS
    (of_id,) = scores.of("id").values()
    np.testing.assert_allclose(of_id.score, expected, atol=1e-3 * spread)
    np.testing.assert_allclose(of_id.parts, np.stack(found["test"], axis=1), rtol=1e-3, atol=1e-3)
    table = pd.read_csv(out / "metrics.csv").set_index("set")
    far = scores.of("far")["flower"]
    for i, part in enumerate(PARTS):
        auroc = 100 * ood_metrics(of_id.parts[:, i], far.parts[:, i]).auroc
        assert table.loc["flower", f"AUROC of {part}"] == pytest.approx(auroc, abs=1e-4)
        assert f"| {part} |" in (out / "metrics.md").read_text()
    text = (out / "metrics.md").read_text()
    assert "no log-ratios, no unit" in text
    assert "in nats" not in text
    record = json.loads((out / "run.json").read_text())
    assert record["results"]["evaluations"] == 2
    assert not [k for k in record["validation"]["best"] if "log_mass" in k]
    (trained,) = record["data"]["together"].values()
    assert trained["head"]["rank"] == 6


def test_it_resumes_from_every_stage_to_the_same_weights(
    both: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = both
    out, told = tmp_path / "out", []
    for _ in range(12):
        status = main([*run, "--out", str(out), "--time-budget", "0", "--resume"])
        told.append(capsys.readouterr())
        if status == 0:
            break
        assert status == UNFINISHED
        assert not (out / "run.json").exists()
    assert "training the head, training" in told[-2].err
    digests = [read_checkpoint(folder, "model")[2] for folder in (whole, out)]
    assert digests[0] == digests[1]
    # From its scores, with the same parts; and not if the other configuration has changed.
    assert main([*run, "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().out == told[-1].out
    other = whole.parent / "head.yml"
    text = other.read_text()
    other.write_text(text.replace("rank: 6", "rank: 5"))
    assert main([*run, "--out", str(out), "--resume"]) == FAILED
    other.write_text(text)
    assert "in 1 key: together." in (error := capsys.readouterr().err)
    assert "head.yml.head.rank=6 (not 5)" in error


HOSTS: dict[str, Callable[[Path, Tensor, Tensor], Tensor]] = {
    "network": lambda run, x, images: OSDREPostprocessor().postprocess(OSDRENet.load(run), x)[1],
    "network, not folded": lambda run, x, images: OSDREPostprocessor().postprocess(
        OSDRENet.load(run, False), x
    )[1],
    "export": lambda run, x, images: DeployedScorer(load_scorer(run))(images)[0],
    "pytorch-ood": lambda run, x, images: (
        -pytorch_ood.OneStepRatioDetector(load_scorer(run)).predict(
            images.permute(0, 3, 1, 2) / 255
        )
    ),
}


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_score_by_it(both: tuple[Path, list[str]], host: str) -> None:
    if host == "pytorch-ood" and pytorch_ood.REASON is not None:
        pytest.skip("no pytorch-ood")
    images, scorer = load_digits_benchmark().id_test.images[:9], load_scorer(both[0])
    x = scorer.preprocess(torch.as_tensor(images))
    with torch.no_grad():
        found = HOSTS[host](both[0], x, torch.as_tensor(images))
    expected = scorer.score(images)
    np.testing.assert_allclose(found, expected, atol=1e-3 * expected.std())


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_it_is_one_file(both: tuple[Path, list[str]], tmp_path: Path, suffix: str) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    path = tmp_path / f"sum{suffix}"
    assert export_scorer(load_scorer(both[0]), path) <= TOLERANCE
    if suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        assert [output.name for output in session.get_outputs()] == ["score", "logits"]


def test_a_trained_model_is_scored_in_other_ways(
    both: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r"""The sum's model alone is that which its stage trained; with energies, with a run, anew."""
    out, _ = both

    def score(name: str, *options: str) -> Any:  # noqa: ANN401
        folder = tmp_path / name
        again = ["--checkpoint", str(out), "--quiet", "--device", "cpu", "--out", str(folder)]
        assert main([*again, *options]) == 0, capsys.readouterr().err
        return read_scores(folder / "scores.npz")

    whole = score("same")
    np.testing.assert_array_equal(
        *(next(iter(s.of("id").values())).score for s in (whole, read_scores(out / "scores.npz")))
    )
    alone = score("alone", "evaluation.parts=[log_ratio]", "evaluation.together=[]")
    energies = score("energies", "evaluation.parts=[energy]")
    run = score("run", f"evaluation.together=[{out / 'together-1'}]")
    assert (alone.parts, list(energies.parts), list(run.parts)) == ((), PARTS[1::2], PARTS)
    ids = {s: next(iter(s.of("id").values())) for s in (whole, alone, energies, run)}
    np.testing.assert_array_equal(ids[alone].score, ids[whole].parts[:, 0])
    np.testing.assert_allclose(ids[energies].parts, ids[whole].parts[:, 1::2], rtol=1e-5)
    np.testing.assert_allclose(ids[run].score, ids[whole].score, atol=1e-4)


def test_parts_are_standardised_as_they_are_scored(tmp_path: Path) -> None:
    r"""A classifier's own score may become another one with `--checkpoint`."""
    options = {**PIXELS["training"], "steps": 1}
    config = {**PIXELS, "estimator": "classifier", "training": options, "objective": OWN_CLASSES}
    out, again = tmp_path / "out", tmp_path / "again"
    assert main([*command(tmp_path, config, *BOTH), "--out", str(out)]) == 0
    given = ["--checkpoint", str(out), "--quiet", "--device", "cpu", "--out", str(again)]
    assert main([*given, "evaluation.score=energy"]) == 0
    scorer, data = load_scorer(out), load_digits_benchmark()
    with torch.no_grad():
        inputs = scorer.preprocess(torch.as_tensor(data.id_val.images))
        energy = logsumexp(scorer.ratio.predict(inputs).logits.numpy(), axis=1)
    (found,) = read_scores(again / "scores.npz").of("id").values()
    np.testing.assert_array_equal(found.parts[:, 0], found.parts[:, 1])
    expected = 2 * (found.parts[:, 1] - energy.mean()) / energy.std()
    np.testing.assert_allclose(found.score, expected, atol=1e-3 * expected.std())


def test_seeds_move_together(tmp_path: Path, both: tuple[Path, list[str]]) -> None:
    r"""A folder of several seeds gives each run that of its own seed."""
    run, out = both[1], tmp_path / "out"
    assert main([*run, "--out", str(out), "--seeds", "2", "--max-steps", "1"]) == 0
    assert "± " in (out / "metrics.md").read_text()
    for seed in (0, 1):
        members = read_checkpoint(out / f"seed-{seed}", "model")[1]["sum"]["members"]
        seeds = [(m["config"]["training"]["seed"], m["config"].get("head")) for m in members]
        assert [s for s, _ in seeds] == [seed, seed]
        assert seeds[1][1]["training"]["seed"] == seed
    # Runs that are there: of the run's own seed where there are several.
    alone = command(tmp_path, PIXELS, "--max-steps", "1")
    assert main([*alone, "--out", str(tmp_path / "alone"), "--seeds", "2"]) == 0
    given = [*alone, f"evaluation.together=[{tmp_path / 'alone'}]", "training.seed=1"]
    assert main([*given, "--out", str(tmp_path / "twice")]) == 0
    _, metadata, _ = read_checkpoint(tmp_path / "twice", "model")
    assert [m["config"]["training"]["seed"] for m in metadata["sum"]["members"]] == [1, 1]
    assert metadata["sum"]["names"] == ["pixels 1", "pixels 2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*BOTH, "objective.class_weight=0"], "got energy, which needs a class head"),
        (["evaluation.parts=[energy, energy]"], "parts: got energy, energy, expected each once"),
        (["evaluation.parts=[]"], "evaluation.parts"),
        (["evaluation.together=[nowhere]"], "nowhere: no checkpoint here"),
        (["evaluation.together=[{folder}/sum.yml]"], "expected a configuration that sums nothing"),
        ([*BOTH, "evaluation.together=[{folder}/bare.yml]"], "a configuration with a class head"),
        (["evaluation.together=[{out}]"], "is a sum itself"),
        (["evaluation.together=[{folder}/classes]"], "has classes 4, expected 5"),
        (
            ["evaluation.together=[{folder}/reference]"],
            "has reference x, expected digits567_china",
        ),
        ([*BOTH, "evaluation.together=[{folder}/bare]"], "has no class head and so no energy"),
    ],
)
def test_what_cannot_be_summed_is_one_line_before_anything_is_trained(
    options: list[str],
    message: str,
    both: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = both
    bare = {**PIXELS, "objective": {}, "training": {**PIXELS["training"], "steps": 1}}
    (tmp_path / "bare.yml").write_text(yaml.safe_dump(bare))
    (tmp_path / "sum.yml").write_text(
        yaml.safe_dump({**PIXELS, "evaluation": {"parts": ["energy"]}})
    )
    if any(o.endswith("/bare]") for o in options):
        assert main([*command(tmp_path, bare), "--out", str(tmp_path / "bare")]) == 0
    altered(out / "together-1", tmp_path / "classes", classes=4)
    altered(out / "together-1", tmp_path / "reference", reference="x")
    given = [o.format(folder=tmp_path, out=out) for o in options]
    capsys.readouterr()
    assert main([*command(tmp_path, PIXELS, *given), "--out", str(tmp_path / "new")]) == FAILED
    errors = [e for e in capsys.readouterr().err.splitlines() if e.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list((tmp_path / "new").glob("*.safetensors"))


def altered(source: Path, target: Path, **facts: Any) -> None:  # noqa: ANN401
    r"""Writes a model with other metadata; the class head is cut to the number of classes."""
    tensors, metadata, _ = read_checkpoint(source, "model")
    classes = facts.get("classes")
    cut = {k: v[:classes] if "class_head" in k else v for k, v in tensors.items()}
    write_checkpoint(target, "model", cut, {**metadata, **facts})


def test_detectors_and_trainers_know_log_ratios_alone(both: tuple[Path, list[str]]) -> None:
    with pytest.raises(UserError, match="a detector's score is a log-ratio in nats"):
        OneStepDetector.load(both[0])
    with pytest.raises(UserError, match="trainer: a sum of parts cannot be trained"):
        OSDRETrainer(OSDRENet.load(both[0], folded=False), [], [], {})


def test_what_is_held_out_is_held_out_of_every_configuration(tmp_path: Path) -> None:
    (tmp_path / "head.yml").write_text(yaml.safe_dump(HEAD))
    options = [f"evaluation.together=[{tmp_path}/head.yml]", "data.hold_out_id=40"]
    args = parser().parse_args(command(tmp_path, PIXELS, *options))
    (member,) = members_of(args, read_config(args, args.config)).values()
    assert member.data.hold_out_id == 40
