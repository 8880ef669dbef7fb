r"""What a user passes to a detector beside the data: a configuration, options and labels."""

__all__ = ["class_labels", "configured"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .config import Config, load_config
from .errors import UserError


def configured(
    config: str | Path | Mapping[str, Any] | Config | None,
    options: Mapping[str, object],
    gpu: bool,
) -> Config:
    r"""Returns the configuration with options, `__` standing for the dot of a key.

    Arguments:
        config: Its name or file, a mapping, or the configuration itself; None for the one of
            32x32 images that suits the device.
        options: The options by name.
        gpu: Whether there is a GPU.

    Raises:
        UserError: If it is none, or an option is unknown or out of range.
    """
    if config is None:
        config = "cifar10" if gpu else "cifar10_cpu"
    source = str(config) if isinstance(config, str | Path) else "config"
    if isinstance(config, str | Path):
        config = load_config(config)
    if not isinstance(config, Config | Mapping):
        raise UserError(
            f"config: got {type(config).__name__}, expected the name of a configuration, a file, "
            "a mapping or a Config."
        )
    values: dict[str, Any] = dict(config.to_dict() if isinstance(config, Config) else config)
    for key, value in options.items():
        section, _, name = key.rpartition("__")
        held = values.get(section)
        if not section:
            values[name] = value
        elif held is None or isinstance(held, Mapping):
            values[section] = {**(held or {}), name: value}
        # A section that is no mapping is refused below.
    return Config.from_mapping(values, source)


def class_labels(labels: ArrayLike | Tensor) -> NDArray[np.int64]:
    r"""Returns class labels as integers, none of them rounded.

    Arguments:
        labels: The labels, whole numbers from 0, or -1 for none, with shape :math:`(N)`.

    Raises:
        UserError: If they are something else.
    """
    expected = "expected class indices from 0, or -1 for none"
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    except ValueError:
        raise UserError(f"labels: lists of different lengths, {expected}.") from None
    if array.dtype.kind not in "biuf":
        one = array.flat[0] if array.size else labels
        raise UserError(f"labels: got {repr(one)[:40]}, {expected}.")
    # Floats hold whole numbers exactly up to here; NaN is not one.
    is_index = (array >= -1) & (array < 2**53) & (array == np.floor(array))
    if not is_index.all():
        bad = array[~is_index]
        raise UserError(
            f"labels: {bad.size} of {array.size} are no class index, the first is {bad.flat[0]}; "
            f"{expected}."
        )
    return array.astype(np.int64)
