r"""Makes OpenOOD know the names `osdre`: :func:`register`, and :func:`unregister`.

OpenOOD has no registry. Its evaluator reads a module-level dictionary, to which an entry is added.
Its older pipelines look names up in dictionaries inside functions, so those functions are replaced
by ones that know our names and pass every other on. Nothing is written to its folders, and
:func:`unregister` puts everything back.
"""

__all__ = ["NAMES", "build_network", "register", "unregister"]

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...config import load_config
from ...errors import UserError
from ...files import local
from ...resources import folders, read_yaml
from ...training.checkpoint import restore
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
    for home, (name, build) in _BUILDERS.items():
        original = _original(getattr(require(home), name))
        hooks += _replace(name, original, _hooked(original, build))
    return sorted(hooks)


def unregister() -> None:
    r"""Takes everything that :func:`register` added out of OpenOOD again."""
    table = require("openood.evaluation_api.postprocessor").postprocessors
    for name in NAMES:
        table.pop(name, None)
    for home, (name, _) in _BUILDERS.items():
        original = _original(getattr(require(home), name))
        _replace(name, original, original)


def build_network(network_config: Mapping[str, Any]) -> OSDRENet | None:
    r"""Builds the network of OpenOOD's section `network`, not folded, so that it can be trained.

    Arguments:
        network_config: `name`, `config` (a configuration of this package, by name or file),
            `num_classes`, and with `pretrained`, `checkpoint`: a run folder, or a file that
            OpenOOD saved.

    Returns:
        The network; None for another name.

    Raises:
        UserError: If there is no such configuration, or weights are of another network.
    """
    if network_config["name"] != NAMES[0]:
        return None
    checkpoint = local(str(network_config.get("checkpoint")))
    if network_config.get("pretrained") and checkpoint.is_dir():
        net = OSDRENet.load(checkpoint, folded=False)
    else:
        if not (name := network_config.get("config")):
            raise UserError(
                "network.config: is absent, expected a configuration, by name or file."
            )
        net = OSDRENet.build(load_config(str(name)), int(network_config["num_classes"]))
        if network_config.get("pretrained"):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
            restore(net, state, checkpoint)
    uses_gpu = network_config.get("num_gpus") and torch.cuda.is_available()
    return net.to("cuda") if uses_gpu else net


def _build_by_name(
    config_root: str, postprocessor_name: str, id_data_name: str
) -> OSDREPostprocessor | None:
    path = Path(config_root, "postprocessors", f"{postprocessor_name}.yml")
    if postprocessor_name not in NAMES or path.is_file():
        return None
    # OpenOOD would download the file from its own repository, which does not have it.
    shipped = folders("configs")[0] / "openood" / "postprocessors" / path.name
    return OSDREPostprocessor(require("openood.utils.config").Config(**read_yaml(shipped)))


def _build_postprocessor(config: Mapping[str, Any]) -> OSDREPostprocessor | None:
    return OSDREPostprocessor(config) if config["postprocessor"]["name"] in NAMES else None


def _build_trainer(
    net: Foreign, train_loader: Foreign, val_loader: Foreign, config: Mapping[str, Any]
) -> OSDRETrainer | None:
    if config["trainer"]["name"] != NAMES[0]:
        return None
    has_reference = isinstance(train_loader, list | tuple)
    id_loader, reference_loader = train_loader if has_reference else (train_loader, None)
    return OSDRETrainer(net, id_loader, reference_loader, config)


# Where each function of OpenOOD's is defined, its name, and what builds ours; None passes on.
_BUILDERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "openood.evaluation_api.postprocessor": ("get_postprocessor", _build_by_name),
    "openood.postprocessors.utils": ("get_postprocessor", _build_postprocessor),
    "openood.trainers.utils": ("get_trainer", _build_trainer),
    "openood.networks.utils": ("get_network", build_network),
}


def _hooked(original: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: Foreign, **kwargs: Foreign) -> Foreign:
        own = build(*args, **kwargs)
        return original(*args, **kwargs) if own is None else own

    setattr(hooked, _MARK, original)
    return hooked


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
