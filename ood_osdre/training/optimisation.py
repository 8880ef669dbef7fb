r"""The parts of a training step: optimiser, learning rate, averaged weights and precision."""

__all__ = ["autocast_dtype", "average_into", "build_optimizer", "learning_rate_factor"]

import math
from typing import Any

import torch
from torch import nn

from ..models import RatioModel
from ..paths import GaussianPath
from ..sections import TrainingConfig

# The peak learning rate of a learnable path, whatever the network's. Its parameters are logarithms
# and logits of order one, and its loss is a closed form without noise. At a network's rate of 1e-3,
# 600 steps move gamma2 by a third, where the data's scale may be a factor of fifty away; at this
# one it is there after a hundred, and the network learns on a path that stays.
PATH_RATE = 0.05


def learning_rate_factor(step: int, options: TrainingConfig) -> float:
    r"""Returns the share of the peak learning rate, which ends at zero.

    With `training.decay` cosine it is a linear warm-up times a cosine over all steps, from the first;
    with linear it rises over the warm-up and falls over the rest.
    """
    warm = min(1.0, (step + 1) / max(options.warmup, 1))
    if options.decay == "linear":
        return min(warm, (options.steps - step) / max(options.steps - options.warmup, 1))
    return warm * 0.5 * (1 + math.cos(math.pi * step / options.steps))


def build_optimizer(
    ratio: RatioModel, objective: nn.Module, options: TrainingConfig
) -> torch.optim.Optimizer:
    r"""Builds the optimiser: no decay on norms, biases, basis and path; a lower rate on basis shapes.

    The terms of the objective may hold parameters: a learnable path, a data score. Each group of
    the optimiser has its peak learning rate under `peak`; the path's is :data:`PATH_RATE`.
    """
    trained = [(name, p) for name, p in ratio.named_parameters() if p.requires_grad]
    basis = [p for name, p in trained if name.startswith("basis.")]
    network = [p for name, p in trained if not name.startswith("basis.")]
    paths = [m for m in objective.modules() if isinstance(m, GaussianPath)]
    path = {id(p): p for m in paths for p in m.parameters() if p.requires_grad}
    others = [p for p in objective.parameters() if p.requires_grad and id(p) not in path]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in network if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in network if p.ndim <= 1]},
        {"params": basis, "peak": options.lr * options.basis_lr_factor},
        {"params": list(path.values()), "peak": PATH_RATE},
        {"params": others},
    ]
    groups = [{"peak": options.lr, "weight_decay": 0.0, **g} for g in groups if g["params"]]
    # On a GPU, one kernel for all tensors instead of a dozen for each.
    fused = network[0].device.type == "cuda"
    if options.optimizer == "sgd":
        momentum = options.momentum
        return torch.optim.SGD(
            groups, lr=options.lr, momentum=momentum, nesterov=momentum > 0, fused=fused
        )
    return torch.optim.AdamW(groups, lr=options.lr, fused=fused)


@torch.no_grad()
def average_into(averaged: nn.Module, module: nn.Module, decay: float) -> None:
    r"""Moves the averaged parameters and statistics towards those of a module.

    Arguments:
        averaged: The module to change, of the same architecture.
        module: The module to follow.
        decay: The weight that the old values keep.
    """
    new = list(module.state_dict().values())
    old = list(averaged.state_dict().values())
    floating = [(o, n) for o, n in zip(old, new, strict=True) if o.is_floating_point()]
    torch._foreach_lerp_([o for o, _ in floating], [n for _, n in floating], 1 - decay)
    for o, n in zip(old, new, strict=True):
        if not o.is_floating_point():
            o.copy_(n)


def autocast_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    r"""Returns the autocast type, None for none.

    Arguments:
        amp: `"none"`, `"bf16"`, `"fp16"`, or `"auto"`, which takes what a CUDA device has.
        device: The device.
    """
    if amp == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
