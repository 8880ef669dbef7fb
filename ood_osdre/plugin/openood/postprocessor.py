r"""OpenOOD's postprocessor: :class:`OSDREPostprocessor`, `conf` = log-ratio in nats, or a sum's score.

Contract of the host: `setup` is called once, before anything is scored and before the host puts
the network in evaluation mode; `postprocess` gives `(pred, conf)`, larger `conf` = more ID;
`inference` gives NumPy arrays of them and of the labels. A search of hyper-parameters (APS) sets
them by position, in the order of `args_dict`.

**OOD loaders are ignored**, always: the only OOD images that ever train anything are those of the
reference that the user names. In a search it is the host that scores its OOD validation set, and
the record should say so.
"""

__all__ = ["OSDREPostprocessor"]

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from tqdm import tqdm

from ...errors import UserError
from ...evaluation.metrics import check_scores
from ...models import device_of, evaluating, unwrapped
from ...options import Options, flat
from .host import Foreign, base_postprocessor
from .loaders import take
from .modes import MODES, PostprocessorOptions

if TYPE_CHECKING:
    Base = object
else:
    Base = base_postprocessor()


class PostprocessorSection(Options):
    r"""OpenOOD's section `postprocessor`; some of its files lack some of the keys."""

    model_config = ConfigDict(extra="ignore")

    APS_mode: bool | None = None
    postprocessor_args: dict[str, Any] | None = None
    postprocessor_sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] | None = None


class OSDREPostprocessor(Base):
    r"""Scores by the one-step ratio inside OpenOOD.

    Arguments:
        config: OpenOOD's configuration, with a section `postprocessor`; None to give options as
            keyword arguments.
        **options: Options of :class:`~.modes.PostprocessorOptions`.

    Attributes:
        APS_mode: Whether the host searches hyper-parameters.
        hyperparam_search_done: Whether it has done so.
        setup_flag: Whether :meth:`setup` has been called.
        args_dict: The values to search by name, in the order in which the host sets them.

    Raises:
        UserError: If an option is unknown, out of range or of another mode.
    """

    def __init__(self, config: Foreign = None, **options: Foreign) -> None:
        if TYPE_CHECKING:
            super().__init__()
        else:
            super().__init__(config)
        given = None if config is None else config.get("postprocessor")
        given = {} if given is None else given
        if isinstance(given, Mapping) and isinstance(given.get("postprocessor_sweep"), Mapping):
            # Options of a head have sections, here as dotted keys or nested.
            given = {**given, "postprocessor_sweep": flat(given["postprocessor_sweep"])}
        section = PostprocessorSection.of(given, "postprocessor")
        merged = {**(section.postprocessor_args or {}), **options}
        parsed = PostprocessorOptions.of(merged, "postprocessor_args")
        self.mode = MODES[parsed.mode](parsed)
        self.APS_mode = bool(section.APS_mode)
        self.hyperparam_search_done = False
        self.setup_flag = False
        self.args_dict = section.postprocessor_sweep or {}
        self._check_sweep()

    def setup(
        self, net: nn.Module, id_loader_dict: Mapping[str, Any], ood_loader_dict: object
    ) -> None:
        r"""Puts the network in evaluation mode, as the host will, and prepares the mode for it.

        Arguments:
            net: The network.
            id_loader_dict: The ID loaders by split.
            ood_loader_dict: The OOD loaders, which are ignored.

        Raises:
            UserError: If the network or the ID loaders are not what the mode needs.
        """
        net.eval()
        self._check_sweep()
        self.mode.setup(net, id_loader_dict)
        self.setup_flag = True

    @torch.no_grad()
    def postprocess(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        r"""Scores a batch.

        Arguments:
            net: The network.
            data: The images, preprocessed by the host, with shape :math:`(B, C, H, W)`.

        Returns:
            The predicted classes and the log-ratios in nats, of a sum its scores without a unit
            (larger = more ID), both with shape :math:`(B)`.

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
            data_loader: Batches with keys `data` and `label`, perhaps `image_name`.
            progress: Whether to show a progress bar.

        Returns:
            The predicted classes, what :meth:`postprocess` gives (larger = more ID) and the labels,
            each with shape :math:`(N)`.

        Raises:
            UserError: If there are no images, a batch is none of the host's, or a score is NaN or
                infinite.
        """
        device, names = device_of(net), []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in tqdm(data_loader, disable=not progress):
            data, label = take(batch, "data", "label")
            pred, conf = self.postprocess(net, data.to(device, non_blocking=True))
            parts.append((pred.cpu(), conf.cpu(), label.cpu()))
            names += list(map(str, batch.get("image_name", range(len(data)))))
        nothing = torch.zeros(0)
        columns = zip(*parts or [(nothing, nothing, nothing)], strict=True)
        preds, confs, labels = (torch.cat(column).numpy() for column in columns)
        # No images, NaN: the host would fail on them too, but only once everything is scored.
        check_scores("postprocessor", confs, names)
        return preds.astype(np.int64), confs.astype(np.float32), labels.astype(np.int64)

    def set_hyperparam(self, hyperparam: Iterable[Any]) -> None:
        r"""Sets the values, in the order of `args_dict`, and recomputes what depends on them."""
        self.mode.set(dict(zip(self.args_dict, hyperparam, strict=True)))

    def get_hyperparam(self) -> list[Any]:
        r"""Returns the values, in the order of `args_dict`."""
        values = self.mode.get()
        return [values[name] for name in self.args_dict]

    def _check_sweep(self) -> None:
        given, known = list(self.args_dict), list(self.mode.get())
        # The host may switch the search on from outside.
        searches = self.APS_mode and not self.hyperparam_search_done
        if (searches and not given) or not set(given) <= set(known):
            raise UserError(
                f"postprocessor_sweep: got {', '.join(given) or 'nothing'}, expected options that "
                f"the mode {self.mode.options.mode!r} can search ({', '.join(known) or 'none'}), "
                "or APS_mode: False."
            )
