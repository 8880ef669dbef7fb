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
    pictures,
    table_row,
    write_run,
)
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ood_osdre.config import Config
from ood_osdre.data.standardise import Preprocess
from ood_osdre.detectors.feature_ratio import FeatureRatio, FeatureRatioOptions
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scorer import load_scorer
from ood_osdre.models.classifier import Classifier
from ood_osdre.models.networks import MLP
from ood_osdre.plugin.openood import (
    OSDRENet,
    OSDREPostprocessor,
    OSDRETrainer,
    host,
    register,
    unregister,
)
from ood_osdre.plugin.openood.__main__ import main
from ood_osdre.plugin.openood.host import Foreign
from ood_osdre.plugin.openood.loaders import normalisation_of, view_of
from ood_osdre.plugin.openood.register import build_network
from ood_osdre.resources import folders
from ood_osdre.training.batches import broadened

CONFIGS = folders("configs")[0] / "openood"
HEAD = {"steps": 30, "width": 16, "depth": 1, "batch_size": 32}


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
    return OSDREPostprocessor(
        mode="features", reference=loaders.reference, broaden=0, head={**HEAD, **options}
    )


def images(loader: DataLoader) -> Tensor:
    return torch.cat([batch["data"] for batch in loader])


# The contract of the postprocessor


def test_network_mode_scores_by_the_ratio_in_one_pass(run: Path, loaders: HostLoaders) -> None:
    net, scorer = OSDRENet.load(run), load_scorer(run)
    passes: list[object] = []
    net.ratio.network.backbone.register_forward_hook(lambda *args: passes.append(1))
    postprocessor = OSDREPostprocessor()
    postprocessor.setup(net, loaders.id, loaders.ood)
    pred, conf = postprocessor.postprocess(net, images(loaders.id["test"]))
    h = scorer.ratio.coefficients(images(loaders.id["test"]))

    assert len(passes) == 1
    assert torch.allclose(conf, scorer.ratio.log_ratio_of(h.total))
    assert torch.equal(pred, h.logits.argmax(dim=1))
    assert pred.shape == conf.shape == (24,)
    assert not conf.requires_grad


def test_network_mode_takes_bare_and_folded_ratios(run: Path, loaders: HostLoaders) -> None:
    ratio, x = load_scorer(run).ratio, images(loaders.id["test"])
    expected = OSDREPostprocessor().postprocess(OSDRENet(ratio), x)
    for net in (ratio, ratio.fold(), nn.DataParallel(OSDRENet(ratio))):
        pred, conf = OSDREPostprocessor().postprocess(net, x)
        assert torch.equal(pred, expected[0])
        assert torch.allclose(conf, expected[1], atol=1e-5)


def test_checkpoint_mode_scores_beside_a_classifier(run: Path, loaders: HostLoaders) -> None:
    net, scorer = HostNet(), load_scorer(run)
    postprocessor = OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))
    postprocessor.setup(net, loaders.id, loaders.ood)
    x = images(loaders.id["test"])
    pred, conf = postprocessor.postprocess(net, x)

    assert torch.equal(pred, net(x).argmax(dim=1))
    assert torch.equal(conf, scorer.ratio.log_ratio(x))
    raw = loaders.id["test"].dataset.images
    assert np.allclose(conf, scorer.score(raw), atol=1e-4)


def test_network_mode_refuses_a_host_that_normalises_otherwise(
    run: Path, loaders: HostLoaders
) -> None:
    r"""#198, #274: every image by the ID statistics that the network was trained with."""
    net = OSDRENet.load(run)
    net.normalisation = ([0.5] * 3, [0.5] * 3)
    with pytest.raises(UserError, match=r"mean \[0\.4914.*was trained with \[0\.5, 0\.5, 0\.5\]"):
        OSDREPostprocessor().setup(net, loaders.id, loaders.ood)


