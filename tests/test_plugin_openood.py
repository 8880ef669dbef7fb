r"""The contract of OpenOOD's postprocessors, trainers and networks, without OpenOOD."""

import ast
import pickle
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from openood_host import (
    MEAN,
    SMALL,
    STD,
    Forbidden,
    HostConfig,
    HostEvaluator,
    HostLoaders,
    HostNet,
    write_run,
)
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ood_osdre.config import Config, HeadConfig
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors.feature_ratio import FeatureRatio
from ood_osdre.detectors.scorer import load_scorer
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.models import SpeedBackbone
from ood_osdre.models.baselines import Classifier
from ood_osdre.models.networks import MLP
from ood_osdre.plugin.openood import (
    OSDRENet,
    OSDREPostprocessor,
    OSDRETrainer,
    host,
    register,
    unregister,
)
from ood_osdre.plugin.openood import __main__ as command
from ood_osdre.plugin.openood.__main__ import main
from ood_osdre.plugin.openood.host import Foreign
from ood_osdre.plugin.openood.loaders import normalisation_of, view_of
from ood_osdre.plugin.openood.registration import build_network
from ood_osdre.resources import folders
from ood_osdre.training.batches import broadened

CONFIGS = folders("configs")[0] / "openood"
HEAD = {"training": {"steps": 30, "batch_size": 32}, "width": 16, "depth": 1}


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)  # conftest puts it back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def loaders() -> HostLoaders:
    return HostLoaders()


def features_mode(loaders: HostLoaders, **options: Foreign) -> OSDREPostprocessor:
    head = {**HEAD, "training": {**HEAD["training"], **options}}
    return OSDREPostprocessor(mode="features", reference=loaders.reference, broaden=0, head=head)


def checkpoint_mode(run: Path, **options: Foreign) -> OSDREPostprocessor:
    return OSDREPostprocessor(mode="checkpoint", checkpoint=str(run), **options)


def images(loader: DataLoader, key: str = "data") -> Tensor:
    return torch.cat([batch[key] for batch in loader])


# The contract of the postprocessor


@pytest.mark.parametrize("wrap", ["net", "ratio", "parallel"])
def test_network_mode_scores_by_the_ratio_in_one_pass(
    wrap: str, run: Path, loaders: HostLoaders
) -> None:
    own, x = OSDRENet.load(run), images(loaders.id["test"])
    net = {"net": own, "ratio": own.ratio, "parallel": nn.DataParallel(own)}[wrap]
    expected = load_scorer(run).ratio.predict(x)
    passes: list[object] = []
    own.ratio.backbone.register_forward_hook(lambda *args: passes.append(1))
    postprocessor = OSDREPostprocessor()
    postprocessor.setup(net, loaders.id, loaders.ood)
    pred, conf = postprocessor.postprocess(net, x)

    assert len(passes) == 1
    assert torch.allclose(conf, expected.score, atol=1e-6)
    assert torch.equal(pred, expected.logits.argmax(dim=1))
    assert pred.shape == conf.shape == (24,)
    assert not conf.requires_grad


def test_network_mode_refuses_a_host_that_normalises_otherwise(
    run: Path, loaders: HostLoaders
) -> None:
    r"""#198, #274: every image by the ID statistics that the network was trained with."""
    net = OSDRENet.load(run)
    net.normalisation = ([0.5] * 3, [0.5] * 3)
    with pytest.raises(UserError, match=r"mean \[0\.4914.*was trained with \[0\.5, 0\.5, 0\.5\]"):
        OSDREPostprocessor().setup(net, loaders.id, loaders.ood)


