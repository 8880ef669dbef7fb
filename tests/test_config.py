r"""Tests of configurations: files, layers of them, identity, and what is refused, in one line."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import Field, ValidationError

from ood_osdre.config import EXTRAS, SECTIONS, TERMS, TEXTS, Config, HeadConfig, load_config
from ood_osdre.errors import UserError
from ood_osdre.models import KERNELS
from ood_osdre.options import Options
from ood_osdre.resources import find, names, parse_yaml
from ood_osdre.sections import BasisConfig, KernelName, ObjectiveConfig, PathConfig

SHIPPED = [
    "backbone",
    "cifar10", "cifar100", "cifar100_cpu", "cifar100_paper", "cifar100_representation",
    "cifar10_cpu", "cifar10_joint", "cifar10_paper", "cifar10_representation", "digits",
    "digits_representation", "imagenet_representation", "vectors",
]  # fmt: skip
KEYS = [f"{section}.{name}" for section, cls in SECTIONS.items() for name in cls.model_fields]
KEYS += [name for name in Config.model_fields if name not in (*SECTIONS, "head")]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(name: str | Path, overrides: Sequence[str | tuple[str, Any]] = ()) -> str:
    r"""Returns the message of a refused :func:`load_config`, which has to be one line."""
    with pytest.raises(UserError) as error:
        load_config(name, overrides)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def nested(key: str, value: object) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


# Files


def test_the_shipped_configurations_are_the_documented_ones() -> None:
    assert names("configs") == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_configuration_round_trips(name: str) -> None:
    config = load_config(name)

    assert name.startswith(config.id)
    assert config == load_config(find("configs", name))
    for text in (json.dumps(config.to_dict()), yaml.safe_dump(config.to_dict())):
        assert Config.from_mapping(parse_yaml(text, "here")) == config


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


def test_every_key_is_documented() -> None:
    for cls in (Config, HeadConfig, *SECTIONS.values()):
        documented = re.findall(r"^        (\w+): ", cls.__doc__ or "", re.MULTILINE)
        assert documented == [name for name in cls.model_fields if name not in SECTIONS]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_set_by_a_file_and_by_an_option_and_takes_nothing_else(
    tmp_path: Path, key: str
) -> None:
    section, _, name = key.rpartition(".")
    defaults = Config().to_dict()
    value = defaults[section][name] if section else defaults[name]
    path = write(tmp_path / "one.yml", yaml.safe_dump(nested(key, value)))
    text = value if key in TEXTS and value else json.dumps(value)
    assert load_config(path) == Config() == load_config(path, [f"{key}={text}"])
    with pytest.raises(UserError, match=re.escape(f"here: {key}: got")):
        Config.from_mapping(nested(key, {"a": object()}), "here")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-3", 1e-3), ("1E2", 100.0), ("-0.0", 0.0), ("2", 2.0), (".5", 0.5), ("5.e-1", 0.5)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text: str, expected: float) -> None:
    path = write(tmp_path / "c.yml", f"training: {{weight_decay: {text}}}")
    value = load_config(path).training.weight_decay
    assert type(value) is float
    assert value == expected


# Layers


def test_an_empty_section_is_defaults_and_an_empty_file_a_mistake(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "bare.yml", "training:\n")) == Config()
    with pytest.raises(UserError, match=r"empty\.yml: got null, expected a mapping"):
        load_config(write(tmp_path / "empty.yml", ""))


def test_a_file_wins_over_its_base_and_an_override_over_both(tmp_path: Path) -> None:
    write(tmp_path / "base.yml", "training: {steps: 7, seed: 3, clip: 2}\nid: digits")
    child = write(tmp_path / "child.yml", "extends: base.yml\ntraining: {seed: 4, clip: 3}")
    named = write(tmp_path / "named.yml", "extends: cifar10\ntitle: mine")

    config = load_config(child, ["training.clip=4", "training.clip=5"])
    training = config.training
    assert (training.steps, training.seed, training.clip, config.id) == (7, 4, 5.0, "digits")
    assert load_config(named) == load_config("cifar10").replace(title="mine")


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
            ("network.width", "0.5"),
            ("training.seed", 9),
            ("benchmark", "a #1"),
        ],
    )
    assert config.network.depths == (2, 1, 1, 2)
    assert (config.network.width, config.training.seed, config.benchmark) == (0.5, 9, "a #1")
    assert config.training.compile is True
    assert config.data.train_limit is None
    assert config.path.t_min == 1e-3
    assert (config.title, config.note, config.reference) == ("2026", "a = b: c", None)


HEAD = ["estimator=classifier", "objective.endpoint=0"]


def test_a_head_has_sections_and_defaults_of_its_own(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yml", "head: {rank: 8, path: {eps: 0.01}}\nextends: digits\n")
    base.write_text(base.read_text() + "estimator: classifier\nobjective: {endpoint: 0}")
    config = load_config(base, ["head.objective.conditional=1", "head.layers=[a, b]"])
    head = config.head
    assert head is not None
    # One option of a section leaves the others at the head's own defaults.
    assert (head.rank, head.path.eps, head.path.gamma2, head.layers) == (8, 0.01, 0.5, ("a", "b"))
    assert (head.objective.endpoint, head.objective.conditional) == (0, 1)
    assert config.path.gamma2 == PathConfig().gamma2 != 0.5
    assert Config.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config

    assert load_config("digits", [*HEAD, "head={}"]).head == HeadConfig()
    assert load_config(base, ["head={}"]).head == load_config(base).head
    assert load_config(base, ["head=null"]).head is None
    assert load_config(base, ["head=null", "head.rank=3"]).head == HeadConfig(rank=3)


# Identity


def test_configurations_are_values() -> None:
    config = Config.from_mapping({"network": {"width": 1, "depths": [2, 2, 2, 2]}})

    assert config == Config()
    assert hash(config) == hash(Config())
    assert config.replace(id="digits") != config
    with pytest.raises(ValidationError, match="frozen"):
        config.id = "digits"  # type: ignore[misc]


def test_sections_built_in_code_are_checked_too() -> None:
    with pytest.raises(ValidationError, match=r"sigma: got 0\.01"):
        BasisConfig(sigma=0.01)
    with pytest.raises(UserError, match=r"BasisConfig: sigma: got 0.01, .*basis.floor"):
        Config().basis.replace(sigma=0.01)


# Refusals: what a file or an option says, and what the one line about it has to name.

UNET = "network: {kind: unet, norm: group}\n"
MLP = "network: {kind: mlp, norm: group}\n"
TIMED = "estimator: time_conditioned\nobjective: {endpoint: 0, time_score: 1%s}\n"
FILES = [
    # Keys
    ("training: {step: 1}", "'training.step'", "'training.steps'"),
    ("trainig: {steps: 1}", "'trainig'", "'training'"),
    ("steps: 1", "'steps'", "'training.steps'"),
    ("training: {width: 1}", "'training.width'", "'network.width'"),
    ("evaluation: {batch_siz: 1}", "'evaluation.batch_siz'", "'evaluation.batch_size'"),
    ("training: {qqq: 1}", "'training.qqq'", "one of steps, batch_size,"),
    ("1: 2", "'1'", "one of id, benchmark"),
    ("id: {x: 1}", "id: got {'x': 1}", "text"),
    # Types and ranges
    ("training: {steps: 1.5}", "training.steps: got 1.5", "a whole number"),
    ("training: {steps: true}", "training.steps: got true", "a whole number"),
    ("training: {steps: '9'}", "training.steps: got '9'", "a whole number"),
    ("training: {steps: 0}", "training.steps: got 0", "greater than or equal to 1"),
    ("training: {seed: null}", "training.seed: got null", "a whole number"),
    ("training: {batch_size: 99999999999}", "batch_size: got 99999999999", "equal to 1000000"),
    ("training: {seed: 2000000000}", "training.seed: got 2000000000", "equal to 1000000000"),
    ("training: {lr: 0}", "training.lr: got 0", "a number greater than 0"),
    ("training: {lr: .inf}", "training.lr: got inf", "a finite number"),
    ("objective: {endpoint: .nan}", "objective.endpoint: got nan", "number"),
    ("training: {ema: 1.0}", "training.ema: got 1.0", "a number less than 1"),
    ("training: {compile: 1}", "training.compile: got 1", "true or false"),
    ("training: {momentum: 1, optimizer: sgd}", "training.momentum: got 1", "less than 1"),
    ("training: {momentum: 0.8}", "training.momentum: got 0.8", "training.optimizer sgd"),
    ("objective: {label_smoothing: 1}", "objective.label_smoothing: got 1", "less than 1"),
    ("data: {flip: true}", "data.flip: got true", "'none', 'random' or 'alternating'"),
    ("data: {val_limit: 0}", "data.val_limit: got 0", "1"),
    ("network: {depths: []}", "network.depths: got []", "at least 1 item"),
    ("network: {depths: [1, 0]}", "network.depths[1]: got 0", "1"),
    ("network: {depths: 3}", "network.depths: got 3", "a list"),
    ("network: resnet", "network: got 'resnet'", "a mapping of kind, width,"),
    ("- 1", "got [1]", "a mapping of sections"),
    ("id: 3", "id: got 3", "text"),
    ("id: ''", "id: got ''", "at least 1 character"),
    ("training: {steps: 0, lr: 0}", "training.steps: got 0", "(1 more)"),
    # Choices
    ("basis: {kernel: gausian}", "basis.kernel: got 'gausian'", "did you mean 'gaussian'?"),
    ("path: {noise: [ddbi]}", "path.noise: got ['ddbi']", "'dequantisation', 'bridge' or 'ddbi'"),
    # Rules between options
    ("basis: {sigma: 0.05}", "basis.sigma: got 0.05", "basis.floor (0.05)"),
    ("network: {width: 0.1}", "network.width: got 0.1", "a multiple of 0.125"),
    ("network: {depths: [1, 1]}", "network.depths: got 2 entries", "4"),
    ("network: {kind: unet}", "network.norm: got batch", "group for network.kind unet"),
    (
        "network: {kind: speed, norm: group}",
        "network.norm: got group",
        "batch for network.kind speed",
    ),
    ("path: {schedule: vp, t_min: 0}", "path.t_min: got 0", "more, or null"),
    ("data: {broaden: 0.5, mixture: 0.6}", "data.mixture: got 0.6", "data.broaden (0.5)"),
    ("objective: {endpoint: 0}", "objective: no term trains", "set one of endpoint, conditional"),
    ("estimator: direct\nobjective: {time_score: 1}", "objective.time_score: is on", "direct"),
    (MLP + TIMED % ", conditional: 1", "objective: got conditional and time_score", "one for"),
    (
        "path: {noise: dequantisation}\nobjective: {path_variance: 1}",
        "objective.path_variance: is on",
        "path.schedule trigonometric and path.noise dequantisation has no parameters",
    ),
    (
        "path: {schedule: kumaraswamy_affine, gamma2: 0}\nobjective: {path_variance: 1}",
        "path.gamma2: got 0",
        "objective.path_variance",
    ),
    (
        "network: {classes_head: false}\nobjective: {class_weight: 1}",
        "objective.class_weight: is on",
        "network.classes_head is false",
    ),
    (
        MLP + "objective: {conditional: 1, conditional_form: per_block}",
        "objective.conditional_form: per_block",
        "network.kind resnet, got mlp",
    ),
    (
        "network: {kind: speed}\nobjective: {conditional: 1, conditional_form: per_block}",
        "objective.conditional_form: per_block",
        "network.kind resnet, got speed",
    ),
    (
        "network: {kind: speed}\nobjective: {conditional: 1, data_score: 1}",
        "objective.data_score",
        "network.kind speed has no decoder",
    ),
    ("network: {kind: speed}\n" + TIMED % "", "network.kind: got speed", "resnet or mlp"),
    (UNET + TIMED % "", "network.kind: got unet", "resnet or mlp for estimator time_conditioned"),
    (TIMED % "", "network.norm: got batch", "group for estimator time_conditioned"),
    ("objective: {conditional: 1, data_score: 1}", "objective.data_score", "network.kind resnet"),
    (UNET + "objective: {data_score: 1}", "objective.data_score", "got neither of estimator one"),
    (
        UNET + "objective: {conditional: 1, time_score: 1, data_score: 1}",
        "objective.data_score",
        "got conditional and time_score of estimator one_step",
    ),
    (MLP + TIMED % ", data_score: 1", "objective.data_score", "of estimator time_conditioned"),
    (
        MLP + "objective: {time_score: 1, data_score: 1}\ntraining: {compile: true}",
        "training.compile: is on",
        "objective.time_score",
    ),
    # Inheritance
    ("extends: nowhere", "extends: ", "'nowhere'"),
    ("extends: [digits]", "extends: ", "did you mean 'digits'?"),
    ("extends: bad.yml", "extends: 'bad.yml'", "one level"),
    ("extends: loop.yml", "extends: 'loop.yml'", "one level"),
    # YAML
    ("training:\n  steps: [1,\n", ":3: not valid YAML", "expected"),
    ("training:\n  steps: 1\n  steps: 2\n", ":3: not valid YAML", "'steps' is given twice"),
    ("a: 1\n\tb: 2\n", ":2: not valid YAML", "found"),
    ("id: !!python/object:os.system x", ":1: not valid YAML", "constructor"),
    ("title: 2026-99-99", "not valid YAML", "month"),
]


@pytest.mark.parametrize(("text", "found", "expected"), FILES)
def test_a_bad_file_is_refused_with_its_key(
    tmp_path: Path, text: str, found: str, expected: str
) -> None:
    path = write(tmp_path / "bad.yml", text)
    write(tmp_path / "loop.yml", "extends: bad.yml")

    message = refusal(path)
    assert message.startswith(str(path))
    assert found in message
    assert expected in message


OVERRIDES = [
    ("training.stepz=1", "'training.stepz'", "'training.steps'"),
    ("steps=1", "'steps'", "'training.steps'"),
    ("trainig.steps=1", "'trainig'", "'training'"),
    ("id.name=1", "'id.name'", "expected one of"),
    ("training=1", "'training=1'", "SECTION.KEY=VALUE"),
    ("training.steps", "'training.steps'", "SECTION.KEY=VALUE"),
    ("training.steps=", "training.steps: got null", "a whole number"),
    ("training.steps=[", "training.steps", "not valid YAML"),
    (("training.steps", 1.5), "training.steps: got 1.5", "a whole number"),
    (("training", 1), "training: got 1", "a mapping of steps"),
    ("path.schedule=trig", "path.schedule: got 'trig'", "did you mean 'trigonometric'?"),
    # The file's own value is not what is wrong.
    ("basis.sigma=0.01", "basis.sigma: got 0.01", "basis.floor"),
    ("basis.floor=2", "basis.sigma: got", "basis.floor (2)"),
    ("network.classes_head=false", "objective.class_weight: is on", "network.classes_head"),
    ("estimator=classifier", "objective.endpoint: is on", "estimator classifier"),
    ("x" * 500, "'xxx", "xxx': expected SECTION.KEY=VALUE"),
    ("objective.endpoint=0", "objective: no term trains", "endpoint"),
    # The head
    ("head={}", "estimator: got one_step", "expected classifier"),
    ("classifier=runs/x", "classifier: is given", "no head"),
    ("head=5", "head: got 5", "a mapping of layers, id_from, rank"),
    ("head.id_from=held_out", "head.id_from: got held_out", "data.hold_out_id"),
    ("head.path=1", "'head.path=1'", "SECTION.KEY=VALUE"),
    ("head.path.gama2=1", "'head.path.gama2'", "'head.path.gamma2'"),
    ("head.path.eps=0", "head.path.eps: got 0", "a number greater than 0"),
    ("head.basis.sigma=0.01", "head.basis.sigma: got 0.01", "basis.floor"),
    ("head.select=held_out head.held_out=0", "head.select: got held_out", "last"),
    ("head.objective.time_score=0", "head.objective: no term trains", "conditional"),
    ("head.objective.class_weight=1", "head.objective.class_weight: is on", "no classes"),
    ("head.estimator=direct", "head.objective: no term trains", "direct"),
    ("head.estimator=gaussians", "head.objective.time_score: is on", "gaussians has no use"),
    (
        "head.estimator=gaussians head.objective.time_score=0 head.select=held_out",
        "head.select: got held_out",
        "expected last",
    ),
    (
        "head.estimator=time_conditioned head.backbone=linear",
        "head.estimator: expected with backbone mlp",
        "got linear",
    ),
    (
        "head.objective.conditional=1 head.objective.conditional_form=per_block",
        "head.objective.conditional_form: got per_block",
        "no cells",
    ),
]


@pytest.mark.parametrize(("override", "found", "expected"), OVERRIDES)
def test_a_bad_option_is_refused_with_its_key(
    override: str | tuple[str, Any], found: str, expected: str
) -> None:
    several = isinstance(override, str) and override.startswith("head.")
    given = [*HEAD, *override.split()] if several else [override]  # type: ignore[union-attr]
    message = refusal("digits", given)
    # Of a rule that the base breaks, the file is named.
    assert message.startswith(("option", str(find("configs", "digits"))))
    assert found in message
    assert expected in message


def test_files_that_cannot_be_read_and_mistakes_in_a_base_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yml").write_bytes(b"title: \xe9")
    base = write(tmp_path / "base.yml", "training: {steps: -1}")
    child = write(tmp_path / "child.yml", "extends: base.yml")

    assert "not a text file in UTF-8" in refusal(tmp_path / "latin.yml")
    assert str(tmp_path / "none.yml") in refusal(tmp_path / "none.yml")
    assert str(tmp_path) in refusal(tmp_path)
    assert "'cifar10'" in refusal("cifar_10")
    assert refusal(child).startswith(f"{base}: training.steps: got -1")


class Leaf(Options):
    name: str
    size: int = 1


class Tree(Options):
    leaves: dict[str, Leaf] = Field(default={})
    list_of: tuple[Leaf, ...] = ()


@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        ({"leaves": {"a": {"nam": "x", "name": "x"}}}, "'leaves.a.nam'", "'leaves.a.name'"),
        ({"leaves": {"a": {}}}, "leaves.a.name", "missing"),
        ({"leaves": {"a": {"name": "x" * 500, "size": "y" * 500}}}, "leaves.a.size", "a whole"),
        ({"leaves": {"a": 3}}, "leaves.a: got 3", "a mapping of name, size"),
        ({"leaves": 3}, "leaves: got 3", "a mapping"),
        ([1], "got [1]", "a mapping of leaves, list_of"),
        (None, "got null", "a mapping of leaves, list_of"),
    ],
)
def test_options_within_mappings_are_explained(values: object, found: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        Tree.of(values, "here")
    message = str(error.value)
    assert message.startswith("here: ")
    assert found in message
    assert expected in message
    assert len(message) < 200


def test_every_weight_of_a_term_trains_or_accompanies_an_estimator() -> None:
    # A term that is in neither group would be on for estimators that have no use for it.
    grouped = {term for group in (*TERMS.values(), *EXTRAS.values()) for term in group}
    fields = ObjectiveConfig.model_fields.items()
    weights = {name for name, field in fields if field.annotation is float}
    assert grouped == weights - {"endpoint_cap", "delta", "data_score", "label_smoothing"}


def test_kernels_are_those_of_the_models() -> None:
    assert get_args(KernelName) == tuple(KERNELS)