def test_checkpoint_mode_normalises_again_where_the_host_does_otherwise(
    run: Path, loaders: HostLoaders
) -> None:
    scorer, raw = load_scorer(run), loaders.id["test"].dataset.images
    x = (torch.as_tensor(raw).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    postprocessor = OSDREPostprocessor(
        mode="checkpoint", checkpoint=str(run), mean=[0.5] * 3, std=[0.25] * 3
    )
    postprocessor.setup(HostNet(), loaders.id, loaders.ood)

    conf = postprocessor.postprocess(HostNet(), x)[1]
    assert np.allclose(conf, scorer.score(raw), atol=1e-4)
    with pytest.raises(UserError, match="give both 'mean' and 'std'"):
        OSDREPostprocessor(mode="checkpoint", checkpoint=str(run), mean=[0.5] * 3)


def test_checkpoint_mode_notices_images_that_are_not_normalised(run: Path) -> None:
    postprocessor = OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))
    batch = {"data": torch.rand(8, 3, 32, 32), "label": torch.zeros(8)}
    with pytest.raises(UserError, match=r"channels of 0\.5\d ± 0\.\d+.* not normalised"):
        postprocessor.setup(HostNet(), {"test": [batch]}, {})
    # Without a transform to see, normalised images are taken as they are.
    postprocessor.setup(HostNet(), {"test": [{"data": torch.randn(8, 3, 32, 32)}]}, {})


def test_checkpoint_mode_refuses_images_of_another_size(run: Path) -> None:
    postprocessor = OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))
    with pytest.raises(UserError, match=r"shape \(1, 3, 48, 48\), expected \(B, 3, 32, 32\)"):
        postprocessor.postprocess(HostNet(), torch.zeros(1, 3, 48, 48))


def test_features_mode_is_the_feature_ratio(loaders: HostLoaders) -> None:
    net = HostNet()
    postprocessor = features_mode(loaders)
    postprocessor.setup(net, loaders.id, loaders.ood)
    ratio = FeatureRatio(FeatureRatioOptions(**HEAD))
    ratio.fit(net, images(loaders.id["train"]), images(loaders.reference))
    net.passes = 0
    x = images(loaders.id["test"])
    pred, conf = postprocessor.postprocess(net, x)

    assert net.passes == 1
    assert torch.allclose(conf, ratio.log_ratio(x), atol=1e-5)
    assert torch.equal(pred, net(x).argmax(dim=1))


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
        config = {
            "postprocessor": {
                "postprocessor_args": {"mode": "features", "broaden": 0, "head": HEAD, **files}
            }
        }
        read = OSDREPostprocessor(HostConfig(config))
        read.setup(net, loaders.id, {})
        assert torch.allclose(read.postprocess(net, x)[1], given.postprocess(net, x)[1], atol=1e-5)


def test_features_mode_broadens_the_reference(loaders: HostLoaders) -> None:
    net, x = HostNet(), images(loaders.id["test"])
    preprocess = Preprocess(MEAN, STD)
    batches = [b["data"] for b in loaders.reference]
    postprocessor = OSDREPostprocessor(
        mode="features", reference=loaders.reference, broaden=0.5, head=HEAD
    )
    postprocessor.setup(net, loaders.id, loaders.ood)
    ratio = FeatureRatio(FeatureRatioOptions(**HEAD))
    ratio.fit(net, images(loaders.id["train"]), broadened(batches, preprocess, 0.5))

    assert torch.allclose(postprocessor.postprocess(net, x)[1], ratio.log_ratio(x), atol=1e-5)
    for before, after in zip(batches, broadened(batches, preprocess, 0.5), strict=True):
        changed = (before - after).flatten(1).abs().amax(dim=1) > 1e-3
        assert changed[:4].any()
        assert not changed[4:].any()
        pixels = after * preprocess.std[:, None, None] + preprocess.mean[:, None, None]
        assert pixels.min() > -1e-5
        assert pixels.max() < 1 + 1e-5
    plain = {"train": [{"data": batches[0]}]}
    refused = OSDREPostprocessor(mode="features", reference=batches)
    with pytest.raises(UserError, match=r"broaden: the ID loader does not show how it normalises"):
        refused.setup(net, plain, {})
    OSDREPostprocessor(
        mode="features", reference=batches, head=HEAD, mean=list(MEAN), std=list(STD)
    ).setup(net, plain, {})


