r"""OpenOOD's postprocessor: :class:`OSDREPostprocessor`, `conf` = log-ratio in nats.

Contract of the host: `setup` is called once, before anything is scored and before the host puts
the network in evaluation mode; `postprocess` gives `(pred, conf)`, larger `conf` = more ID;
`inference` gives NumPy arrays of them and of the labels. A search of hyper-parameters (APS) sets
them by position, in the order of `args_dict`.

**OOD loaders are ignored**, always: the only OOD images that ever train anything are those of the
reference that the user names. In a search it is the host that scores its OOD validation set, and
the record should say so.
"""

__all__ = ["OSDREPostprocessor"]

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from ...detectors.feature_ratio import FeatureRatioOptions
from ...errors import UserError
from ...evaluation.metrics import check_scores
from ...models.frozen import device_of, evaluating, unwrapped
from .host import Foreign, base_postprocessor
from .modes import FeaturesMode, make_mode
from .options import PostprocessorOptions

if TYPE_CHECKING:
    Base = object
else:
    Base = base_postprocessor()


class OSDREPostprocessor(Base):
    r"""Scores by the one-step ratio inside OpenOOD.

    Arguments:
        config: OpenOOD's configuration, with a section `postprocessor`; None to give options as
            keyword arguments.
        reference: The reference of the mode `features`: files, as the option of that name, or
            batches of images, preprocessed as the network expects.
        **options: Options of :class:`~.options.PostprocessorOptions`, and `head`, a mapping of
            those of :class:`~ood_osdre.detectors.feature_ratio.FeatureRatioOptions`.

    Attributes:
        APS_mode: Whether the host searches hyper-parameters.
        hyperparam_search_done: Whether it has done so.
        setup_flag: Whether :meth:`setup` has been called.
        args_dict: The values to search by name, in the order in which the host sets them.

    Raises:
        UserError: If an option is unknown, out of range or of another mode.
    """

    def __init__(
        self, config: Foreign = None, *, reference: Foreign = None, **options: Foreign
    ) -> None:
        if TYPE_CHECKING:
            super().__init__()
        else:
            super().__init__(config)
        section = _mapping(_mapping(config, "config").get("postprocessor"), "postprocessor")
        given = {**_mapping(section.get("postprocessor_args"), "postprocessor_args"), **options}
        if isinstance(reference, str | os.PathLike):
            given["reference"], reference = os.fspath(reference), None
        head = _mapping(given.pop("head", None), "postprocessor_args.head")
        self.options = PostprocessorOptions.of(given, "postprocessor_args")
        head_options = None
        if head:
            head_options = FeatureRatioOptions.of(head, "postprocessor_args.head")
        self.mode = make_mode(self.options, head_options, reference)
        # Some of the host's files lack the key.
        searches = section.get("APS_mode")
        if not isinstance(searches, bool | None):
            raise UserError(f"postprocessor.APS_mode: got {searches!r}, expected true or false.")
        self.APS_mode = bool(searches)
        self.hyperparam_search_done = False
        self.setup_flag = False
        self.args_dict = dict(_mapping(section.get("postprocessor_sweep"), "postprocessor_sweep"))
        self._check_sweep()

    def setup(
        self, net: nn.Module, id_loader_dict: Mapping[str, Any], ood_loader_dict: object
    ) -> None:
        r"""Puts the network in evaluation mode, as the host will, and prepares.

        Arguments:
            net: The network.
            id_loader_dict: The ID loaders, of which `train` or another split is read in the mode
                `features` alone.
            ood_loader_dict: The OOD loaders, in whatever style. They are ignored.

        Raises:
            UserError: If the network or the ID loaders are not what the mode needs.
        """
        if not isinstance(id_loader_dict, Mapping):
            raise UserError(
                f"postprocessor: got {type(id_loader_dict).__name__} for the ID loaders, expected "
                "a mapping of loaders by split."
            )
        net.eval()
        if self.APS_mode and not self.hyperparam_search_done and not self.args_dict:
            raise UserError(
                "postprocessor.APS_mode: true, but postprocessor_sweep is empty; set it to False."
            )
        self.mode.setup(net, id_loader_dict)
        self.setup_flag = True

    @torch.no_grad()
    def postprocess(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        r"""Scores a batch.

        Arguments:
            net: The network.
            data: The images, preprocessed by the host, with shape :math:`(B, C, H, W)`.

        Returns:
            The predicted classes and the log-ratios in nats (larger = more ID), both with shape
            :math:`(B)`.

        Raises:
            UserError: If the network or the images are not what the mode needs.
        """
        with evaluating(net):
            logits, log_ratio = self.mode.evaluate(net, data)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(data):
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"postprocessor: {type(unwrapped(net)).__name__} returns {found} for {len(data)} "
                f"images, expected class logits with shape ({len(data)}, C)."
            )
        return logits.argmax(dim=1), log_ratio

    def inference(
        self, net: nn.Module, data_loader: Iterable[Mapping[str, Any]], progress: bool = True
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        r"""Scores a loader, on the network's device.

        Arguments:
            net: The network.
            data_loader: Batches with keys `data` and `label`.
            progress: Whether to show a progress bar.

        Returns:
            The predicted classes, the log-ratios in nats (larger = more ID) and the labels, each
            with shape :math:`(N)`.

        Raises:
            UserError: If there are no images, a batch is none of the host's, or a score is NaN or
                infinite.
        """
        device = device_of(net)
        parts: list[tuple[Tensor, ...]] = []
        names: list[str] = []
        for batch in tqdm(data_loader, disable=not progress):
            data, label, own = _taken(batch)
            pred, conf = self.postprocess(net, data.to(device, non_blocking=True))
            parts.append((pred.cpu(), conf.cpu(), label.cpu()))
            names += own
        if not parts:
            raise UserError("postprocessor: the loader is empty, expected at least one batch.")
        arrays = [torch.cat(p).numpy() for p in zip(*parts, strict=True)]
        # The host would fail on them too, but only once everything is scored.
        check_scores("postprocessor", arrays[1], names)
        return arrays[0].astype(np.int64), arrays[1].astype(np.float32), arrays[2].astype(np.int64)

    def set_hyperparam(self, hyperparam: Iterable[Any]) -> None:
        r"""Sets hyper-parameters, and recomputes what depends on them.

        Arguments:
            hyperparam: The values, in the order of `args_dict`.

        Raises:
            UserError: If their number is another, or one is out of range.
        """
        values = list(hyperparam)
        if len(values) != len(self.args_dict):
            raise UserError(
                f"postprocessor: got {len(values)} hyper-parameters, expected one for each of "
                f"postprocessor_sweep: {', '.join(self.args_dict) or 'none'}."
            )
        self.mode.set(dict(zip(self.args_dict, values, strict=True)))

    def get_hyperparam(self) -> list[Any]:
        r"""Returns the values, in the order of `args_dict`."""
        if not isinstance(self.mode, FeaturesMode):
            return []
        values = self.mode.ratio.options.to_dict()
        return [values[name] for name in self.args_dict]

    def _check_sweep(self) -> None:
        known = self.mode.sweepable
        for name, values in self.args_dict.items():
            if name not in known:
                has = f"; it has {', '.join(known)}" if known else ", nor has any other"
                raise UserError(
                    f"postprocessor_sweep.{name}: has no effect in the mode "
                    f"{self.options.mode!r}{has}."
                )
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"postprocessor_sweep.{name}: got {values!r}, expected a list.")


def _mapping(value: object, source: str) -> Mapping[str, Any]:
    r"""Returns a section of the host's configuration, none of whose keys need be there."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{source}: got {value!r:.60}, expected a mapping.")
    return value


def _taken(batch: object) -> tuple[Tensor, Tensor, list[str]]:
    r"""Returns the images, the labels and the names of a batch."""
    if not isinstance(batch, Mapping):
        raise UserError(
            f"postprocessor: a batch is a {type(batch).__name__}, expected a mapping with 'data' "
            "and 'label', as OpenOOD's loaders give."
        )
    given = []
    for key in ("data", "label"):
        value = batch.get(key)
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise UserError(
                f"postprocessor: a batch has {type(value).__name__} under {key!r}, expected a "
                "tensor with a row for each image."
            )
        given.append(value)
    data, label = given
    names = [str(n) for n in batch.get("image_name", range(len(data)))]
    if label.shape != (len(data),) or len(names) != len(data):
        raise UserError(
            f"postprocessor: a batch of {len(data)} images with labels of shape "
            f"{tuple(label.shape)} and {len(names)} names, expected one for each."
        )
    return data, label, names
