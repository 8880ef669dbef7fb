r"""The parts of a training step: optimiser, learning rate, averaged weights and precision."""

__all__ = [
    "DTYPES",
    "Losses",
    "average_into",
    "build_optimizer",
    "faster_precision",
    "learning_rate_factor",
    "settled_precision",
]

import copy
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..models import RatioModel
from ..objectives import Batch, Objective
from ..paths import GaussianPath
from ..sections import TrainingConfig

# The peak learning rate of a learnable path, whatever the network's. Its parameters are logarithms
# and logits of order one, and its loss is a closed form without noise. At a network's rate of 1e-3,
# 600 steps move gamma2 by a third, where the data's scale may be a factor of fifty away; at this
# one it is there after a hundred, and the network learns on a path that stays.
PATH_RATE = 0.05

#: The autocast type of each precision; the empty name is one that is not decided yet.
DTYPES = {"": None, "none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# The timed steps of each precision, the seconds from which on fewer do, and by what factor bf16 is
# to be faster: a choice by less would be one by chance.
TRIALS, TRIAL_SECONDS, GAIN = 5, 20.0, 1.1
# The names of batch normalisation's buffers of floating point.
MOMENTS = ("running_mean", "running_var")


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


class Losses(nn.Module):
    r"""A model and its objective as one module, whose gradients processes can average.

    Arguments:
        ratio: The model.
        objective: A module from the model and a batch to losses.
    """

    def __init__(self, ratio: RatioModel, objective: Objective) -> None:
        super().__init__()
        self.ratio, self.objective = ratio, objective

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        r"""Returns the losses of each term and their `total`, each with shape :math:`(B)`."""
        return self.objective(self.ratio, batch)


@torch.no_grad()
def average_into(averaged: nn.Module, module: nn.Module, decay: float) -> None:
    r"""Moves the averaged parameters and statistics towards those of a module.

    What is averaged are parameters and the moments of batch normalisation. Other buffers are
    followed as they are: the mean of two directions, such as those of spectral normalisation,
    is none. A tensor under several names is averaged once.

    Arguments:
        averaged: The module to change, of the same architecture.
        module: The module to follow.
        decay: The weight that the old values keep.
    """
    # Both leave out a tensor that they have given under another name.
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    new = parameters | buffers
    own = dict(averaged.named_parameters()) | dict(averaged.named_buffers())
    means = [
        name
        for name, value in new.items()
        if (value.is_floating_point() or value.is_complex())
        and (name in parameters or name.endswith(MOMENTS))
    ]
    torch._foreach_lerp_([own[name] for name in means], [new[name] for name in means], 1 - decay)
    for name in new.keys() - set(means):
        own[name].copy_(new[name])
    for follower, leader in zip(averaged.modules(), module.modules(), strict=True):
        if type(leader).get_extra_state is not nn.Module.get_extra_state:
            follower.set_extra_state(copy.deepcopy(leader.get_extra_state()))


def settled_precision(amp: str, device: torch.device) -> str:
    r"""Returns the precision that an option means on a device; empty if steps are to be timed.

    Arguments:
        amp: `training.amp`: `"none"`, `"bf16"`, `"fp16"`, or `"auto"`, which takes what a CUDA device
            has, and leaves a CPU with instructions for bf16 the choice.
        device: The device.
    """
    if amp != "auto":
        return amp
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "" if device.type == "cpu" and _has_bf16_instructions() else "none"


def faster_precision(step: Callable[[str], object]) -> str:
    r"""Returns `bf16` if steps in it take a tenth less time than in single precision, or `none`.

    The two are timed in turn, after one step each that does not count, and compared by the fastest
    of each: whatever else the machine does can only delay a step.

    Arguments:
        step: Takes a training step in a precision, `"none"` or `"bf16"`.
    """
    seconds: dict[str, list[float]] = {"none": [], "bf16": []}
    began = perf_counter()
    while len(seconds["bf16"]) < 2 or (
        len(seconds["bf16"]) <= TRIALS and perf_counter() - began < TRIAL_SECONDS
    ):
        for precision, taken in seconds.items():
            started = perf_counter()
            step(precision)
            taken.append(perf_counter() - started)
    full, half = (min(taken[1:]) for taken in seconds.values())
    return "bf16" if GAIN * half <= full else "none"


def _has_bf16_instructions() -> bool:
    # Not in PyTorch's public interface, and in none of its oldest versions that are supported.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)