def test_checkpoint_mode_scores_beside_a_classifier(run: Path, loaders: HostLoaders) -> None:
    net, raw = HostNet(), loaders.id["test"].dataset.images
    expected, x = load_scorer(run).score(raw), images(loaders.id["test"])
    postprocessor = checkpoint_mode(run)
    postprocessor.setup(net, loaders.id, loaders.ood)
    pred, conf = postprocessor.postprocess(net, x)
    assert torch.equal(pred, net(x).argmax(dim=1))
    assert np.allclose(conf, expected, atol=1e-4)

    # A host that normalises otherwise is normalised again.
    x = (torch.as_tensor(raw).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    postprocessor = checkpoint_mode(run, mean=[0.5] * 3, std=[0.25] * 3)
    postprocessor.setup(net, loaders.id, loaders.ood)
    assert np.allclose(postprocessor.postprocess(net, x)[1], expected, atol=1e-4)


def test_features_mode_is_the_feature_ratio(loaders: HostLoaders, tmp_path: Path) -> None:
    net, x = HostNet(), images(loaders.id["test"])
    postprocessor = features_mode(loaders)
    postprocessor.setup(net, loaders.id, loaders.ood)
    ratio = FeatureRatio(HeadConfig.of(HEAD, "head"))
    ratio.fit(net, images(loaders.id["train"]), images(loaders.reference)).save(tmp_path)
    net.passes = 0
    pred, conf = postprocessor.postprocess(net, x)

    assert net.passes == 1
    assert torch.allclose(conf, ratio.log_ratio(x), atol=1e-5)
    assert torch.equal(pred, net(x).argmax(dim=1))
    saved = OSDREPostprocessor(mode="features", checkpoint=str(tmp_path))
    saved.setup(net, {}, {})
    assert torch.allclose(saved.postprocess(net, x)[1], ratio.log_ratio(x), atol=1e-6)


def test_features_mode_reads_reference_files_as_the_host_does(
    loaders: HostLoaders, tmp_path: Path
) -> None:
    lines = []
    for i, image in enumerate(loaders.reference.dataset.images):
        Image.fromarray(image).save(tmp_path / f"{i:02d} a.png")
        lines.append(f"{i:02d} a.png -1\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "reference.txt").write_text("".join(lines))
    net, x = HostNet(), images(loaders.id["test"])
    given = features_mode(loaders)
    given.setup(net, loaders.id, {})
    by_list = {"reference": str(tmp_path / "lists/reference.txt"), "reference_root": str(tmp_path)}
    for files in (by_list, {"reference": str(tmp_path)}):
        options = {"mode": "features", "broaden": 0, "head": HEAD, **files}
        read = OSDREPostprocessor(HostConfig(postprocessor={"postprocessor_args": options}))
        read.setup(net, loaders.id, {})
        assert torch.allclose(read.postprocess(net, x)[1], given.postprocess(net, x)[1], atol=1e-5)


def test_features_mode_broadens_the_reference(loaders: HostLoaders) -> None:
    net, x = HostNet(), images(loaders.id["test"])
    batches = [b["data"] for b in loaders.reference]
    options = {"mode": "features", "reference": batches, "head": HEAD, "broaden": 0.5}
    postprocessor = OSDREPostprocessor(**options)
    postprocessor.setup(net, loaders.id, loaders.ood)
    ratio = FeatureRatio(HeadConfig.of(HEAD, "head"))
    ratio.fit(net, images(loaders.id["train"]), broadened(batches, Preprocess(MEAN, STD), 0.5))
    assert torch.allclose(postprocessor.postprocess(net, x)[1], ratio.log_ratio(x), atol=1e-5)

    plain = {"train": [{"data": batches[0]}]}
    with pytest.raises(UserError, match="broaden: the ID loader does not show how it normalises"):
        OSDREPostprocessor(**options).setup(net, plain, {})
    OSDREPostprocessor(**options, mean=list(MEAN), std=list(STD)).setup(net, plain, {})


def test_features_come_from_images_as_they_are_at_test_time() -> None:
    r"""The pipelines augment the training split, which here blackens it; `data_aux` is plain."""
    net, scores = HostNet(), []
    for style in ("evaluator", "pipeline"):
        loaders = HostLoaders(style)
        postprocessor = features_mode(loaders)
        postprocessor.setup(net, loaders.id, {})
        scores.append(postprocessor.postprocess(net, images(loaders.id["test"]))[1])
        assert view_of(loaders.id, "val").key == "data"

    assert view_of(loaders.id, "train").key == "data_aux"
    assert torch.equal(*scores)
    with pytest.raises(UserError, match="id_split: no 'training' among the ID loaders train, val"):
        view_of(loaders.id, "training")


def test_a_head_is_trained_anew_for_another_network(loaders: HostLoaders) -> None:
    x, postprocessor = images(loaders.id["test"]), features_mode(loaders)
    for net in (HostNet(), HostNet()):
        postprocessor.setup(net, loaders.id, loaders.ood)
        fresh = features_mode(loaders)
        fresh.setup(net, loaders.id, loaders.ood)
        assert torch.equal(postprocessor.postprocess(net, x)[1], fresh.postprocess(net, x)[1])


@pytest.mark.parametrize("mode", ["network", "checkpoint", "features"])
@pytest.mark.parametrize("style", ["evaluator", "pipeline"])
def test_setup_reads_no_ood_and_survives_pickling(mode: str, style: str, run: Path) -> None:
    r"""The host calls setup before it puts the network in evaluation mode, and may pickle."""
    loaders, net = HostLoaders(style), OSDRENet.load(run, folded=False).train()
    postprocessor = {
        "network": OSDREPostprocessor,
        "checkpoint": lambda: checkpoint_mode(run),
        "features": lambda: features_mode(loaders),
    }[mode]()
    postprocessor.setup(net, loaders.id, Forbidden())
    assert not net.training
    x = images(loaders.id["test"])
    expected = postprocessor.postprocess(net, x)[1]
    net.train()
    assert torch.allclose(postprocessor.postprocess(net, x[:1])[1], expected[:1], atol=1e-5)

    copy = pickle.loads(pickle.dumps(postprocessor, pickle.HIGHEST_PROTOCOL))
    assert copy.setup_flag
    assert torch.equal(copy.postprocess(net, x)[1], expected)
    # Set up again with the same network, nothing is trained anew.
    copy.setup(net, loaders.id, loaders.ood)
    assert torch.equal(copy.postprocess(net, x)[1], expected)
    if mode == "features":
        with pytest.raises(UserError, match="HostNet: not the network"):
            copy.postprocess(HostNet(), x)


def test_inference_returns_arrays_as_the_host_expects(run: Path, loaders: HostLoaders) -> None:
    net, postprocessor = OSDRENet.load(run), OSDREPostprocessor()
    pred, conf, label = postprocessor.inference(net, loaders.id["test"], False)

    assert [a.dtype for a in (pred, conf, label)] == [np.int64, np.float32, np.int64]
    assert pred.shape == conf.shape == label.shape == (24,)
    assert label.tolist() == [i % 4 for i in range(24)]
    batches = [postprocessor.postprocess(net, b["data"]) for b in loaders.id["test"]]
    assert np.array_equal(conf, torch.cat([c for _, c in batches]).numpy())
    with pytest.raises(UserError, match=r"postprocessor scores: .*(empty|at least one)"):
        postprocessor.inference(net, [], progress=False)
    nn.init.constant_(net.ratio.head.bias, torch.nan)
    with pytest.raises(UserError, match=r"24 of 24 are NaN or infinite, first at 0\.png, 1\.png"):
        postprocessor.inference(net, loaders.id["test"], progress=False)


# What users of OpenOOD have stumbled over


def test_larger_is_more_id(loaders: HostLoaders) -> None:
    r"""OpenOOD #173: deviations were once returned as confidences."""
    evaluator = HostEvaluator(HostNet(), features_mode(loaders, steps=200, lr=5e-3), loaders)
    sets = loaders.id["test"], loaders.ood["far"]["svhn"]
    conf = [evaluator.postprocessor.inference(evaluator.net, s, False)[1] for s in sets]
    assert conf[0].mean() > 0 > conf[1].mean()
    assert ood_metrics(*conf).auroc > 0.95


SWEEP = {"training": {"steps": [5, 40, 80], "lr": [1e-4, 5e-3]}}


def searching(loaders: HostLoaders, sweep: Foreign) -> OSDREPostprocessor:
    section = {
        "name": "osdre_features",
        "APS_mode": True,
        "postprocessor_args": {"mode": "features", "broaden": 0, "head": HEAD},
        "postprocessor_sweep": sweep,
    }
    return OSDREPostprocessor(HostConfig(postprocessor=section), reference=loaders.reference)


def test_search_sets_by_position_in_the_order_of_the_sweep(loaders: HostLoaders) -> None:
    r"""#216: setup comes before the first set_hyperparam."""
    postprocessor = searching(loaders, SWEEP)
    assert (postprocessor.APS_mode, postprocessor.hyperparam_search_done) == (True, False)
    assert list(postprocessor.args_dict) == ["training.steps", "training.lr"]
    evaluator = HostEvaluator(HostNet(), postprocessor, loaders)

    assert [c for _, c in evaluator.tried] == [
        [s, lr] for lr in SWEEP["training"]["lr"] for s in SWEEP["training"]["steps"]
    ]
    assert postprocessor.hyperparam_search_done
    chosen = postprocessor.get_hyperparam()
    assert chosen == max(evaluator.tried, key=lambda t: t[0])[1]
    assert postprocessor.mode.ratio.options.training.lr == chosen[1]
    with pytest.raises(ValueError, match="shorter"):
        postprocessor.set_hyperparam([1])


def test_sweeps_are_not_inert(loaders: HostLoaders) -> None:
    r"""#298: a value set after setup changes the scores, to those of a fresh fit with it."""
    net, x = HostNet(), images(loaders.id["test"])
    postprocessor = searching(loaders, {"training.lr": [1e-3, 5e-3]})
    postprocessor.setup(net, loaders.id, loaders.ood)
    before = postprocessor.postprocess(net, x)[1]
    postprocessor.set_hyperparam([5e-3])
    fresh = features_mode(loaders, lr=5e-3)
    fresh.setup(net, loaders.id, loaders.ood)

    assert not torch.allclose(postprocessor.postprocess(net, x)[1], before)
    assert torch.equal(postprocessor.postprocess(net, x)[1], fresh.postprocess(net, x)[1])
    copy = pickle.loads(pickle.dumps(postprocessor))
    with pytest.raises(AssertionError, match="features are not kept"):
        copy.set_hyperparam([1e-3])


@pytest.mark.parametrize("section", [{}, {"APS_mode": None}, {"postprocessor_args": None}])
def test_missing_keys_have_defaults(section: dict[str, Any]) -> None:
    r"""#136: some of the host's files lack APS_mode."""
    for config in (HostConfig(postprocessor=section), HostConfig(), None):
        postprocessor = OSDREPostprocessor(config)
        assert postprocessor.APS_mode is False
        assert postprocessor.hyperparam_search_done is False
        assert postprocessor.setup_flag is False
        assert postprocessor.args_dict == {}
        assert postprocessor.get_hyperparam() == []
        postprocessor.set_hyperparam([])


ARGS = "postprocessor_args: "
FEATURES = {"mode": "features", "reference": "x"}


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ({}, {"mod": "network"}, f"{ARGS}unknown key 'mod'; did you mean 'mode'"),
        ({}, {"mode": "net"}, f"{ARGS}mode: got 'net', expected 'network', 'checkpoint' or"),
        ({}, {"mode": "checkpoint"}, f"{ARGS}checkpoint: the mode 'checkpoint' needs"),
        ({}, {"mode": "features"}, f"{ARGS}reference: the mode 'features' needs"),
        ({}, {"head": {"rank": 3}}, f"{ARGS}head: belongs to the mode 'features'"),
        ({}, {"reference": [1]}, f"{ARGS}reference: belongs to the mode 'features'"),
        ({}, {"mean": [0.5] * 3}, f"{ARGS}mean: give both 'mean' and 'std'"),
        ({}, {**FEATURES, "head": {"ranc": 3}}, r"head\.ranc'; did you mean 'head\.rank'"),
        ({}, {**FEATURES, "head": {"training": {"steps": 0}}}, r"head\.training\.steps: got 0"),
        ({"APS_mode": "no"}, {}, "postprocessor: APS_mode: got 'no'"),
        ({"APS_mode": True}, {}, "postprocessor_sweep: got nothing, expected .*APS_mode: False"),
        ({"postprocessor_sweep": {"T": [1]}}, {}, "postprocessor_sweep: got T, expected .*none"),
        (
            {"postprocessor_sweep": {"T": []}},
            {},
            r"postprocessor: postprocessor_sweep\.T: got \[\]",
        ),
        ({"postprocessor_args": 5}, {}, "postprocessor: postprocessor_args: got 5"),
    ],
)
def test_mistaken_options_are_refused_in_one_line(
    section: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        OSDREPostprocessor(HostConfig(postprocessor=section), **options)
    assert "\n" not in str(caught.value)


def test_a_search_that_the_host_switches_on_from_outside_needs_a_sweep(run: Path) -> None:
    postprocessor = OSDREPostprocessor()
    postprocessor.APS_mode = True
    with pytest.raises(UserError, match="postprocessor_sweep: got nothing"):
        postprocessor.setup(OSDRENet.load(run), {}, {})


def test_networks_without_what_is_needed_are_refused(run: Path, loaders: HostLoaders) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))
    classifier = OSDRENet(Classifier(nn.Sequential(nn.Flatten(), MLP(3072, 8, 1)), 8, 4))
    for net in (HostNet(), nn.DataParallel(HostNet()), classifier):
        with pytest.raises(UserError, match=r"network: (HostNet|Classifier) is no OS-DRE network"):
            OSDREPostprocessor().setup(net, loaders.id, loaders.ood)
    with pytest.raises(UserError, match="Sequential: offers no features"):
        features_mode(loaders).setup(flat, loaders.id, loaders.ood)
    write_run(run.parent / "headless", objective={"class_weight": 0.0})
    with pytest.raises(UserError, match="no OS-DRE network with a log-ratio and a class head"):
        OSDRENet.load(run.parent / "headless")


