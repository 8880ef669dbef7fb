r"""The files of a detector, and the claim on its folder while it trains.

A folder holds the model as a run's does, so that :func:`ood_osdre.load_scorer` reads it, too, and
beside it a checkpoint `calibration`: the calibration scores, the rate, and the fingerprints of
what fit has read. The calibration names the model that it belongs to.
"""

__all__ = ["held_folder", "read_calibration", "write_detector"]

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from ..errors import UserError
from ..evaluation.calibration import SplitConformal
from ..evaluation.scorer import TrainedModel
from ..files import sweep
from ..training import checkpoint
from ..training.run import MODEL, STATE, holds, locked

CALIBRATION = "calibration"


def write_detector(
    folder: Path,
    trained: TrainedModel,
    seen: NDArray[Any] | None,
    conformal: SplitConformal | None,
) -> None:
    r"""Writes a model and its calibration.

    Arguments:
        folder: The folder, created if needed.
        trained: The model.
        seen: The fingerprints of what fit has read; None if that is not known.
        conformal: The calibration; None if there is none yet.
    """
    digest = checkpoint.write_checkpoint(
        folder, checkpoint.MODEL, trained.ratio.state_dict(), trained.metadata
    )
    tensors = {} if seen is None else {"seen": torch.as_tensor(seen)}
    if conformal is not None:
        tensors["scores"] = torch.as_tensor(conformal.scores)
    alpha = None if conformal is None else conformal.alpha
    checkpoint.write_checkpoint(folder, CALIBRATION, tensors, {"model": digest, "alpha": alpha})


def read_calibration(
    folder: Path, digest: str
) -> tuple[NDArray[Any] | None, SplitConformal | None]:
    r"""Reads the fingerprints of what fit has read, and the calibration.

    Arguments:
        folder: The folder of a model.
        digest: The SHA-256 of the model's checkpoint.

    Returns:
        Both, None where the folder holds none.

    Raises:
        UserError: If they are damaged, or of another model.
    """
    file = checkpoint.checkpoint_path(folder, CALIBRATION)
    if not file.is_file():
        return None, None
    tensors, metadata, _ = checkpoint.read_checkpoint(folder, CALIBRATION)
    if metadata.get("model") != digest:
        raise UserError(
            f"{file}: of another model than the one in this folder; save the detector again."
        )
    conformal = None
    if "scores" in tensors:
        try:
            conformal = SplitConformal(tensors["scores"].numpy(), metadata["alpha"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{file}: not a calibration ({error}).") from None
    return tensors["seen"].numpy() if "seen" in tensors else None, conformal


@contextmanager
def held_folder(folder: Path, resume: bool) -> Iterator[None]:
    r"""Holds a folder against other runs, and refuses to write over one.

    Arguments:
        folder: The folder.
        resume: Whether the run that it holds is to go on.
    """
    with locked(folder):
        if not resume and holds(folder, STATE, MODEL):
            raise UserError(
                f"{folder}: holds a run already; go on with resume=True or choose another folder."
            )
        sweep(folder, age=0)
        yield
