r"""The decisions of a calibrated detector on disk: a checkpoint beside the model's, `calibration`.

It has the calibration scores, the rate, and the fingerprints of what the model was fitted to. It is
written before the model, whose own says that it is to be there: what was stopped between the two is not
taken for a detector that makes no decisions.
"""

__all__ = ["CALIBRATED", "CALIBRATION", "read_calibration", "write_calibration"]

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from ..errors import UserError
from ..files import is_regular
from ..training.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from .calibration import SplitConformal

#: The name of the checkpoint, and what the metadata of the model have where there is to be one.
CALIBRATION, CALIBRATED = "calibration", "calibrated"


def write_calibration(
    folder: Path, digest: str, conformal: SplitConformal | None, seen: NDArray[Any] | None
) -> None:
    r"""Writes the calibration of a model into its folder.

    Arguments:
        folder: The folder.
        digest: The SHA-256 of the model's checkpoint.
        conformal: The threshold, if there is one.
        seen: The fingerprints of what the model was fitted to; None if they are not recorded.
    """
    tensors = {} if seen is None else {"seen": torch.as_tensor(seen)}
    if conformal is not None:
        tensors["scores"] = torch.as_tensor(conformal.scores)
    metadata = {"model": digest, "alpha": None if conformal is None else conformal.alpha}
    write_checkpoint(folder, CALIBRATION, tensors, metadata)


def read_calibration(
    folder: Path, digest: str, model: Mapping[str, Any]
) -> tuple[SplitConformal | None, NDArray[Any] | None]:
    r"""Returns what :func:`write_calibration` wrote, twice None where there is to be none.

    Arguments:
        folder: The folder.
        digest: The SHA-256 of the model's checkpoint.
        model: Its metadata.

    Raises:
        UserError: If it is missing, damaged, or belongs to another model.
    """
    path = checkpoint_path(folder, CALIBRATION)
    if not (model.get(CALIBRATED) or os.path.lexists(path)):
        return None, None
    conformal, problem = None, "is no file"
    tensors: Mapping[str, Any] = {}
    if is_regular(path):
        tensors, metadata, _ = read_checkpoint(folder, CALIBRATION)
        problem = "" if metadata.get("model") == digest else "another model's calibration"
        try:
            if "scores" in tensors:
                conformal = SplitConformal(tensors["scores"].numpy(), metadata["alpha"])
        except (KeyError, ValueError) as error:
            problem = f"not a calibration ({error})"
    if problem:
        raise UserError(f"{path}: {problem}; go on with --resume, or fit or save it again.")
    return conformal, tensors["seen"].numpy() if "seen" in tensors else None