def test_reference_files_that_are_missing_are_named(loaders: HostLoaders, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png -1\nb.png -1\n")
    for name, message in (
        ("list.txt", r"2 of 2 images are missing, .*a\.png for one"),
        ("absent", "absent: cannot be read"),
    ):
        postprocessor = OSDREPostprocessor(mode="features", reference=str(tmp_path / name))
        with pytest.raises(UserError, match=message):
            postprocessor.setup(HostNet(), loaders.id, loaders.ood)


def test_normalisation_is_found_within_compositions() -> None:
    from torchvision import transforms as T

    inner = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])
    wrapper = type("Preprocessor", (), {"transform": inner})()
    for transform in (inner, wrapper, T.Compose([T.Compose([inner])])):
        assert normalisation_of(transform) == (list(MEAN), list(STD))
    assert normalisation_of(T.Normalize([0.5], [0.2])) == ([0.5] * 3, [0.2] * 3)
    assert normalisation_of(T.ToTensor()) is None
    assert normalisation_of(None) is None
    with pytest.raises(UserError, match=r"host's transform: mean: got shape \(2,\)"):
        normalisation_of(T.Normalize([0.5] * 2, [0.2] * 2))


# The network


def test_network_has_the_face_of_the_hosts(run: Path, loaders: HostLoaders) -> None:
    net, x = OSDRENet.load(run), images(loaders.id["test"])
    logits, features = net(x, return_feature=True)
    weight, bias = net.get_fc()

    assert torch.equal(net(x), logits)
    assert features.shape == (24, net.feature_size)
    assert np.allclose(features.detach().numpy() @ weight.T + bias, logits.detach(), atol=1e-4)
    assert net.get_fc_layer() is net.ratio.class_head
    assert (net.num_classes, net.training) == (4, False)


