r"""The one-step ratio as a network of OpenOOD's: logits for its accuracy, features for its methods.

OpenOOD asks a network for logits, `net(x)`, and its feature-based methods ask for
`net(x, return_feature=True)`, `get_fc()` and `get_fc_layer()`. The ratio is beside them, so that
MSP, energy, KNN and the ratio can be compared on one and the same network.
"""

__all__ = ["OSDRENet"]

from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...config import Config
from ...detectors import Scorer, TrainedModel, load_scorer, read_model
from ...errors import UserError
from ...files import local
from ...models import Classifier, RatioModel, unwrapped
from ...training.build import build_ratio
from ...training.checkpoint import input_shape


class OSDRENet(nn.Module):
    r"""A ratio with a class head, behind the face of OpenOOD's networks.

    Arguments:
        ratio: The ratio, folded or not, or a :class:`~ood_osdre.models.baselines.Classifier`,
            which has a class head but no ratio.
        config: The configuration that it was built from, which the trainer needs.
        normalisation: The means and standard deviations of the channels that it was trained on,
            to be compared with the host's; None if they are not known.
        shape: The shape of the images that it was trained on, :math:`(3, S, S)`; None if it is
            not known.

    Raises:
        UserError: If the ratio has no class head: OpenOOD reports the ID accuracy.
    """

    def __init__(
        self,
        ratio: RatioModel,
        config: Config | None = None,
        normalisation: tuple[list[float], list[float]] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        _, head = _parts(ratio)
        self.ratio, self.config = ratio, config
        self.normalisation, self.shape = normalisation, shape
        self.num_classes, self.feature_size = head.out_features, head.in_features

    @classmethod
    def load(cls, folder: str | Path, folded: bool = True) -> "OSDRENet":
        r"""Loads the model of a run folder, in evaluation mode, on the CPU.

        Arguments:
            folder: The run folder of `ood-osdre-eval`, or of
                :class:`~ood_osdre.plugin.openood.OSDRETrainer`.
            folded: Whether to fold it, to score; the trainer needs one that is not.

        Raises:
            UserError: If the folder holds none, or its model has no class head.
        """
        return cls.of(load_scorer(folder) if folded else read_model(local(folder)))

    @classmethod
    def of(cls, model: Scorer | TrainedModel) -> "OSDRENet":
        r"""Returns the network of a trained model."""
        config = Config.from_mapping(model.metadata["config"])
        statistics = model.preprocess.mean.tolist(), model.preprocess.std.tolist()
        return cls(model.ratio, config, statistics, input_shape(model.metadata)).eval()

    @classmethod
    def build(cls, config: Config, classes: int) -> "OSDRENet":
        r"""Builds an untrained network; the configuration has a class head and a loss for it."""
        return cls(build_ratio(config, classes), config)

    @classmethod
    def wrap(cls, net: nn.Module) -> "OSDRENet":
        r"""Returns a network of the host's as an OS-DRE network: bare, or within wrappers.

        Raises:
            UserError: If it has no log-ratio or no class head.
        """
        bare = unwrapped(net)
        own = bare if isinstance(bare, cls) else None
        ratio = cast(RatioModel, bare) if own is None else own.ratio
        _parts(ratio, scores=True)
        return cls(ratio) if own is None else own

    def fold(self) -> "OSDRENet":
        r"""Returns a copy with the ratio folded, in evaluation mode."""
        # The folded head's construction draws weights, only to replace them.
        with torch.random.fork_rng(devices=[]):
            ratio = self.ratio.fold()
        return OSDRENet(ratio, self.config, self.normalisation, self.shape).eval()

    def forward(self, x: Tensor, return_feature: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        r"""Returns the class logits of images, with the features if wanted.

        Arguments:
            x: The images, with shape :math:`(B, 3, H, W)`.
            return_feature: Whether to return the features, with shape :math:`(B, F)`, too.
        """
        backbone, head = _parts(self.ratio)
        features = backbone(x)
        logits = head(features)
        return (logits, features) if return_feature else logits

    def evaluate(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        r"""Returns the logits and the log-ratios (nats, larger = more ID), in one pass."""
        prediction = self.ratio.predict(x)
        return prediction.logits, prediction.score

    def get_fc_layer(self) -> nn.Linear:
        r"""Returns the class head."""
        return _parts(self.ratio)[1]

    def get_fc(self) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        r"""Returns the weight and the bias of the class head."""
        head = self.get_fc_layer()
        return head.weight.detach().cpu().numpy(), head.bias.detach().cpu().numpy()


def _parts(ratio: nn.Module, scores: bool = False) -> tuple[nn.Module, nn.Linear]:
    r"""Returns the backbone and the class head; `scores` if there has to be a log-ratio, too."""
    holder = getattr(ratio, "network", ratio)
    backbone, head = (getattr(holder, name, None) for name in ("backbone", "class_head"))
    is_ratio = isinstance(ratio, RatioModel) and not (scores and isinstance(ratio, Classifier))
    if not is_ratio or not isinstance(head, nn.Linear) or not isinstance(backbone, nn.Module):
        raise UserError(
            f"network: {type(ratio).__name__} is no OS-DRE network with a log-ratio and a class "
            "head; load one with OSDRENet.load(folder) that was trained with labels and "
            "objective.class_weight, or use the mode 'checkpoint' or 'features'."
        )
    return backbone, head
