r"""The options of the postprocessor, as OpenOOD's YAML files hold them."""

__all__ = ["PostprocessorOptions", "Statistics"]

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator
from typing_extensions import Self

from ...options import Options, Positive, Share
from ...training.batches import SHARE

#: The means and the standard deviations of the channels.
Statistics: TypeAlias = tuple[list[float], list[float]]


class PostprocessorOptions(Options):
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
    broaden: Share = SHARE
    mean: Annotated[tuple[Share, ...], Field(strict=False)] | None = None
    std: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("give both 'mean' and 'std', or neither.")
        return self

    def statistics(self) -> Statistics | None:
        r"""Returns the means and the standard deviations; None if they are not given."""
        if self.mean is None or self.std is None:
            return None
        return list(self.mean), list(self.std)