def test_built_networks_load_what_the_host_saved(run: Path, tmp_path: Path) -> None:
    config_file = tmp_path / "small.yml"
    config_file.write_text(yaml.safe_dump(SMALL))
    net = OSDRENet.load(run, folded=False)
    torch.save(net.state_dict(), tmp_path / "best.ckpt")
    section = {"name": "osdre", "config": str(config_file), "num_classes": 4, "num_gpus": 0}
    x = torch.randn(2, 3, 32, 32)

    for checkpoint in (run, tmp_path / "best.ckpt"):
        built = build_network({**section, "pretrained": True, "checkpoint": str(checkpoint)})
        assert torch.equal(built.eval()(x), net(x))
        assert built.state_dict().keys() == net.state_dict().keys()  # to be trained further
    assert build_network({**section, "pretrained": False}).training
    assert build_network({**section, "name": "resnet18_32x32"}) is None
    with pytest.raises(UserError, match=r"network\.config: is absent"):
        build_network({"name": "osdre", "num_classes": 4})
    torch.save(OSDRENet.load(run).state_dict(), tmp_path / "best.ckpt")
    with pytest.raises(UserError, match="of another architecture"):
        build_network({**section, "pretrained": True, "checkpoint": str(tmp_path / "best.ckpt")})


# The trainer


