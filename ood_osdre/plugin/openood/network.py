r"""The one-step ratio as a network of OpenOOD's: logits for its accuracy, features for its methods.

OpenOOD asks a network for logits, `net(x)`, and its feature-based methods ask for
`net(x, return_feature=True)`, `get_fc()` and `get_fc_layer()`. The ratio is beside them, so that
MSP, energy, KNN and the ratio can be compared on one and the same network.
"""

__all__ = ["OSDRENet", "ratio_of"]

from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ...config import Config
from ...errors import UserError
from ...evaluation.scorer import Scorer, load_scorer
from ...models.build import build_ratio
from ...models.classifier import Classifier
from ...models.frozen import unwrapped
from ...models.networks import CoefficientNetwork
from ...models.ratio import RatioModel


class OSDRENet(nn.Module):
    r"""A ratio with a class head, behind the face of OpenOOD's networks.

    Arguments:
        ratio: The ratio, whole, folded or direct, or a :class:`~ood_osdre.baselines.Classifier`,
            which has a class head but no ratio.
        config: The configuration that it was built from, which :class:`OSDRETrainer` needs.
        normalisation: The means and standard deviations of the channels that it was trained on,
            to be compared with the host's; None if they are not known.
        size: The side of the images that it was trained on; None if it is not known.

    Raises:
        UserError: If the ratio has no class head: OpenOOD reports the ID accuracy.
    """

    def __init__(
        self,
        ratio: RatioModel,
        config: Config | None = None,
        normalisation: tuple[list[float], list[float]] | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__()
        _, head = _parts(ratio)
        self.ratio, self.config = ratio, config
        self.normalisation, self.size = normalisation, size
        self.num_classes, self.feature_size = head.out_features, head.in_features

    @classmethod
    def load(cls, folder: str | Path) -> "OSDRENet":
        r"""Loads the model of a run folder, in evaluation mode, on the CPU.

        Arguments:
            folder: The run folder of `ood-osdre-eval`, or of :class:`OSDRETrainer`.

        Raises:
            UserError: If the folder holds none, or its model has no class head.
        """
        return cls.of(load_scorer(Path(folder)))

    @classmethod
    def of(cls, scorer: Scorer) -> "OSDRENet":
        r"""Returns the network of a trained scorer."""
        config = Config.from_mapping(scorer.metadata["config"])
        statistics = scorer.preprocess.mean.tolist(), scorer.preprocess.std.tolist()
        return cls(scorer.ratio, config, statistics, scorer.metadata.get("size")).eval()

    @classmethod
    def build(cls, config: Config, classes: int) -> "OSDRENet":
        r"""Builds an untrained network.

        Arguments:
            config: The configuration, with a class head and a loss for it.
            classes: The number of ID classes.
        """
        return cls(build_ratio(config, classes), config)

    def forward(self, x: Tensor, return_feature: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        r"""Returns the class logits, with the features if wanted.

        Arguments:
            x: The images, with shape :math:`(B, C, H, W)`.
            return_feature: Whether to return the features, too.

        Returns:
            The logits, with shape :math:`(B, C)`, and with `return_feature` the features, with
            shape :math:`(B, F)`.
        """
        backbone, head = _parts(self.ratio)
        features = backbone(x)
        logits = head(features)
        return (logits, features) if return_feature else logits

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Returns both heads of one pass.

        Arguments:
            x: The images, with shape :math:`(B, C, H, W)`.

        Returns:
            The logits, with shape :math:`(B, C)`, and the log-ratios in nats (larger = more ID),
            with shape :math:`(B)`.
        """
        prediction = self.ratio.predict(x)
        return cast(Tensor, prediction.logits), prediction.score

    def get_fc_layer(self) -> nn.Linear:
        r"""Returns the class head."""
        return _parts(self.ratio)[1]

    def get_fc(self) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        r"""Returns the weight and the bias of the class head."""
        head = self.get_fc_layer()
        return head.weight.detach().cpu().numpy(), head.bias.detach().cpu().numpy()


def ratio_of(net: nn.Module) -> OSDRENet | None:
    r"""Returns a network that holds a ratio and a class head, None for any other."""
    bare = unwrapped(net)
    if isinstance(bare, RatioModel) and not isinstance(bare, Classifier):
        return OSDRENet(bare)
    if isinstance(bare, OSDRENet) and not isinstance(bare.ratio, Classifier):
        return bare
    return None


def _parts(ratio: RatioModel) -> tuple[nn.Module, nn.Linear]:
    r"""Returns the backbone and the class head of a ratio."""
    holder = getattr(ratio, "network", ratio)
    backbone, head = (getattr(holder, name, None) for name in ("backbone", "class_head"))
    if not isinstance(head, nn.Linear) or not isinstance(backbone, nn.Module):
        what = "" if isinstance(holder, CoefficientNetwork) else f" ({type(ratio).__name__})"
        raise UserError(
            f"network: the ratio{what} has no class head, which OpenOOD's accuracy needs; train "
            "with objective.class_weight, or use the mode 'checkpoint' beside a classifier."
        )
    return backbone, head
