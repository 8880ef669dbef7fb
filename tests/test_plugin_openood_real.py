r"""The plugin inside OpenOOD itself, on a complete data root of made-up images.

Run with `-m openood` where OpenOOD can be imported.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from openood_host import FAR, MEAN, NEAR, SMALL, STD, write_root, write_run

from ood_osdre.data.images import decode_all
from ood_osdre.data.lists import read_list
from ood_osdre.detectors.scorer import load_scorer
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import Scores, write_scores
from ood_osdre.evaluation.tables import MetricsTable
from ood_osdre.plugin.openood import (
    OSDRENet,
    OSDREPostprocessor,
    eval_ood,
    host,
    register,
    unregister,
)
from ood_osdre.plugin.openood.host import Foreign, prefill

pytestmark = pytest.mark.openood
COLUMNS = {"FPR@95": "fpr95", "AUROC": "auroc", "AUPR_IN": "aupr_in", "AUPR_OUT": "aupr_out"}
ROWS = [*NEAR, "nearood", *FAR, "farood"]


@pytest.fixture(autouse=True)
def importable() -> None:
    if not host.is_importable():
        pytest.skip(host.explain_import())
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", classes=10)
    return tmp_path / "run"


def evaluator(root: Path, net: torch.nn.Module, **options: Foreign) -> Foreign:
    from openood.evaluation_api import Evaluator

    options = {"postprocessor": OSDREPostprocessor(), **options}
    return Evaluator(net, "cifar10", data_root=str(root), num_workers=0, batch_size=7, **options)


def our_scores(root: Path, run: Path) -> tuple[Scores, float]:
    r"""Scores the root's images by our own reading of them; OpenOOD has no part in it."""
    scorer, scores, accuracy = load_scorer(run), Scores(), np.nan
    roles = {"id": ["cifar10"], "near": NEAR, "far": FAR}
    for role, name in [(role, name) for role, names in roles.items() for name in names]:
        content = read_list(root / "benchmark_imglist" / "cifar10" / f"test_{name}.txt")
        images = decode_all([root / "images_classic" / n for n in content.names], 32, name)
        scores.add(role, name, scorer.score(images), content.labels, content.names)
        if role == "id":
            logits = scorer.ratio.predict(scorer.preprocess(torch.as_tensor(images))).logits
            accuracy = float((logits.argmax(1).numpy() == np.array(content.labels)).mean())
    return scores, accuracy


def table_of(scores: Scores) -> MetricsTable:
    return MetricsTable.of(scores.metrics(), title="cifar10")


def assert_same(frame: Foreign, table: MetricsTable, accuracy: float) -> None:
    assert list(frame.index) == ROWS
    for name in ROWS:
        for column, attribute in COLUMNS.items():
            ours = 100 * getattr(table.mean(name), attribute)
            assert frame.loc[name, column] == pytest.approx(ours, abs=1e-6), (name, column)
        assert frame.loc[name, "ACC"] == pytest.approx(100 * accuracy, abs=1e-9)


def test_evaluator_gives_our_table(root: Path, run: Path) -> None:
    from openood.postprocessors import BasePostprocessor

    assert issubclass(OSDREPostprocessor, BasePostprocessor)
    scores, accuracy = our_scores(root, run)
    every = np.concatenate([s.score for r in ("id", "near", "far") for s in scores.of(r).values()])
    assert len(np.unique(every)) == len(every)  # untied
    for folded in (True, False):
        inferred = evaluator(root, OSDRENet.load(run, folded))
        assert_same(eval_ood(inferred, progress=False), table_of(scores), accuracy)
        for name, (_, conf, _) in inferred.scores["ood"]["near"].items():
            assert np.allclose(conf, scores.of("near")[name].score, atol=1e-5 * every.std())

    filled = evaluator(root, OSDRENet.load(run))
    filled.postprocessor = None  # nothing is scored again
    prefill(filled, scores, accuracy)
    assert_same(filled.eval_ood(), table_of(scores), accuracy)

    # #199, #259: lists of the same name have had several sizes.
    short = Scores()
    for role in ("id", "near", "far"):
        for name, s in scores.of(role).items():
            keep = slice(None, -1) if name == "tin" else slice(None)
            short.add(role, name, s.score[keep], s.label[keep], s.name[keep])
    count = scores.counts()["tin"]
    message = f"{count - 1} of the set ood/near/tin, but OpenOOD's list has {count}"
    with pytest.raises(UserError, match=message):
        prefill(evaluator(root, OSDRENet.load(run)), short, accuracy)


