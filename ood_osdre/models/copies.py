r"""Copies of networks as users have them: compiled, wrapped, with weights computed or tied."""

__all__ = ["copied", "own_copy", "unwrapped"]

import copy
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..errors import UserError, one_line

Network = TypeVar("Network", bound=nn.Module)


class _Detaching(TorchFunctionMode):
    r"""Lets tensors be copied that were computed with gradients, without their graph."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def copied(network: Network) -> Network:
    r"""Returns a copy of a network, of which nothing is shared and what was tied stays tied.

    A plain `copy.deepcopy` refuses modules that keep a tensor computed in their forward: the weight
    that `nn.utils.weight_norm` and `nn.utils.spectral_norm` compute anew in every pass, or the
    activations of the last one. Of these the copy has the values alone.

    Arguments:
        network: The network.

    Raises:
        UserError: If something in it cannot be copied, such as a lock or an open file.
    """
    try:
        # With gradients, the parameters of TorchScript's copies would be results of a computation.
        with _Detaching(), torch.no_grad():
            twin = copy.deepcopy(network)
    except (TypeError, RuntimeError, pickle.PickleError) as error:
        name = type(unwrapped(network)).__name__
        raise UserError(
            f"{name}: cannot be copied ({one_line(error)}), expected what copy.deepcopy takes."
        ) from error
    for parameter, own in zip(network.parameters(), twin.parameters(), strict=True):
        if not is_lazy(own):  # has no values before the first forward, and wants gradients
            own.requires_grad_(parameter.requires_grad)
    return twin


def unwrapped(net: nn.Module) -> nn.Module:
    r"""Returns the network inside PyTorch's wrappers for several devices and for compilation."""
    parallel = nn.DataParallel | nn.parallel.DistributedDataParallel
    inner = net.module if isinstance(net, parallel) else getattr(net, "_orig_mod", net)
    return net if inner is net else unwrapped(inner)


def own_copy(net: nn.Module) -> nn.Module:
    r"""Returns a copy of a network without its wrappers, in the default type of floating point."""
    twin = copied(unwrapped(net))
    return twin.double() if torch.get_default_dtype() == torch.float64 else twin.float()