def test_features_mode_loads_a_saved_head(loaders: HostLoaders, tmp_path: Path) -> None:
    net, x = HostNet(), images(loaders.id["test"])
    ratio = FeatureRatio(FeatureRatioOptions(**HEAD))
    ratio.fit(net, images(loaders.id["train"]), images(loaders.reference)).save(tmp_path)
    loaded = OSDREPostprocessor(mode="features", checkpoint=str(tmp_path))
    loaded.setup(net, {}, {})

    assert torch.allclose(loaded.postprocess(net, x)[1], ratio.log_ratio(x))


@pytest.mark.parametrize("style", ["evaluator", "pipeline"])
def test_setup_ignores_ood_loaders_in_either_style(style: str, run: Path) -> None:
    loaders = HostLoaders(style)
    net = HostNet()
    made = (
        (OSDRENet.load(run).train(), OSDREPostprocessor()),
        (net, OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))),
        (net, features_mode(loaders)),
    )
    for network, postprocessor in made:
        postprocessor.setup(network.train(), loaders.id, Forbidden())
        assert postprocessor.setup_flag
        assert not network.training


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


def test_setup_puts_the_network_in_evaluation_mode(run: Path, loaders: HostLoaders) -> None:
    r"""The host calls setup, and its search, before it does so itself."""
    net = HostNet().train()
    postprocessor = features_mode(loaders)
    postprocessor.setup(net, loaders.id, loaders.ood)
    assert not net.training

    x = images(loaders.id["test"])
    expected = postprocessor.postprocess(net, x)[1]
    net.train()
    assert torch.equal(postprocessor.postprocess(net, x)[1], expected)
    assert torch.allclose(postprocessor.postprocess(net, x[:1])[1], expected[:1], atol=1e-5)


def test_inference_returns_arrays_as_the_host_expects(run: Path, loaders: HostLoaders) -> None:
    net, postprocessor = OSDRENet.load(run), OSDREPostprocessor()
    pred, conf, label = postprocessor.inference(net, loaders.id["test"], False)

    assert [a.dtype for a in (pred, conf, label)] == [np.int64, np.float32, np.int64]
    assert pred.shape == conf.shape == label.shape == (24,)
    assert label.tolist() == [i % 4 for i in range(24)]
    batches = [postprocessor.postprocess(net, b["data"]) for b in loaders.id["test"]]
    assert np.array_equal(conf, torch.cat([c for _, c in batches]).numpy())
    with pytest.raises(UserError, match="the loader is empty"):
        postprocessor.inference(net, [], progress=False)


def test_scores_that_are_not_finite_are_refused_by_name(run: Path, loaders: HostLoaders) -> None:
    net = OSDRENet.load(run)
    nn.init.constant_(net.ratio.network.head.bias, torch.nan)
    with pytest.raises(UserError, match=r"24 of 24 are NaN or infinite, first at 0\.png, 1\.png"):
        OSDREPostprocessor().inference(net, loaders.id["test"], progress=False)