def test_full_spectrum_counts_shifted_images_as_id(root: Path, run: Path) -> None:
    inferred = evaluator(root, OSDRENet.load(run))
    frame = eval_ood(inferred, fsood=True, progress=False)
    ids = [inferred.scores["id"]["test"], inferred.scores["csid"]["cifar10c"]]
    conf = np.concatenate([s[1] for s in ids])
    right = np.concatenate([s[0] == s[2] for s in ids])

    ours = ood_metrics(conf, inferred.scores["ood"]["far"]["svhn"][1])
    assert frame.loc["svhn", "AUROC"] == pytest.approx(100 * ours.auroc, abs=1e-6)
    assert frame.loc["svhn", "FPR@95"] == pytest.approx(100 * ours.fpr95, abs=1e-6)
    assert frame.loc["svhn", "ACC"] == pytest.approx(100 * right.mean(), abs=1e-9)
    inferred.dataloader_dict["csid"] = {}
    with pytest.raises(UserError, match="fsood: cifar10 has no covariate-shifted ID set"):
        eval_ood(inferred, fsood=True)


def test_other_modes_run_on_a_network_of_the_hosts(root: Path, run: Path) -> None:
    from openood.networks import ResNet18_32x32

    net, (scores, _) = ResNet18_32x32(num_classes=10), our_scores(root, run)
    beside = OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))
    frame = eval_ood(evaluator(root, net, postprocessor=beside), progress=False)
    assert beside.mode.host == (list(MEAN), list(STD))
    ours = 100 * table_of(scores).mean("svhn").auroc
    assert frame.loc["svhn", "AUROC"] == pytest.approx(ours, abs=1e-6)

    features = OSDREPostprocessor(
        mode="features",
        reference=root / "benchmark_imglist" / "cifar10" / "train_tin597.txt",
        reference_root=str(root / "images_classic"),
        head={"width": 16, "training": {"steps": 20, "batch_size": 16}},
    )
    frame = eval_ood(evaluator(root, net, postprocessor=features), progress=False)
    assert features.mode.ratio.features == 512
    assert frame.notna().all().all()


