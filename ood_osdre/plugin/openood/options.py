r"""The options of the postprocessor, as OpenOOD's YAML files hold them."""

__all__ = ["PostprocessorOptions", "Statistics"]

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from ...errors import UserError
from ...options import Range, Section
from ...training.batches import SHARE

Mean = Annotated[float, Range(0, 1)]
Deviation = Annotated[float, Range(0, ends="()")]

#: The means and the standard deviations of the channels.
Statistics: TypeAlias = tuple[list[float], list[float]]


@dataclass(frozen=True)
class PostprocessorOptions(Section):
    r"""The `postprocessor_args` of OpenOOD's YAML file.

    Attributes:
        mode: One of those of :mod:`~ood_osdre.plugin.openood.modes`.
        checkpoint: The run folder of a trained scorer, for the mode `checkpoint`; or the folder
            of a saved :class:`~ood_osdre.detectors.feature_ratio.FeatureRatio`, for `features`, which then
            trains nothing.
        reference: The reference images of the mode `features`, a folder or a list file.
        reference_root: The folder that a list's paths are relative to; null for its own.
        layer: The layer of the network to read features from; null for the ways that networks
            offer them (:mod:`ood_osdre.models.frozen`).
        id_split: The ID split that the mode `features` trains on.
        broaden: The share of the reference that the mode `features` transforms strongly, so that
            far-OOD images lie within its reach (:mod:`ood_osdre.training.batches`).
        mean: The means, of pixels in [0, 1], that the host's images were normalised with; null to
            read them off its transform.
        std: The standard deviations, likewise.
    """

    mode: Literal["network", "checkpoint", "features"] = "network"
    checkpoint: str | None = None
    reference: str | None = None
    reference_root: str | None = None
    layer: str | None = None
    id_split: str = "train"
    broaden: Annotated[float, Range(0, 1)] = SHARE
    mean: tuple[Mean, ...] | None = None
    std: tuple[Deviation, ...] | None = None

    def statistics(self) -> Statistics | None:
        r"""Returns the means and the standard deviations; None if they are not given."""
        if (self.mean is None) != (self.std is None):
            raise UserError("postprocessor_args: give both 'mean' and 'std', or neither.")
        if self.mean is None or self.std is None:
            return None
        return list(self.mean), list(self.std)
