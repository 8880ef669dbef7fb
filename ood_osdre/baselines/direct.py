r"""Direct ratio estimators: a network whose one output is the log-ratio.

They know nothing of paths and times. Which estimator it is depends on the loss alone,
:class:`ood_osdre.objectives.EndPointLoss`, and the losses act on the log-ratio itself, so that all
of them share the network, its output and its start at zero.
"""

__all__ = ["DirectRatio"]

from torch import nn

from ..ratio import FoldedRatio


class DirectRatio(FoldedRatio):
    r"""A backbone under an affine head of one output, the log-ratio in nats (larger = more ID).

    The network is that of a folded one-step ratio: the two are deployed at the same cost.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
        classes: The number of classes :math:`C`; 0 for no class head.

    Example:
        >>> import torch
        >>> from ood_osdre.networks import MLP
        >>> ratio = DirectRatio(MLP(2, 16), features=16)
        >>> ratio.log_ratio(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(self, backbone: nn.Module, features: int, classes: int = 0) -> None:
        head = nn.Linear(features, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        super().__init__(backbone, head, nn.Linear(features, classes) if classes else None)