def host_config(tmp_path: Path, epochs: int = 2, **options: Foreign) -> HostConfig:
    return HostConfig(
        optimizer={"num_epochs": epochs, "lr": 0.1},
        trainer={"name": "osdre", "options": options},
        output_dir=str(tmp_path / "out"),
    )


def small_net(**changes: Foreign) -> OSDRENet:
    return OSDRENet.build(Config.from_mapping({**SMALL, **changes}), classes=4)


def test_trainer_keeps_the_hosts_contract(tmp_path: Path) -> None:
    loaders = HostLoaders("pipeline")
    net, x = small_net(), images(loaders.id["test"])
    trainer = OSDRETrainer(net, loaders.id["train"], loaders.reference, host_config(tmp_path))
    before = trainer.trainer.averaged.state_dict()["network.head.weight"].clone()
    postprocessor = OSDREPostprocessor()
    for epoch in (1, 2):
        trained, metrics = trainer.train_epoch(epoch)
        assert metrics["epoch_idx"] == epoch
        assert np.isfinite(metrics["loss"])
        # Each epoch is scored with its own weights.
        conf = postprocessor.postprocess(trained, x)[1]
        assert torch.allclose(conf, trained.ratio.log_ratio(x), atol=1e-5)

    assert trainer.trainer.outcome.step == 2 * len(loaders.id["train"])
    assert not torch.equal(trained.ratio.network.head.weight, before)
    # What was trained is what the run folder holds, ready for the evaluator.
    loaded = OSDRENet.load(tmp_path / "out")
    assert torch.equal(loaded(x), trained.eval()(x))
    assert load_scorer(tmp_path / "out").preprocess.mean.tolist() == pytest.approx(MEAN)
    with pytest.raises(AssertionError, match=r"epoch 3 is more than optimizer\.num_epochs"):
        trainer.train_epoch(3)


