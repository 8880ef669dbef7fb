r"""Which network is it: a head trained on one network's features belongs to no other.

Another network of as many features gives numbers, too, and so does the same one trained further.
A network is therefore known by a digest of the types of its modules and of the names, types,
shapes and values of its state. The device, wrappers for several devices and compilation do not
count; another precision does.
"""

__all__ = ["KnownNetwork"]

import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .extraction import unwrapped

Stamp = tuple[tuple[tuple[str, type[nn.Module]], ...], tuple[tuple[int, int], ...]]


class KnownNetwork:
    r"""A network to be recognised.

    Arguments:
        digest: Its digest, which :meth:`of` computes.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> known = KnownNetwork.of(net)
        >>> known.matches(net), known.matches(nn.Linear(2, 3))
        (True, False)
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self._last: tuple[weakref.ref[nn.Module], Stamp] | None = None

    @classmethod
    def of(cls, net: nn.Module) -> "KnownNetwork":
        r"""Returns what recognises a network as it is now."""
        known = cls(_digest(net))
        known._last = weakref.ref(net), _stamp(net)
        return known

    def matches(self, net: nn.Module) -> bool:
        r"""Returns whether a network is this one.

        A network that has been recognised is not hashed again as long as its modules are the same
        and PyTorch counts no write to its tensors: one through `.data` is not counted, nor is any
        to a tensor made in inference mode.
        """
        now = _stamp(net)
        if self._last is not None and self._last[0]() is net and self._last[1] == now:
            return True
        if _digest(net) != self.digest:
            return False
        self._last = weakref.ref(net), now
        return True

    def check(self, net: nn.Module) -> None:
        r"""Raises an error if a network is another one.

        Raises:
            UserError: If its modules or its weights differ.
        """
        if not self.matches(net):
            raise UserError(
                f"{type(unwrapped(net)).__name__}: not the network, or not the weights, that the "
                f"head was fitted to (digest {_digest(net)[:12]}, expected {self.digest[:12]}); "
                "fit a head to it."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled.
        return {"digest": self.digest, "_last": None}


def _stamp(net: nn.Module) -> Stamp:
    r"""Returns the modules, where their tensors lie and how often they have been written to."""
    modules = tuple((name, type(module)) for name, module in net.named_modules())
    tensors = tuple(
        # PyTorch does not count writes to tensors made in inference mode.
        (t.data_ptr(), 0 if t.is_inference() else t._version)
        for t in (*net.parameters(), *net.buffers())
    )
    return modules, tensors


def _digest(net: nn.Module) -> str:
    bare = unwrapped(net)
    # What torch.compile returns holds the module that it was given.
    bare = getattr(bare, "_orig_mod", bare)
    hasher = hashlib.sha256()
    for name, module in bare.named_modules():
        hasher.update(f"{name}={type(module).__name__};".encode())
    for name, tensor in bare.state_dict().items():
        if isinstance(tensor, Tensor):
            hasher.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)};".encode())
            hasher.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
