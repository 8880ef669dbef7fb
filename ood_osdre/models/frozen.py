r"""Features of a frozen network that somebody else trained, in one pass of it.

A network offers features in one of three ways, tried in this order:

1. a *layer* of it, named by the caller: what that layer returns, read by a forward hook;
2. `net(x, return_feature=True)`, which returns logits and features, the convention of OpenOOD;
3. `net.forward_features(x)` and `net.forward_head(·, pre_logits=True)`, the convention of timm.

Every module of the network is in evaluation mode meanwhile, and afterwards in the mode that it was
in: one layer of dropout or batch normalisation left in training mode would make scores depend on
chance and on their batch, and change the network.

Feature maps :math:`(B, F, H, W)` are averaged over their cells and tokens :math:`(B, N, F)` over
:math:`N`. A network that offers none of this is refused. Guessing a layer would give scores of
something that nobody asked for.

Which network is it: a head trained on one network's features belongs to no other.

Another network of as many features gives numbers, too, and so does the same one trained further.
A network is therefore known by a digest of the types of its modules and of the names, types,
shapes and values of its state. The device, wrappers for several devices and compilation do not
count; another precision does.
"""

__all__ = [
    "Features",
    "KnownNetwork",
    "collect_features",
    "device_of",
    "evaluating",
    "explained",
    "extract_features",
    "input_batches",
    "unwrapped",
]

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..data.inputs import IMAGE_KEYS, split_item
from ..errors import UserError, one_line

#: The two halves of a network of timm's.
TIMM = ("features", "head")


class Features(NamedTuple):
    r"""What a network says about a batch.

    Attributes:
        features: The features, at least in single precision, with shape :math:`(B, F)`.
        logits: The class logits, with shape :math:`(B, C)`; None without a class head.
    """

    features: Tensor
    logits: Tensor | None = None


@torch.no_grad()
def extract_features(net: nn.Module, x: Tensor, layer: str | None = None) -> Features:
    r"""Evaluates a network, once and in evaluation mode (:func:`evaluating`).

    Arguments:
        net: The network.
        x: Its inputs, with shape :math:`(B, *)`.
        layer: The name of a module of it, as in `net.named_modules()`; None for the ways that
            the network offers itself.

    Returns:
        The features and, if the network has classes, the logits.

    Raises:
        TypeError: If it is no module, or its inputs are no tensor.
        UserError: If the network offers no features or no such layer, fails on the inputs, or
            stays in training mode.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> h = extract_features(net, torch.zeros(5, 2), layer="1")
        >>> h.features.shape, h.logits.shape
        (torch.Size([5, 8]), torch.Size([5, 3]))
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"'x' should be a tensor, got {type(x).__name__}.")
    with evaluating(net):
        # A wrapper's forward takes anything; what the network takes, only itself can say.
        bare = unwrapped(net)
        if layer is not None:
            return _hooked(net, bare, x, layer)
        if "return_feature" in inspect.signature(bare.forward).parameters:
            with explained(bare, x):
                output = net(x, return_feature=True)
            return _returned(output, bare)
        if _is_timm(bare):
            with explained(bare, x):
                return _timm(bare, x)
    raise UserError(
        f"{type(bare).__name__}: offers no features, expected forward(x, return_feature=True), "
        f"timm's forward_features and forward_head, or a layer by name{_examples(bare)}."
    )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    r"""Keeps every module of a network in evaluation mode, and then restores each one's own.

    Arguments:
        net: The network.

    Raises:
        TypeError: If it is no module.
        UserError: If a module of it stays in training mode.
    """
    _require_module(net)
    modes = [(module, module.training) for module in net.modules()]
    was_training = net.training
    try:
        if any(mode for _, mode in modes):
            net.eval()
        stubborn = [name or "itself" for name, module in net.named_modules() if module.training]
        if stubborn:
            raise UserError(
                f"{type(unwrapped(net)).__name__}: eval() leaves {len(stubborn)} of {len(modes)} "
                f"modules in training mode ({stubborn[0]} for one), so scores would depend on "
                "their batch or on chance."
            )
        yield
    finally:
        if was_training:
            net.train()  # a module may do more than to change its mode
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


def collect_features(
    net: nn.Module, data: Tensor | Iterable[Any], layer: str | None = None, batch_size: int = 256
) -> Tensor:
    r"""Returns the features of all inputs, on the CPU, with shape :math:`(N, F)`.

    Arguments:
        net: The network; inputs are moved to its device.
        data: The network's inputs, with shape :math:`(N, *)`, or batches of them: tensors, tuples
            that start with them, or mappings with a key `data` or `image`.
        layer: The name of a module of it; None for the ways that the network offers itself.
        batch_size: The number of inputs evaluated at once, if they come in one tensor.

    Raises:
        UserError: If there are no inputs, or as :func:`extract_features`.
    """
    device = device_of(net)
    parts = [
        extract_features(net, x.to(device), layer).features.cpu()
        for x in input_batches(data, batch_size)
    ]
    if not parts:
        raise UserError("features: no inputs, expected at least one batch.")
    return torch.cat(parts)


def input_batches(data: Tensor | Iterable[Any], batch_size: int = 256) -> Iterator[Tensor]:
    r"""Yields the inputs of a tensor or a data loader, batch by batch, without labels.

    Arguments:
        data: As for :func:`collect_features`.
        batch_size: The size of batches, if the data come in one tensor.
    """
    if isinstance(data, Tensor):
        yield from data.split(batch_size)
        return
    for batch in data:
        x, _ = split_item(batch)
        if not isinstance(x, Tensor):
            raise UserError(
                f"inputs: got a batch of {type(batch).__name__}, expected a tensor, a tuple that "
                f"starts with one, or a mapping with a key {' or '.join(IMAGE_KEYS)}."
            )
        yield x


def unwrapped(net: nn.Module) -> nn.Module:
    r"""Returns the network inside PyTorch's wrappers for several devices."""
    parallel = nn.DataParallel | nn.parallel.DistributedDataParallel
    return net.module if isinstance(net, parallel) else net