@pytest.mark.slow
def test_trainer_learns_to_tell_reference_from_id(tmp_path: Path) -> None:
    loaders = HostLoaders("pipeline", count=64, batch_size=32)
    config = host_config(tmp_path, 15, training={"lr": 3e-3}, data={"crop": 2})
    trainer = OSDRETrainer(small_net(), loaders.id["train"], loaders.reference, config)
    assert trainer.trainer.options.lr == 3e-3
    losses = [trainer.train_epoch(epoch)[1]["loss"] for epoch in range(1, 16)]
    postprocessor = OSDREPostprocessor()
    sets = loaders.id["test"], loaders.ood["farood"]["svhn"]
    conf = [postprocessor.inference(trainer.net, s, False)[1] for s in sets]
    assert losses[-1] < losses[0]
    assert ood_metrics(*conf).auroc > 0.9


def test_id_and_reference_are_augmented_alike(tmp_path: Path) -> None:
    r"""The host would give the reference no augmentation; its `data` of ID images is black here."""
    same = HostLoaders("pipeline", batch_size=24)
    same.reference = same.id["train"]
    trainer = OSDRETrainer(small_net(), same.id["train"], same.reference, host_config(tmp_path))
    batch = trainer.batches(0)
    plain = images(same.id["train"], "data_aux")

    assert batch.x_1.std() > 0.1  # not the black ones
    for x in (batch.x_0, batch.x_1):
        moved = (x - plain).flatten(1).abs().amax(dim=1) > 1e-3
        assert 0.5 < moved.float().mean() <= 1
        assert torch.allclose(x.mean(), plain.mean(), atol=0.1)
    assert batch.label.tolist() == [i % 4 for i in range(24)]


