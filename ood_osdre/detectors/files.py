r"""What a detector is once it is fitted, and the files that hold it.

A folder holds the model as a run's does, so that :func:`ood_osdre.load_scorer` reads it, too, and
beside it a checkpoint `calibration`: the calibration scores, the rate, and the fingerprints of
what fit has read. The calibration names the model that it belongs to.
"""

__all__ = ["Fitted", "held_folder", "read_calibration", "read_fitted", "write_fitted"]

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from ..config import Config
from ..data.preprocess import Preprocess
from ..errors import UserError
from ..evaluation.calibration import SplitConformal
from ..files import sweep
from ..models.guards import check_statistics
from ..models.ratio import RatioModel
from ..training import checkpoint as checkpoints
from ..training.batches import Standardise
from ..training.run import claimed
from .fitting import build_untrained

CALIBRATION = "calibration"
CHANNELS = 3


@dataclass(frozen=True)
class Fitted:
    r"""What a fitted detector scores with.

    Attributes:
        ratio: The trained model, which is saved.
        folded: The same, folded.
        preprocess: The preprocessing, with the statistics of the ID data.
        metadata: What is saved with the model.
        seen: The fingerprints of what fit has read; None if that is not known.
    """

    ratio: RatioModel
    folded: RatioModel
    preprocess: Preprocess
    metadata: Mapping[str, Any]
    seen: NDArray[Any] | None

    @classmethod
    def of(
        cls,
        ratio: RatioModel,
        preprocess: Preprocess,
        metadata: Mapping[str, Any],
        seen: NDArray[Any] | None = None,
    ) -> "Fitted":
        r"""Returns a ratio in evaluation mode, with its folded form."""
        ratio.eval()
        folded = ratio.fold()
        if metadata["config"]["training"]["channels_last"]:
            folded.to(memory_format=torch.channels_last)
        return cls(ratio, folded, preprocess, metadata, seen)


def write_fitted(folder: Path, fitted: Fitted, conformal: SplitConformal | None) -> None:
    r"""Writes a model and its calibration.

    Arguments:
        folder: The folder, created if needed.
        fitted: The model.
        conformal: The calibration; None if there is none yet.
    """
    digest = checkpoints.write_checkpoint(
        folder, checkpoints.MODEL, fitted.ratio.state_dict(), fitted.metadata
    )
    tensors = {} if fitted.seen is None else {"seen": torch.as_tensor(fitted.seen)}
    if conformal is not None:
        tensors["scores"] = torch.as_tensor(conformal.scores)
    alpha = None if conformal is None else conformal.alpha
    checkpoints.write_checkpoint(folder, CALIBRATION, tensors, {"model": digest, "alpha": alpha})


def read_fitted(
    folder: Path, backbone: nn.Module | None, device: torch.device
) -> tuple[Config, Fitted]:
    r"""Reads the model of a detector or of a run.

    Arguments:
        folder: The folder.
        backbone: A module of the architecture that the model was trained on, if it was one of the
            user's own.
        device: Where to score.

    Returns:
        The configuration and the model, whose metadata have a key `size`.

    Raises:
        UserError: If the folder holds none, it is damaged, or the backbone is another one.
    """
    tensors, metadata = checkpoints.read_checkpoint(folder, checkpoints.MODEL)
    file = folder / f"{checkpoints.MODEL}.json"
    own = metadata.get("backbone")
    if (own is None) != (backbone is None):
        expected = "none" if own is None else f"the {own} it was trained with"
        raise UserError(f"{file}: pass as backbone {expected}.")
    try:
        config = Config.from_mapping(metadata["config"], str(file))
        size, dim = metadata["size"], metadata.get("dim")
        ratio = build_untrained(config, backbone, size, metadata["classes"], dim)
        statistics = metadata["mean"], metadata["std"]
    except KeyError as error:
        raise UserError(f"{file}: {error} is missing, expected a trained model.") from None
    count, kind = (CHANNELS, Preprocess) if dim is None else (dim, Standardise)
    preprocess = kind(*check_statistics(*statistics, count, file), device)
    checkpoints.restore(ratio, tensors, file)
    return config, Fitted.of(ratio.to(device), preprocess, metadata)


def read_calibration(folder: Path) -> tuple[NDArray[Any] | None, SplitConformal | None]:
    r"""Reads the fingerprints of what fit has read, and the calibration.

    Arguments:
        folder: The folder of a model.

    Returns:
        Both, None where the folder holds none.

    Raises:
        UserError: If they are damaged, or of another model.
    """
    if not checkpoints.exists(folder, CALIBRATION):
        return None, None
    tensors, metadata = checkpoints.read_checkpoint(folder, CALIBRATION)
    file = folder / f"{CALIBRATION}.json"
    if metadata.get("model") != checkpoints.digest_of(folder, checkpoints.MODEL):
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
    with claimed(folder):
        names = (checkpoints.STATE, checkpoints.MODEL)
        if not resume and any(checkpoints.exists(folder, name) for name in names):
            raise UserError(
                f"{folder}: holds a run already; go on with resume=True or choose another folder."
            )
        sweep(folder, age=0)
        yield