@pytest.mark.parametrize("mode", ["network", "checkpoint", "features"])
def test_postprocessors_survive_pickling(mode: str, run: Path, loaders: HostLoaders) -> None:
    r"""The host's script stores a postprocessor that has been set up."""
    net = OSDRENet.load(run)
    postprocessor = {
        "network": OSDREPostprocessor,
        "checkpoint": lambda: OSDREPostprocessor(mode="checkpoint", checkpoint=str(run)),
        "features": lambda: features_mode(loaders),
    }[mode]()
    postprocessor.setup(net, loaders.id, loaders.ood)
    copy = pickle.loads(pickle.dumps(postprocessor, pickle.HIGHEST_PROTOCOL))
    x = images(loaders.id["test"])

    assert copy.setup_flag
    assert torch.equal(copy.postprocess(net, x)[1], postprocessor.postprocess(net, x)[1])
    # Set up again with the same network, nothing is trained anew; with another one it is.
    copy.setup(net, loaders.id, loaders.ood)
    assert torch.equal(copy.postprocess(net, x)[1], postprocessor.postprocess(net, x)[1])
    if mode == "features":
        other = HostNet()
        with pytest.raises(UserError, match="HostNet: not the network"):
            copy.postprocess(other, x)


def test_a_head_is_trained_anew_for_another_network(loaders: HostLoaders) -> None:
    nets = [HostNet(), HostNet()]
    x = images(loaders.id["test"])
    postprocessor = features_mode(loaders)
    for net in nets:
        postprocessor.setup(net, loaders.id, loaders.ood)
        fresh = features_mode(loaders)
        fresh.setup(net, loaders.id, loaders.ood)
        assert torch.equal(postprocessor.postprocess(net, x)[1], fresh.postprocess(net, x)[1])


# What users of OpenOOD have stumbled over


def test_sign_larger_is_more_id(loaders: HostLoaders) -> None:
    r"""OpenOOD #173: deviations were once returned as confidences."""
    evaluator = HostEvaluator(HostNet(), features_mode(loaders, steps=200, lr=5e-3), loaders)
    inference = evaluator.postprocessor.inference
    id_conf = inference(evaluator.net, loaders.id["test"], False)[1]
    ood_conf = inference(evaluator.net, loaders.ood["far"]["svhn"], False)[1]

    assert id_conf.mean() > 0 > ood_conf.mean()
    assert ood_metrics(id_conf, ood_conf).auroc > 0.95


def test_table_of_the_host_is_ours(loaders: HostLoaders) -> None:
    r"""#206, #211, #308: OOD is positive, and both AUPRs are what they are called."""
    evaluator = HostEvaluator(HostNet(), features_mode(loaders), loaders)
    rows = evaluator.eval_ood()
    inference = evaluator.postprocessor.inference
    pred, id_conf, label = inference(evaluator.net, loaders.id["test"], False)

    assert list(rows) == ["cifar100", "tin", "mnist", "svhn", "texture", "places365"]
    for sets in (loaders.ood["near"], loaders.ood["far"]):
        for name, loader in sets.items():
            ours = ood_metrics(id_conf, inference(evaluator.net, loader, False)[1])
            assert rows[name][:4] == pytest.approx(
                [ours.fpr95, ours.auroc, ours.aupr_in, ours.aupr_out], abs=1e-9
            )
            # #149: one ID accuracy, in every row.
            assert rows[name][4] == (pred == label).mean()


SWEEP = {"steps": [5, 40, 80], "lr": [1e-4, 5e-3]}


def searching(loaders: HostLoaders, sweep: dict[str, list[float]]) -> OSDREPostprocessor:
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
    assert list(postprocessor.args_dict) == ["steps", "lr"]
    evaluator = HostEvaluator(HostNet(), postprocessor, loaders)

    assert [c for _, c in evaluator.tried] == [
        [s, lr] for lr in SWEEP["lr"] for s in SWEEP["steps"]
    ]
    assert postprocessor.hyperparam_search_done
    chosen = postprocessor.get_hyperparam()
    assert chosen == max(evaluator.tried, key=lambda t: t[0])[1]
    assert postprocessor.mode.ratio.options.lr == chosen[1]
    with pytest.raises(UserError, match="got 1 hyper-parameters, expected one for each"):
        postprocessor.set_hyperparam([1])