def test_every_reference_image_has_its_turn(tmp_path: Path) -> None:
    loaders, uneven = HostLoaders(batch_size=24), HostLoaders(batch_size=5)
    config = host_config(tmp_path, data={"flip": "none", "crop": 0})
    trainer = OSDRETrainer(small_net(), loaders.id["train"], uneven.reference, config)
    for batch in [trainer.batches(step) for step in range(2)]:
        assert torch.allclose(batch.x_0, images(loaders.reference, "data_aux"), atol=1e-5)
        assert torch.allclose(batch.x_1, images(loaders.id["train"], "data_aux"), atol=1e-5)


def test_a_network_that_whitens_sees_the_first_id_images(tmp_path: Path) -> None:
    loaders = HostLoaders(batch_size=24)
    net = small_net(network={"kind": "speed", "width": 0.125})
    trainer = OSDRETrainer(net, loaders.id["train"], loaders.reference, host_config(tmp_path))
    backbone = net.ratio.network.backbone
    assert backbone.is_prepared
    fresh = SpeedBackbone(0.125)
    fresh.prepare(images(loaders.id["train"], "data_aux"))
    assert torch.equal(backbone.whitening, fresh.whitening)
    assert trainer.train_epoch(1)[1]["loss"] > 0


def test_trainer_refuses_what_it_cannot_train(
    tmp_path: Path, run: Path, loaders: HostLoaders
) -> None:
    config, train, reference = host_config(tmp_path), loaders.id["train"], loaders.reference
    raw = [{"data": torch.zeros(2, 3, 32, 32)}]
    for net, id_loader, other, message in (
        (HostNet(), train, reference, "got HostNet, expected the network 'osdre'"),
        (nn.DataParallel(small_net()), train, reference, "got DataParallel"),
        (OSDRENet.load(run), train, reference, "a folded network cannot be trained"),
        (small_net(), train, None, "needs an ID and a reference loader, not empty"),
        (small_net(), [], reference, "needs an ID and a reference loader, not empty"),
        (small_net(), raw, reference, "shows no normalisation"),
    ):
        with pytest.raises(UserError, match=f"trainer: .*{message}"):
            OSDRETrainer(net, id_loader, other, config)
    mistaken = host_config(tmp_path, training={"rate": 1})
    with pytest.raises(UserError, match=r"trainer\.options: unknown key 'training\.rate'"):
        OSDRETrainer(small_net(), train, reference, mistaken)
    OSDRETrainer(OSDRENet.load(run, folded=False), train, reference, config)
    bad = small_net()
    nn.init.constant_(bad.get_fc_layer().weight, torch.nan)
    with pytest.raises(UserError, match="loss is not finite in epoch 1"):
        OSDRETrainer(bad, train, reference, config).train_epoch(1)


# The host itself


