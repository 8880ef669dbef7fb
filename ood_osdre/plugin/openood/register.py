r"""Makes OpenOOD know the names `osdre`: :func:`register`, and :func:`unregister`.

OpenOOD has no registry. Its evaluator reads a module-level dictionary, to which an entry is added;
its older pipelines look names up in dictionaries inside functions, so those functions are replaced
by ones that know our names and pass every other on. Nothing is written to its folders, and
everything is put back by :func:`unregister`.
"""

__all__ = ["NAMES", "build_network", "register", "shipped", "unregister"]

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...config import load_config
from ...errors import UserError
from ...resources import folders, read_yaml
from .host import Foreign, require
from .network import OSDRENet
from .postprocessor import OSDREPostprocessor
from .trainer import OSDRETrainer

#: The names of postprocessors, each a YAML file; the first also of the trainer and the network.
NAMES = ("osdre", "osdre_checkpoint", "osdre_features")

_MARK = "_ood_osdre_original"


def register() -> list[str]:
    r"""Adds the postprocessor, the trainer and the network to OpenOOD; once is enough.

    Returns:
        The hooks, by dotted name.

    Raises:
        UserError: If OpenOOD cannot be imported, saying why.
    """
    table = require("openood.evaluation_api.postprocessor").postprocessors
    table.update(dict.fromkeys(NAMES, OSDREPostprocessor))
    require("openood.pipelines")
    hooks = ["openood.evaluation_api.postprocessor.postprocessors"]
    for home, (name, make) in _WRAPPERS.items():
        original = _original(getattr(require(home), name))
        wrapper = make(original)
        setattr(wrapper, _MARK, original)
        hooks += _replace(name, original, wrapper)
    return sorted(hooks)


def unregister() -> None:
    r"""Takes everything that :func:`register` added out of OpenOOD again."""
    table = require("openood.evaluation_api.postprocessor").postprocessors
    for name in NAMES:
        table.pop(name, None)
    for home, (name, _) in _WRAPPERS.items():
        original = _original(getattr(require(home), name))
        _replace(name, original, original)


def shipped(name: str) -> Path:
    r"""Returns the path of a postprocessor's YAML file of this package."""
    for folder in folders("configs"):
        path = folder / "openood" / "postprocessors" / f"{name}.yml"
        if path.is_file():
            return path
    raise UserError(f"configs/openood/postprocessors/{name}.yml: not installed.")


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, _MARK, function)


def _replace(
    name: str, original: Callable[..., Any], replacement: Callable[..., Any]
) -> list[str]:
    r"""Replaces a function wherever OpenOOD's modules have imported it by name."""
    places = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "openood":
            continue
        found = vars(module).get(name)
        if callable(found) and _original(found) is original:
            setattr(module, name, replacement)
            places.append(f"{module_name}.{name}")
    return places


def _evaluator_postprocessor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_postprocessor(config_root: str, postprocessor_name: str, id_data_name: str) -> Foreign:
        path = Path(config_root, "postprocessors", f"{postprocessor_name}.yml")
        if postprocessor_name not in NAMES or path.is_file():
            return original(config_root, postprocessor_name, id_data_name)
        # The original would download the file from OpenOOD, which does not have it.
        config_class = require("openood.utils.config").Config
        return OSDREPostprocessor(config_class(**read_yaml(shipped(postprocessor_name))))

    return get_postprocessor


def _pipeline_postprocessor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_postprocessor(config: Foreign) -> Foreign:
        is_ours = config["postprocessor"]["name"] in NAMES
        return OSDREPostprocessor(config) if is_ours else original(config)

    return get_postprocessor


def _trainer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_trainer(
        net: Foreign, train_loader: Foreign, val_loader: Foreign, config: Foreign
    ) -> Foreign:
        if config["trainer"]["name"] != NAMES[0]:
            return original(net, train_loader, val_loader, config)
        if not isinstance(train_loader, list | tuple):
            raise UserError("trainer.name: osdre needs a reference loader, the pipeline train_oe.")
        id_loader, reference_loader = train_loader
        return OSDRETrainer(net, id_loader, reference_loader, config)

    return get_trainer


def _network(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_network(network_config: Foreign) -> Foreign:
        if network_config["name"] != NAMES[0]:
            return original(network_config)
        return build_network(network_config)

    return get_network


def build_network(config: Mapping[str, Any]) -> OSDRENet:
    r"""Builds the network of OpenOOD's section `network`.

    Arguments:
        config: `config` (a configuration of this package, by name or file), `num_classes`,
            and with `pretrained`, `checkpoint`: a run folder, or a file that OpenOOD saved.
    """
    checkpoint = config.get("checkpoint")
    if config.get("pretrained") and Path(str(checkpoint)).is_dir():
        net = OSDRENet.load(str(checkpoint))
    else:
        name = config.get("config")
        if not name:
            raise UserError("network.config: missing, expected a configuration of ood_osdre.")
        net = OSDRENet.build(load_config(name), int(config["num_classes"]))
        if config.get("pretrained"):
            net.load_state_dict(torch.load(str(checkpoint), map_location="cpu", weights_only=True))
    return net.to("cuda") if config.get("num_gpus") and torch.cuda.is_available() else net


_WRAPPERS: dict[str, tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "openood.evaluation_api.postprocessor": ("get_postprocessor", _evaluator_postprocessor),
    "openood.postprocessors.utils": ("get_postprocessor", _pipeline_postprocessor),
    "openood.trainers.utils": ("get_trainer", _trainer),
    "openood.networks.utils": ("get_network", _network),
}