def test_search_of_the_host_reaches_the_head(
    root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openood.utils.config import Config

    reference = str(root / "images_classic" / "tin597")
    head = {"width": 8, "training": {"batch_size": 16}}
    section = {
        "name": "osdre_features",
        "APS_mode": True,
        "postprocessor_args": {"mode": "features", "reference": reference, "head": head},
        "postprocessor_sweep": {"training.steps": [2, 10], "training.lr": [0.001, 0.01]},
    }
    tried: list[list[float]] = []
    postprocessor = OSDREPostprocessor(Config(postprocessor=section))
    original = postprocessor.set_hyperparam
    monkeypatch.setattr(
        postprocessor, "set_hyperparam", lambda v: (tried.append(list(v)), original(v))
    )
    evaluator(root, OSDRENet.load(run), postprocessor=postprocessor)

    assert tried[:4] == [[2, 0.001], [10, 0.001], [2, 0.01], [10, 0.01]]
    assert postprocessor.get_hyperparam() == tried[4]
    assert postprocessor.hyperparam_search_done


@pytest.fixture
def registered() -> Foreign:
    hooks = register()
    yield hooks
    unregister()


def test_registration_is_idempotent_and_reversible() -> None:
    import openood.evaluation_api.evaluator as api
    import openood.pipelines.train_oe_pipeline as pipeline
    from openood.evaluation_api.postprocessor import postprocessors

    before = (api.get_postprocessor, pipeline.get_trainer, pipeline.get_network)
    names = set(postprocessors)
    hooks = register()
    assert pipeline.get_trainer is not before[1]
    assert register() == hooks
    assert set(hooks) >= {
        "openood.evaluation_api.evaluator.get_postprocessor",
        "openood.pipelines.test_ood_pipeline.get_postprocessor",
        "openood.pipelines.train_oe_pipeline.get_trainer",
        "openood.pipelines.train_oe_pipeline.get_network",
        "openood.networks.get_network",
    }
    # Wrapped once: unregistering takes it all off.
    for _ in range(2):
        unregister()
        assert (api.get_postprocessor, pipeline.get_trainer, pipeline.get_network) == before
        assert set(postprocessors) == names


def test_registered_names_are_the_hosts_own(
    registered: list[str], root: Path, run: Path, tmp_path: Path
) -> None:
    from openood.networks import ResNet18_32x32, get_network
    from openood.utils.config import Config

    named = {"postprocessor": None, "postprocessor_name": "osdre"}
    by_name = evaluator(root, OSDRENet.load(run), **named, config_root=str(tmp_path))
    assert isinstance(by_name.postprocessor, OSDREPostprocessor)
    assert not by_name.postprocessor.APS_mode
    assert not list(tmp_path.glob("postprocessors"))  # nothing was written or downloaded
    section = {"name": "osdre", "num_classes": 10, "pretrained": True, "checkpoint": str(run)}
    assert isinstance(get_network(Config(**section)), OSDRENet)
    other = get_network(Config(name="resnet18_32x32", num_classes=3, pretrained=False, num_gpus=0))
    assert isinstance(other, ResNet18_32x32)
    with pytest.raises(UserError, match="ResNet18_32x32 is no OS-DRE network"):
        evaluator(root, other, **named)


def test_train_pipeline_of_the_host(registered: list[str], root: Path, tmp_path: Path) -> None:
    r"""#278: train in the host's pipeline, save, evaluate in its evaluator."""
    from openood.pipelines import get_pipeline
    from openood.utils.config import Config

    small, out = tmp_path / "small.yml", tmp_path / "out"
    small.write_text(yaml.safe_dump(SMALL))
    out.mkdir()
    lists = {"train": "train_cifar10", "oe": "train_tin597", "val": "val_cifar10"}
    lists["test"] = "test_cifar10"
    splits = {
        split: {
            "dataset_class": "ImglistDataset",
            "data_dir": str(root / "images_classic"),
            "imglist_pth": str(root / "benchmark_imglist" / "cifar10" / f"{name}.txt"),
            "batch_size": 5 if split == "oe" else 4,
            "shuffle": True,
        }
        for split, name in lists.items()
    }
    machine = {"num_workers": 0, "num_gpus": 0, "num_machines": 1}
    sizes = {"num_classes": 10, "pre_size": 32, "image_size": 32, "interpolation": "bilinear"}
    norm = {"name": "cifar10_oe", "normalization_type": "cifar10", "split_names": list(splits)}
    config = Config(
        dataset={**norm, **sizes, **machine, **splits},
        network={"name": "osdre", "config": str(small), "num_classes": 10, "num_gpus": 0},
        trainer={"name": "osdre", "options": {"training": {"lr": 0.002}}},
        pipeline={"name": "train_oe"},
        preprocessor={"name": "base"},
        evaluator={"name": "base"},
        optimizer={"num_epochs": 2},
        recorder={"name": "base", "save_all_models": False},
        output_dir=str(out),
        save_output=False,
        seed=0,
        **machine,
    )
    with host.on_cpu():  # its validation takes a GPU for granted
        get_pipeline(config).run()

    assert (out / "best.ckpt").is_file()
    whole, net = (OSDRENet.load(out, folded) for folded in (False, True))
    state = torch.load(next(out.glob("last_*.ckpt")), weights_only=True)
    assert torch.equal(state["ratio.network.head.weight"], whole.ratio.network.head.weight)
    frames = [eval_ood(evaluator(root, n), progress=False) for n in (whole, net)]
    assert frames[0].notna().all().all()
    assert np.allclose(*frames, atol=1e-6)


@pytest.mark.skipif(shutil.which("bash") is None, reason="the recipe is for a shell")
def test_the_recipe_of_the_page_trains_and_tests_on_a_cpu(root: Path, tmp_path: Path) -> None:
    r"""The page's own commands, in processes that have its stand-ins before anything else."""
    import openood

    ours, clone = Path(__file__).parents[1], Path(openood.__path__[0]).parent
    if not (clone / "configs").is_dir():
        pytest.skip("OpenOOD is not a clone, so it has no configurations")
    page = (ours / "docs" / "openood.md").read_text()
    recipe, train, test = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "OpenOOD").symlink_to(clone)
    (tmp_path / "configs").symlink_to(clone / "configs")
    (tmp_path / "data").symlink_to(root)
    small = tmp_path / "small.yml"
    small.write_text(yaml.safe_dump(SMALL))

    def shell(script: str) -> str:
        end = f'export PYTHONPATH="$PYTHONPATH:{ours}" CUDA_VISIBLE_DEVICES=\n{script}'
        done = subprocess.run(
            ["bash", "-ec", recipe + end.replace("OOD_OSDRE/", f"{ours}/")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    shell(
        f"{train.strip()} --num_workers 0 --network.config {small} --optimizer.num_epochs 1"
        " --dataset.train.batch_size 4 --dataset.oe.batch_size 4"
    )
    (best,) = tmp_path.glob("results/**/best.ckpt")
    told = shell(test.strip().replace("runs/cifar10", str(best.parent)) + " --num_workers 0")
    assert "there is no GPU, so everything runs on the CPU" in told
    (file,) = tmp_path.glob("results/**/ood.csv")
    theirs = pd.read_csv(file, index_col=0)
    ours_again = eval_ood(evaluator(root, OSDRENet.load(best.parent)), progress=False)
    for name in ("nearood", "farood"):
        assert theirs.loc[name].to_numpy() == pytest.approx(
            ours_again.loc[name].to_numpy(), abs=0.006
        )


# The command


@pytest.fixture(scope="module")
def command() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "openood_eval.py"
    spec = importlib.util.spec_from_file_location("benchmarks_openood_eval", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finished(run: Path, root: Path, seed: int = 0) -> tuple[MetricsTable, float]:
    r"""Makes a run folder of a model and its scores."""
    config = write_run(run, classes=10, seed=seed)
    scores, accuracy = our_scores(root, run)
    write_scores(run / "scores.npz", scores)
    results = {"accuracy": accuracy, "parameters": 1}
    record = {"config": config.to_dict(), "results": results, "data": {"reference": "tin597"}}
    (run / "run.json").write_text(json.dumps(record))
    return table_of(scores), accuracy


def test_command_prints_the_evaluators_table_of_several_runs(
    command: ModuleType, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "out"
    made = [finished(run, root, seed) for seed, run in enumerate(runs)]
    options = ["--data-root", str(root), "--workers", "0", "--quiet"]
    files = [str(run / "scores.npz") for run in runs]
    for way in (["--checkpoint", *map(str, runs)], ["--scores", *files]):
        assert command.main([*options, *way, "--out", str(out)]) == 0
        frame = pd.read_csv(out / "openood.csv", index_col=0)
        assert list(frame.index) == ROWS
        aurocs = [100 * np.mean([t.mean(name).auroc for t, _ in made]) for name in ROWS]
        assert frame["AUROC"].to_numpy() == pytest.approx(aurocs, abs=1e-5)
        accuracy = 100 * np.mean([a for _, a in made])
        assert frame["ACC"].to_numpy() == pytest.approx(accuracy, abs=1e-5)
        assert "OOD positive, OpenOOD v1.5" in capsys.readouterr().out
    results = json.loads((out / "openood.json").read_text())["results"]
    assert results["columns"] == list(frame.columns)
    assert np.shape(results["values"]) == (2, 8, 5)
    assert command.main([*options, "--checkpoint", str(runs[0]), "--fsood"]) == 0


def test_leaderboard_takes_full_benchmarks_only(
    command: ModuleType,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [finished(tmp_path / name, root, seed) for seed, name in enumerate("ab")]
    board = tmp_path / "results.csv"
    arguments = ["--data-root", str(root), "--workers", "0", "--quiet"]
    arguments += ["--leaderboard", str(board)]
    arguments += ["--scores", *(str(tmp_path / name / "scores.npz") for name in "ab")]
    assert command.main(arguments) == 2
    assert "needs the full benchmark, but not whole are: cifar10" in capsys.readouterr().err
    assert not board.exists()

    # As if the root were whole.
    monkeypatch.setattr(command, "check", lambda *args: [])
    for rows in (1, 2):
        assert command.main(arguments) == 0
        frame = pd.read_csv(board)
        assert len(frame) == rows
    near = [100 * table.mean("nearood").auroc for table, _ in made]
    assert list(frame.columns) == list(command.LEADERBOARD)
    row = frame.iloc[1]
    assert row["Near-OOD_AUROC"] == f"{np.mean(near):.2f} ± {np.std(near, ddof=1):.2f}"
    assert row["Outlier_Data"] == "Yes"
    assert row["Arch"] == "ResNet [1, 1, 1, 1] (width 0.125, stem stride 2)"
    assert "tin597" in row["Additional_Description"]

    board.write_text("name,auroc\n")
    assert command.main(arguments) == 2
    assert "its first line is not" in capsys.readouterr().err
    assert board.read_text() == "name,auroc\n"


def test_command_says_what_is_wrong_in_one_line(
    command: ModuleType, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete = write_root(tmp_path / "data", count=1)
    (incomplete / "benchmark_imglist" / "cifar10" / "test_tin.txt").unlink()
    for image in (incomplete / "images_classic" / "svhn").iterdir():
        image.unlink()
    for data, arguments, message in (
        (root, [], "give either --checkpoint or --scores"),
        (root, ["--scores", "x", "--fsood"], "--fsood: needs --checkpoint"),
        (root, ["--checkpoint", str(tmp_path / "absent")], "absent: no checkpoint here"),
        (
            root,
            ["--scores", "absent/scores.npz"],
            r"absent/scores\.npz: not a readable scores file",
        ),
        (root, ["--checkpoint", "x", "--leaderboard", "y", "--fsood"], "without --fsood"),
        # #132, #196, #202: OpenOOD would ask Google Drive for what is missing.
        (
            incomplete,
            ["--checkpoint", "x"],
            r"2 lists or image folders are absent: .*/test_tin\.txt, images_classic/svhn",
        ),
    ):
        options = ["--data-root", str(data), "--workers", "0", "--quiet"]
        assert command.main([*options, *arguments]) == 2
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert len(err.strip().splitlines()) == 1