def test_sweeps_are_not_inert(loaders: HostLoaders) -> None:
    r"""#298: a value set after setup changes the scores, to those of a fresh fit with it."""
    net, x = HostNet(), images(loaders.id["test"])
    postprocessor = searching(loaders, {"lr": [1e-3, 5e-3]})
    postprocessor.setup(net, loaders.id, loaders.ood)
    before = postprocessor.postprocess(net, x)[1]
    postprocessor.set_hyperparam([5e-3])
    fresh = features_mode(loaders, lr=5e-3)
    fresh.setup(net, loaders.id, loaders.ood)

    assert not torch.allclose(postprocessor.postprocess(net, x)[1], before)
    assert torch.equal(postprocessor.postprocess(net, x)[1], fresh.postprocess(net, x)[1])
    copy = pickle.loads(pickle.dumps(postprocessor))
    with pytest.raises(UserError, match="features were not kept"):
        copy.set_hyperparam([1e-3])


@pytest.mark.parametrize("mode", ["network", "checkpoint"])
def test_sweeps_without_effect_are_refused(mode: str, run: Path) -> None:
    section: dict[str, Any] = {
        "postprocessor_args": {"mode": mode},
        "postprocessor_sweep": {"temperature": [1, 10]},
    }
    if mode == "checkpoint":
        section["postprocessor_args"]["checkpoint"] = str(run)
    with pytest.raises(
        UserError, match=rf"sweep\.temperature: has no effect in the mode '{mode}'"
    ):
        OSDREPostprocessor(HostConfig(postprocessor=section))


def test_search_without_anything_to_search_is_refused(run: Path, loaders: HostLoaders) -> None:
    postprocessor = OSDREPostprocessor()
    postprocessor.APS_mode = True  # the host sets it from outside
    with pytest.raises(UserError, match="APS_mode: true, but postprocessor_sweep is empty"):
        HostEvaluator(OSDRENet.load(run), postprocessor, loaders)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mod": "network"}, r"postprocessor_args\.mod: unknown \(did you mean 'mode'\?\)"),
        ({"mode": "net"}, r"postprocessor_args\.mode: got net, expected|postprocessor_args\.mode"),
        ({"mode": "checkpoint"}, r"postprocessor_args\.checkpoint: the mode 'checkpoint' needs"),
        ({"mode": "features"}, r"postprocessor_args\.reference: the mode 'features' needs"),
        ({"layer": "fc"}, r"postprocessor_args\.layer: belongs to the mode 'features'"),
        ({"head": {"steps": 3}}, r"postprocessor_args\.head: belongs to the mode 'features'"),
        (
            {"mode": "features", "reference": "x", "head": {"step": 3}},
            r"postprocessor_args\.head\.step: unknown \(did you mean 'steps'\?\)",
        ),
        (
            {"mode": "features", "reference": "x", "head": {"steps": 0}},
            r"postprocessor_args\.head\.steps: got 0, expected an integer >= 1",
        ),
    ],
)
def test_mistaken_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        OSDREPostprocessor(**options)
    assert "\n" not in str(caught.value)


def test_networks_without_what_is_needed_are_refused(run: Path, loaders: HostLoaders) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))
    for net in (HostNet(), nn.DataParallel(HostNet())):
        with pytest.raises(UserError, match="postprocessor: HostNet is no OS-DRE network"):
            OSDREPostprocessor().setup(net, loaders.id, loaders.ood)
    classifier = OSDRENet(Classifier(nn.Sequential(nn.Flatten(), MLP(3072, 8, 1)), 8, 4))
    with pytest.raises(UserError, match="OSDRENet is no OS-DRE network"):
        OSDREPostprocessor().setup(classifier, loaders.id, loaders.ood)
    with pytest.raises(UserError, match="Sequential: offers no features"):
        features_mode(loaders).setup(flat, loaders.id, loaders.ood)
    write_run(run.parent / "headless", objective={"class_weight": 0.0})
    with pytest.raises(UserError, match="no class head"):
        OSDRENet.load(run.parent / "headless")


