r"""Tests of configurations: defaults, files, inheritance, overrides, and one-line refusals."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from ood_osdre import config as config_module
from ood_osdre.config import KEYS, SECTIONS, Config, TrainingConfig, load_config
from ood_osdre.errors import UserError
from ood_osdre.options import Range, option_types
from ood_osdre.resources import find, names

SHIPPED = [
    "cifar10",
    "cifar100",
    "cifar100_cpu",
    "cifar100_paper",
    "cifar10_cpu",
    "cifar10_joint",
    "cifar10_paper",
    "digits",
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(name: str | Path, overrides: Sequence[str | tuple[str, Any]] = ()) -> str:
    r"""Returns the message of a refused :func:`load_config`, which has to be one line."""
    with pytest.raises(UserError) as error:
        load_config(name, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


# Files and names


def test_the_shipped_configurations_are_the_documented_ones() -> None:
    assert names("configs") == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_load_and_round_trip(name: str) -> None:
    config = load_config(name)

    assert name.startswith(config.id)
    assert config == load_config(find("configs", name))
    assert Config.from_mapping(config.to_dict()) == config
    assert Config.from_mapping(json.loads(json.dumps(config.to_dict()))) == config
    assert Config.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_the_joint_configuration_differs_from_the_papers_in_what_it_says() -> None:
    joint, paper = (load_config(f"cifar10_{name}").to_dict() for name in ("joint", "paper"))
    differing = {
        f"{section}.{key}"
        for section in SECTIONS
        for key, value in joint[section].items()
        if paper[section][key] != value
    }
    assert differing == {
        "network.kind", "network.norm", "objective.conditional_form", "objective.data_score",
        "training.amp", "training.ema", "training.warmup",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar10_cpu", "cifar100_cpu"])
def test_the_shipped_defaults_have_the_objective_of_the_records(name: str) -> None:
    objective = load_config(name).objective
    assert (objective.endpoint, objective.class_weight) == (1.0, 0.5)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "empty.yml", "")) == Config()
    assert load_config(write(tmp_path / "bare.yml", "training:\n")) == Config()


def test_every_key_is_documented() -> None:
    for cls in (Config, *SECTIONS.values()):
        documented = re.findall(r"^        (\w+): ", cls.__doc__ or "", re.MULTILINE)
        assert documented == list(option_types(cls))


def test_every_key_can_be_set_in_a_file_and_as_an_option(tmp_path: Path) -> None:
    for section, cls in SECTIONS.items():
        for name, value in Config().to_dict()[section].items():
            path = write(tmp_path / "one.yml", yaml.safe_dump({section: {name: value}}))
            assert load_config(path) == Config()
            assert load_config(path, [f"{section}.{name}={json.dumps(value)}"]) == Config()
        assert cls() == getattr(Config(), section)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-3", 1e-3), ("1E2", 100.0), ("-0.0", 0.0), ("2", 2.0), (".5", 0.5), ("5.e-1", 0.5)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text: str, expected: float) -> None:
    path = write(tmp_path / "c.yml", f"training: {{weight_decay: {text}}}")

    value = load_config(path).training.weight_decay
    assert type(value) is float
    assert value == expected


def test_extends_takes_the_base_and_lets_the_file_win(tmp_path: Path) -> None:
    write(tmp_path / "base.yml", "training: {steps: 7, seed: 3}\nid: digits")
    child = write(tmp_path / "child.yml", "extends: base.yml\ntraining: {seed: 4}")
    named = write(tmp_path / "named.yml", "extends: cifar10\ntitle: mine")

    config = load_config(child)
    assert (config.training.steps, config.training.seed, config.id) == (7, 4, "digits")
    assert load_config(named) == load_config("cifar10").replace(title="mine")


# Overrides


def test_overrides_come_last_and_in_order() -> None:
    config = load_config(
        "digits",
        ["training.steps=5", "training.steps=6", ("training.seed", 9), ("network.width", "0.5")],
    )

    assert (config.training.steps, config.training.seed, config.network.width) == (6, 9, 0.5)


def test_overrides_of_every_type() -> None:
    config = load_config(
        "digits",
        [
            "network.depths=[2, 1, 1, 2]",
            "training.compile=true",
            "data.train_limit=null",
            "path.t_min=1e-3",
            "title=2026",
            "note=a = b: c",
            "reference=~",
        ],
    )

    assert config.network.depths == (2, 1, 1, 2)
    assert config.training.compile is True
    assert config.data.train_limit is None
    assert config.path.t_min == 1e-3
    assert (config.title, config.note, config.reference) == ("2026", "a = b: c", None)


# Identity


def test_configurations_are_values() -> None:
    config = Config.from_mapping({"network": {"width": 1, "depths": [2, 2, 2, 2]}})

    assert config == Config()
    assert hash(config) == hash(Config())
    assert config.digest() == Config().digest()
    assert config.replace(id="digits").digest() != config.digest()
    with pytest.raises(FrozenInstanceError):
        config.id = "digits"  # type: ignore[misc]


def test_digest_is_the_same_in_another_process() -> None:
    code = "from ood_osdre.config import load_config; print(load_config('digits').digest())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )

    assert result.stdout.strip() == load_config("digits").digest()


def test_sections_built_in_code_are_checked_too() -> None:
    with pytest.raises(UserError, match=r"TrainingConfig\.steps: got 0, expected an integer >= 1"):
        TrainingConfig(steps=0)
    with pytest.raises(UserError, match=r"TrainingConfig\.lr"):
        Config().training.replace(lr=-1.0)
    with pytest.raises(UserError, match=r"Config: basis\.sigma"):
        Config().replace(basis=Config().basis.replace(sigma=0.01))


# Refusals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {step: 1}", "unknown key 'training.step'; did you mean 'training.steps'?"),
        ("trainig: {steps: 1}", "unknown key 'trainig'; did you mean 'training'?"),
        ("steps: 1", "unknown key 'steps'; did you mean 'training.steps'?"),
        ("training: {width: 1}", "unknown key 'training.width'; did you mean 'network.width'?"),
        ("training: {qqq: 1}", "unknown key 'training.qqq'; expected one of steps, batch_size,"),
        ("1: 2", "unknown key '1'; expected one of id, benchmark"),
        ("training: {steps: 1.5}", "training.steps: got 1.5, expected an integer >= 1."),
        ("training: {steps: true}", "training.steps: got true, expected an integer >= 1."),
        ("training: {steps: '9'}", "training.steps: got '9', expected an integer >= 1."),
        ("training: {lr: 0}", "training.lr: got 0, expected a number > 0."),
        ("training: {lr: .inf}", "training.lr: got inf, expected a number > 0."),
        ("training: {ema: 1.0}", "training.ema: got 1.0, expected a number in [0, 1)."),
        ("training: {compile: 1}", "training.compile: got 1, expected true or false."),
        ("training: {seed: null}", "training.seed: got null, expected an integer in [0, 1e+09]."),
        ("data: {broaden: 1.1}", "data.broaden: got 1.1, expected a number in [0, 1]."),
        ("data: {val_limit: 0}", "data.val_limit: got 0, expected an integer >= 1, or null."),
        ("objective: {endpoint: .nan}", "objective.endpoint: got nan, expected a number >= 0."),
        ("network: {depths: []}", "network.depths: got [], expected a list, each entry an int"),
        ("network: {depths: [1, 0]}", "network.depths: got [1, 0], expected a list, each"),
        ("basis: {kernel: gausian}", "imq, rq; did you mean 'gaussian'?"),
        ("path: {noise: [ddbi]}", "path.noise: got ['ddbi'], expected one of dequantisation,"),
        ("id: 3", "id: got 3, expected some text."),
        ("id: ''", "id: got '', expected some text."),
        ("network: resnet", "network: got 'resnet', expected a mapping of kind, width,"),
        ("- 1", "expected a mapping of sections, got list."),
        ("basis: {sigma: 0.05}", "basis.sigma: got 0.05, expected more than basis.floor (0.05)."),
        (
            "objective: {endpoint: 0}",
            "objective: no term trains the one_step estimator, set one of endpoint",
        ),
        ("objective: {path_variance: 1}", "objective.path_variance: is on, but path.schedule"),
        (
            "network: {classes_head: false}\nobjective: {class_weight: 1}",
            "objective.class_weight: is on, but network.classes_head is false.",
        ),
        (
            "network: {kind: mlp}\nobjective: {conditional: 1, conditional_form: per_block}",
            "objective.conditional_form: per_block needs the feature map",
        ),
        (
            "network: {kind: mlp}\nobjective:\n  {conditional: 1, conditional_form: antithetic_per_block}",
            "objective.conditional_form: antithetic_per_block needs the feature map",
        ),
        ("objective: {conditional_form: per_dimension}", "expected one of scalar, antithetic,"),
        (
            "network: {kind: unet}",
            "network.norm: got batch, expected group for network.kind unet.",
        ),
        ("network: {kind: unet, width: 0.1, norm: group}", "network.width: got 0.1, expected a"),
        (
            "estimator: time_conditioned\n"
            + "network: {kind: unet, norm: group}\nobjective: {endpoint: 0, time_score: 1}",
            "network.kind: got unet, expected resnet or mlp for estimator time_conditioned.",
        ),
        (
            "objective: {conditional: 1, data_score: 1}",
            "objective.data_score: is on, but network.kind resnet has no decoder; unet has one.",
        ),
        (
            "network: {kind: unet, norm: group}\nobjective: {data_score: 1}",
            "expected beside one of objective.conditional and objective.time_score of estimator "
            + "one_step, got neither of estimator one_step.",
        ),
        (
            "network: {kind: unet, norm: group}\n"
            + "objective: {conditional: 1, time_score: 1, data_score: 1}",
            "got conditional and time_score of estimator one_step.",
        ),
        (
            "estimator: time_conditioned\nnetwork: {kind: mlp, norm: group}\n"
            + "objective: {endpoint: 0, time_score: 1, data_score: 1}",
            "got time_score of estimator time_conditioned.",
        ),
        (
            "network: {kind: mlp}\nobjective: {time_score: 1, data_score: 1}\n"
            + "training: {compile: true}",
            "training.compile: is on, but this objective.time_score differentiates the network",
        ),
        ("network: {width: 0.1}", "network.width: got 0.1, expected a multiple of 0.125."),
        ("network: {depths: [1, 1]}", "network.depths: got 2 entries, expected 4."),
        ("path: {schedule: vp, t_min: 0}", "path.t_min: got 0, expected more, or null, with"),
        (
            "path: {schedule: kumaraswamy_affine, gamma2: 0}\nobjective: {path_variance: 1}",
            "path.gamma2: got 0, expected more where objective.path_variance is on.",
        ),
        (
            "data: {broaden: 0.5, mixture: 0.6}",
            "data.mixture: got 0.6, expected at most 0.5, what data.broaden (0.5) leaves.",
        ),
        ("extends: nowhere", "extends: "),
        ("extends: [digits]", "extends: got ['digits'], expected the name of a configuration."),
        ("extends: bad.yml", "extends: 'bad.yml' is this file itself."),
        ("extends: loop.yml", "extends: 'loop.yml' extends 'bad.yml' in turn, only one level"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "bad.yml", text)
    write(tmp_path / "loop.yml", "extends: bad.yml")

    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("training:\n  steps: [1,\n", "bad.yml:3", "not valid YAML"),
        ("training:\n  steps: 1\n  steps: 2\n", "bad.yml:3", "'steps' is given twice"),
        ("a: 1\n\tb: 2\n", "bad.yml:2", "not valid YAML"),
        ("id: !!python/object:os.system x", "bad.yml:1", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, where: str, problem: str
) -> None:
    message = refusal(write(tmp_path / "bad.yml", text))

    assert where in message
    assert problem in message


def test_a_mistake_in_the_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yml", "training: {steps: -1}")
    child = write(tmp_path / "child.yml", "extends: base.yml")

    assert refusal(child).startswith(f"{base}: training.steps: got -1")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yml").write_bytes(b"title: \xe9")

    assert "not a text file in UTF-8" in refusal(tmp_path / "latin.yml")
    assert str(tmp_path / "none.yml") in refusal(tmp_path / "none.yml")
    assert str(tmp_path) in refusal(tmp_path)
    assert "'cifar10'" in refusal("cifar_10")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "training.stepz=1",
            "option: unknown key 'training.stepz'; did you mean 'training.steps'",
        ),
        ("steps=1", "option: unknown key 'steps'; did you mean 'training.steps'?"),
        ("training=1", "option: training: is a section, expected training.KEY with KEY one of"),
        ("training.steps", "option 'training.steps': expected section.key=value."),
        ("training.steps=", "option: training.steps: got null, expected an integer >= 1."),
        ("training.steps=[", "option training.steps"),
        (("training.steps", 1.5), "option: training.steps: got 1.5, expected an integer >= 1."),
        ("path.schedule=trig", "did you mean 'trigonometric'?"),
        ("basis.sigma=0.01", "basis.sigma: got 0.01, expected more than basis.floor"),
    ],
)
def test_bad_overrides_are_refused(override: str | tuple[str, Any], expected: str) -> None:
    assert expected in refusal("digits", [override])


@pytest.mark.parametrize("key", KEYS)
def test_no_option_takes_what_it_does_not_describe(key: str) -> None:
    section, _, name = key.rpartition(".")
    value: Any = {"a": object()}
    mapping = {section: {name: value}} if section else {name: value}

    with pytest.raises(UserError, match=re.escape(f"here: {key}: got")):
        Config.from_mapping(mapping, source="here")


# The pieces


@pytest.mark.parametrize(
    ("ends", "low", "high"), [("[]", 1, 1), ("[)", 1, 0), ("(]", 0, 1), ("()", 0, 0)]
)
def test_range_ends(ends: Literal["[]", "[)", "(]", "()"], low: bool, high: bool) -> None:
    interval = Range(0, 1, ends)

    assert [x in interval for x in (-0.1, 0, 0.5, 1, 1.1)] == [False, low, True, high, False]
    assert [x in Range() for x in (-math.inf, math.inf, math.nan)] == [False, False, False]


def test_every_choice_is_accepted() -> None:
    for cls in SECTIONS.values():
        for name, hint in option_types(cls).items():
            if "Literal" in str(get_origin(hint)):
                for choice in get_args(hint):
                    assert getattr(cls(**{name: choice}), name) == choice


def test_public_names_exist() -> None:
    assert all(hasattr(config_module, name) for name in config_module.__all__)