def test_shipped_files_keep_search_off_and_build() -> None:
    r"""#136: every YAML file of a postprocessor has APS_mode."""
    found = sorted((CONFIGS / "postprocessors").glob("*.yml"))
    assert [p.stem for p in found] == ["osdre", "osdre_checkpoint", "osdre_features"]
    for path in found:
        section = yaml.safe_load(path.read_text())["postprocessor"]
        assert section["APS_mode"] is False
        assert section["name"] == path.stem
        if section["postprocessor_args"]["mode"] != "checkpoint":  # which reads its checkpoint
            made = OSDREPostprocessor(HostConfig(postprocessor=section))
    assert made.mode.options.head == HeadConfig()


class Broken:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "openood":
            raise AttributeError("module 'numpy' has no\nattribute 'sctypes'")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [n for n in sys.modules if n.split(".")[0] == "openood"]:
        monkeypatch.delitem(sys.modules, name)
    host._attempt.cache_clear()
    yield monkeypatch
    host._attempt.cache_clear()


def test_whatever_the_import_raises_is_caught_and_said_in_one_line(
    without: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without.setattr(sys, "meta_path", [Broken(), *sys.meta_path])

    assert not host.is_importable()
    expected = "failed with AttributeError: module 'numpy' has no attribute 'sctypes'"
    assert expected in host.explain_import()
    with pytest.raises(UserError, match="failed with AttributeError"):
        host.require("openood.networks")
    assert host.base_postprocessor()(3).config == 3
    assert main() == 2
    assert expected in capsys.readouterr().err


def test_without_openood_the_plugin_says_so(without: pytest.MonkeyPatch) -> None:
    without.setitem(sys.modules, "openood", None)
    for attempt in (register, unregister):
        with pytest.raises(UserError, match="OpenOOD: not installed; it is not on PyPI"):
            attempt()


def test_code_that_moves_to_a_gpu_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Foreign] = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: asked.append(kwargs))
    before = torch.Tensor.cuda, nn.Module.cuda, torch.load
    x, module = torch.zeros(2), nn.Linear(2, 2)

    @host.on_cpu()
    def run() -> None:
        assert x.cuda(0, non_blocking=True) is x
        assert module.cuda() is module
        torch.load("weights")
        torch.load("weights", map_location="meta")
        raise KeyError

    with pytest.raises(KeyError):
        run()
    assert asked == [{"map_location": "cpu"}, {"map_location": "meta"}]
    assert (torch.Tensor.cuda, nn.Module.cuda, torch.load) == before


@pytest.mark.parametrize(
    ("gpus", "there", "moved"),
    [(1, False, False), (0, True, False), (1, True, True), (None, True, False)],
)
def test_pipelines_run_where_they_can(
    gpus: int | None,
    there: bool,
    moved: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, found = torch.zeros(1), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: None)  # the real one
    pipeline = type("Pipeline", (), {"run": lambda self: found.append(x.cuda() is None)})()
    stand_in = type("Module", (), {})()
    stand_in.setup_config = lambda: HostConfig(num_gpus=gpus, num_machines=1)
    stand_in.get_pipeline = lambda config: pipeline
    monkeypatch.setattr(command, "register", lambda: None)
    monkeypatch.setattr(command, "require", lambda name: stand_in)
    assert main() == 0
    assert found == [moved]
    assert ("there is no GPU" in caplog.text) == (gpus == 1 and not there)


def test_several_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = type("Module", (), {})()
    stand_in.setup_config = lambda: HostConfig(num_gpus=2, num_machines=2)
    monkeypatch.setattr(command, "register", lambda: None)
    monkeypatch.setattr(command, "require", lambda name: stand_in)
    assert main() == 2
    assert "num_gpus: got 4 on all machines, expected 0 or 1" in capsys.readouterr().err


def test_page_names_what_there_is() -> None:
    page = (CONFIGS.parents[1] / "docs" / "openood.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ood_osdre"):
                module = import_module(str(node.module))
                assert {a.name for a in node.names} <= set(module.__all__)
    for mode in ("network", "checkpoint", "features"):
        assert f"| `{mode}` |" in page