def test_reference_files_that_are_missing_are_named(loaders: HostLoaders, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png -1\nb.png -1\n")
    for name, message in (
        ("list.txt", r"2 of 2 images are missing, .*a\.png for one"),
        ("absent", "no such folder or list file"),
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
    assert normalisation_of(T.ToTensor()) is None
    assert normalisation_of(None) is None


# The network


def test_network_has_the_face_of_the_hosts(run: Path, loaders: HostLoaders) -> None:
    net, x = OSDRENet.load(run), images(loaders.id["test"])
    logits, features = net(x, return_feature=True)
    weight, bias = net.get_fc()

    assert torch.equal(net(x), logits)
    assert features.shape == (24, net.feature_size)
    assert np.allclose(features.detach().numpy() @ weight.T + bias, logits.detach(), atol=1e-4)
    assert net.get_fc_layer() is net.ratio.network.class_head
    assert (net.num_classes, net.training) == (4, False)


def test_built_networks_load_what_the_host_saved(run: Path, tmp_path: Path) -> None:
    config_file = tmp_path / "small.yml"
    config_file.write_text(yaml.safe_dump(SMALL))
    net = OSDRENet.load(run)
    torch.save(net.state_dict(), tmp_path / "best.ckpt")
    section = {"name": "osdre", "config": str(config_file), "num_classes": 4, "num_gpus": 0}
    x = torch.randn(2, 3, 32, 32)

    for checkpoint in (run, tmp_path / "best.ckpt"):
        built = build_network({**section, "pretrained": True, "checkpoint": str(checkpoint)})
        assert torch.equal(built.eval()(x), net(x))
    assert build_network({**section, "pretrained": False}).training
    with pytest.raises(UserError, match=r"network\.config: missing"):
        build_network({"name": "osdre", "num_classes": 4})


# The trainer


def host_config(tmp_path: Path, epochs: int = 2, **trainer: Foreign) -> HostConfig:
    return HostConfig(
        optimizer={"num_epochs": epochs, "lr": 0.1},
        trainer={"name": "osdre", **trainer},
        output_dir=str(tmp_path / "out"),
    )


def small_net(**changes: Foreign) -> OSDRENet:
    return OSDRENet.build(Config.from_mapping({**SMALL, **changes}), classes=4)


def test_trainer_keeps_the_hosts_contract(tmp_path: Path) -> None:
    loaders = HostLoaders("pipeline")
    net = small_net()
    trainer = OSDRETrainer(net, loaders.id["train"], loaders.reference, host_config(tmp_path))
    before = trainer.trainer.averaged.state_dict()["network.head.weight"].clone()
    for epoch in (1, 2):
        trained, metrics = trainer.train_epoch(epoch)
        assert metrics["epoch_idx"] == epoch
        assert np.isfinite(metrics["loss"])
    x = images(loaders.id["test"])

    assert trainer.trainer.outcome.step == 2 * len(loaders.id["train"])
    assert not torch.equal(trained.ratio.network.head.weight, before)
    assert trained(x).shape == (24, 4)
    # What was trained is what the run folder holds, ready for the evaluator.
    loaded = OSDRENet.load(tmp_path / "out")
    assert torch.equal(loaded(x), trained.eval()(x))
    assert load_scorer(tmp_path / "out").preprocess.mean.tolist() == pytest.approx(MEAN)
    with pytest.raises(UserError, match=r"epoch 3 of 2 \(optimizer\.num_epochs\)"):
        trainer.train_epoch(3)


@pytest.mark.slow
def test_trainer_learns_to_tell_reference_from_id(tmp_path: Path) -> None:
    loaders = HostLoaders("pipeline", count=64, batch_size=32)
    config = host_config(
        tmp_path, epochs=15, options={"training": {"lr": 3e-3}, "data": {"crop": 2}}
    )
    trainer = OSDRETrainer(small_net(), loaders.id["train"], loaders.reference, config)
    assert trainer.trainer.options.lr == 3e-3
    losses = [trainer.train_epoch(epoch)[1]["loss"] for epoch in range(1, 16)]
    postprocessor = OSDREPostprocessor()
    id_conf = postprocessor.inference(trainer.net, loaders.id["test"], False)[1]
    far = postprocessor.inference(trainer.net, loaders.ood["farood"]["svhn"], False)[1]

    assert losses[-1] < losses[0]
    assert table_row(id_conf, far)[1] > 0.9


def test_id_and_reference_are_augmented_alike(tmp_path: Path) -> None:
    r"""The host would give the reference no augmentation; its `data` of ID images is black here."""
    same = HostLoaders("pipeline", batch_size=24)
    same.reference = same.id["train"]
    trainer = OSDRETrainer(small_net(), same.id["train"], same.reference, host_config(tmp_path))
    draw = trainer.batches(0)
    plain = images_aux(same.id["train"])

    assert draw.x_1.std() > 0.1  # not the black ones
    for x in (draw.x_0, draw.x_1):
        moved = (x - plain).flatten(1).abs().amax(dim=1) > 1e-3
        assert 0.5 < moved.float().mean() <= 1
        assert torch.allclose(x.mean(), plain.mean(), atol=0.1)
    assert draw.label.tolist() == [i % 4 for i in range(24)]


def test_every_reference_image_has_its_turn(tmp_path: Path) -> None:
    loaders, uneven = HostLoaders(batch_size=24), HostLoaders(batch_size=5)
    options = {"data": {"flip": False, "crop": 0}}
    trainer = OSDRETrainer(
        small_net(), loaders.id["train"], uneven.reference, host_config(tmp_path, options=options)
    )
    draws = [trainer.batches(step) for step in range(2)]

    expected = images_aux(loaders.reference)
    for draw in draws:
        assert torch.allclose(draw.x_0, expected, atol=1e-5)
        assert torch.allclose(draw.x_1, images_aux(loaders.id["train"]), atol=1e-5)


def images_aux(loader: DataLoader) -> Tensor:
    return torch.cat([batch["data_aux"] for batch in loader])


def test_trainer_refuses_what_it_cannot_train(tmp_path: Path, loaders: HostLoaders) -> None:
    config = host_config(tmp_path)
    with pytest.raises(UserError, match="got HostNet, expected the network 'osdre'"):
        OSDRETrainer(HostNet(), loaders.id["train"], loaders.reference, config)
    net = nn.DataParallel(small_net())
    with pytest.raises(UserError, match="got DataParallel"):
        OSDRETrainer(net, loaders.id["train"], loaders.reference, config)
    with pytest.raises(UserError, match="shows no normalisation"):
        OSDRETrainer(small_net(), [{"data": torch.zeros(2, 3, 32, 32)}], [], config)
    with pytest.raises(UserError, match=r"trainer\.options.*unknown key|trainer\.options"):
        OSDRETrainer(
            small_net(),
            loaders.id["train"],
            loaders.reference,
            host_config(tmp_path, options={"training": {"rate": 1}}),
        )
    bad = small_net()
    nn.init.constant_(bad.get_fc_layer().weight, torch.nan)
    with pytest.raises(UserError, match="loss is not finite in epoch 1"):
        OSDRETrainer(bad, loaders.id["train"], loaders.reference, config).train_epoch(1)


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
            OSDREPostprocessor(HostConfig(postprocessor=section))
    head = yaml.safe_load(found[-1].read_text())["postprocessor"]["postprocessor_args"]["head"]
    assert FeatureRatioOptions(**head) == FeatureRatioOptions()


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


def test_stand_in_pictures_differ() -> None:
    assert not np.array_equal(pictures(2, 0), pictures(2, 1))