def device_of(net: nn.Module) -> torch.device:
    r"""Returns the device of a network, that of its first parameter or buffer; else the CPU."""
    _require_module(net)
    for tensor in (*net.parameters(), *net.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def explained(net: nn.Module, x: Tensor) -> Iterator[None]:
    r"""Says in one line on what inputs a network fails, with its own error as the cause."""
    try:
        yield
    except UserError:
        raise
    # What modules, timm's among them, raise for inputs of another shape or dtype.
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = one_line(error, 120)
        raise UserError(
            f"{type(net).__name__}: fails on {str(x.dtype).removeprefix('torch.')} inputs of shape "
            f"{tuple(x.shape)} ({reason})."
        ) from error


def _require_module(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"'net' should be a torch.nn.Module, got {type(net).__name__}.")


def _returned(output: object, net: nn.Module) -> Features:
    if isinstance(output, tuple) and len(output) == 2:
        logits, features = output
        if isinstance(logits, Tensor) and isinstance(features, Tensor):
            return Features(_flat(features, type(net).__name__), logits)
    raise UserError(
        f"{type(net).__name__}: with return_feature=True it returns {type(output).__name__}, "
        "expected the logits and the features."
    )


def _is_timm(net: nn.Module) -> bool:
    trunk, head = (getattr(net, f"forward_{k}", None) for k in TIMM)
    return (
        callable(trunk) and callable(head) and "pre_logits" in inspect.signature(head).parameters
    )


def _timm(net: nn.Module, x: Tensor) -> Features:
    # To a type checker, an attribute of a module is a tensor or a module.
    trunk, head = (cast(Callable[..., Tensor], getattr(net, f"forward_{k}")) for k in TIMM)
    hidden = trunk(x)
    features = _flat(head(hidden, pre_logits=True), type(net).__name__)
    # timm builds networks without classes, too.
    return Features(features, head(hidden) if getattr(net, "num_classes", 0) else None)


def _hooked(net: nn.Module, bare: nn.Module, x: Tensor, layer: str) -> Features:
    modules: dict[str, Callable[..., Any]] = dict(bare.named_modules())
    if not layer or layer not in modules:
        raise UserError(
            f"{type(bare).__name__}: has no layer {layer!r}, expected a module by "
            f"name{_examples(bare)}."
        )
    caught: list[object] = []
    handle = bare.get_submodule(layer).register_forward_hook(lambda *args: caught.append(args[2]))
    try:
        with explained(bare, x):
            output = net(x)
    finally:
        handle.remove()
    if len(caught) != 1 or not isinstance(caught[0], Tensor):
        what = f"{len(caught)} outputs" if len(caught) != 1 else type(caught[0]).__name__
        raise UserError(
            f"{type(bare).__name__}: layer {layer!r} gave {what} in a pass, expected one tensor."
        )
    is_logits = isinstance(output, Tensor) and output.ndim == 2
    return Features(_flat(caught[0], layer), output if is_logits else None)


def _flat(features: Tensor, what: str) -> Tensor:
    if features.ndim == 4:
        features = features.mean(dim=(2, 3))
    elif features.ndim == 3:
        features = features.mean(dim=1)
    if features.ndim != 2:
        raise UserError(
            f"{what}: features of shape {tuple(features.shape)}, expected (B, F), (B, F, H, W) or "
            "(B, N, F)."
        )
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _examples(net: nn.Module) -> str:
    r"""Returns some names of layers to choose from, the last ones."""
    names = [name for name, _ in net.named_children()][-4:]
    return f", one of {', '.join(names)} for example" if names else ""


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
