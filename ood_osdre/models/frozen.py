r"""Features of a frozen network that somebody else trained.

A network offers features in one of three ways, tried in this order:

1. *layers* named by the caller: what they return, read in one pass by forward hooks, side by side;
2. `net(x, return_feature=True)`, which returns logits and features, the convention of OpenOOD;
3. `net.forward_features(x)` and `net.forward_head(·, pre_logits=True)`, the convention of timm.

A network that offers none of them is refused; no layer is guessed. Maps are averaged over their
cells, tokens over their number; :mod:`ood_osdre.models.axes` finds which axes these are.

While a network is evaluated, all of its modules are in evaluation mode. Afterwards each is in its
own mode again. One layer of dropout or batch normalisation left in training mode would make scores
depend on chance and on their batch, and would change the network.
"""

__all__ = [
    "Features",
    "collect_features",
    "device_of",
    "evaluating",
    "explained",
    "extract_features",
    "input_batches",
    "named_layers",
    "read_layers",
]

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..data.inputs import IMAGE_KEYS, split_item
from ..errors import UserError, one_line
from .axes import FAILURES, Call, Known, Take, read_outputs
from .copies import unwrapped

# What errors call the features that networks offer themselves.
OPENOOD, TIMM = "forward(x, return_feature=True)", "forward_head(x, pre_logits=True)"


class Features(NamedTuple):
    r"""The outputs of a network for a batch.

    Attributes:
        features: The features, at least in single precision, with shape :math:`(B, F)`.
        logits: The class logits, with shape :math:`(B, C)`; None without a class head.
    """

    features: Tensor
    logits: Tensor | None = None


@torch.no_grad()
def extract_features(net: nn.Module, x: Tensor, layers: Sequence[str] = ()) -> Features:
    r"""Evaluates a network, once and in evaluation mode.

    Arguments:
        net: The network.
        x: Its inputs, with shape :math:`(B, *)`.
        layers: The names of some of its modules, as in `net.named_modules()`, whose features stand
            side by side; none for the ways that the network offers itself.

    Returns:
        The features and, if the network has classes, the logits.

    Raises:
        UserError: If the network offers no features or no such layer, fails on the inputs, or
            stays in training mode.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> h = extract_features(net, torch.zeros(5, 2), layers=["1"])
        >>> h.features.shape, h.logits.shape
        (torch.Size([5, 8]), torch.Size([5, 3]))
    """
    with evaluating(net):
        # A wrapper's forward takes anything; only the network itself says what it takes.
        bare = unwrapped(net)
        name = type(bare).__name__
        if layers:
            modules = named_layers(bare, layers)
            with explained(bare, x):
                read, result = read_layers(net, modules, x)
            is_logits = isinstance(result, Tensor) and result.ndim == 2
            return Features(read, result if is_logits else None)
        if _takes(bare.forward, "return_feature"):
            with explained(bare, x):
                features, logits = read_outputs(bare, _by_return_feature(net), x, [OPENOOD], name)
            return Features(features, logits if isinstance(logits, Tensor) else None)
        if _is_timm(bare):
            return _by_timm(bare, x)
    raise UserError(
        f"{type(bare).__name__}: offers no features, expected forward(x, return_feature=True), timm's "
        f"forward_features and forward_head, or a layer by name (its last are: {_last_layers(bare)})."
    )


def named_layers(net: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    r"""Returns modules of a network by name.

    Arguments:
        net: The network.
        layers: Names as in `net.named_modules()`.

    Raises:
        UserError: If it has no module of a name.
    """
    # A part that was compiled holds the module that it was given under a name of its own.
    modules = {
        name.replace("_orig_mod.", "").removesuffix("._orig_mod"): module
        for name, module in net.named_modules()
    }
    for layer in layers:
        if not layer or layer not in modules:
            expected = f"a module of it (its last are: {_last_layers(net)})"
            raise UserError(f"{type(net).__name__}: has no layer {layer!r}, expected {expected}.")
    return {layer: modules[layer] for layer in layers}


def read_layers(
    net: nn.Module, modules: Mapping[str, nn.Module], x: Tensor, known: Known | None = None
) -> tuple[Tensor, Any]:
    r"""Evaluates a network, once, and returns the features of some of its layers, and its output.

    Arguments:
        net: The network.
        modules: The layers by name, modules of it.
        x: Its inputs, with shape :math:`(B, *)`.
        known: Where to keep the axes of the layers, as for :func:`~.axes.read_outputs`.

    Returns:
        The pooled features of all layers side by side, at least in single precision, with shape
        :math:`(B, F)`, and whatever the network returned.

    Raises:
        UserError: If a layer returns no features, or takes part more than once or never.
    """
    names = {name: f"layer {name!r}" for name in modules}

    def call(x: Tensor, take: Take) -> Any:  # noqa: ANN401
        def hook(name: str) -> Callable[..., None]:
            return lambda module, args, output: take(names[name], output)

        handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
        try:
            with _eager(net):
                return net(x)
        finally:
            for handle in handles:
                handle.remove()

    bare = unwrapped(net)
    return read_outputs(bare, call, x, list(names.values()), type(bare).__name__, known)


def _by_return_feature(net: nn.Module) -> Call:
    def call(x: Tensor, take: Take) -> object:
        output = net(x, return_feature=True)
        logits, *features = output if isinstance(output, tuple) else (output,)
        take(OPENOOD, features)
        return logits

    return call


def _eager(net: nn.Module) -> AbstractContextManager[object]:
    r"""Evaluates what was compiled as it was written: compiled code knows no hooks set later."""
    parts = net.modules()
    is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in parts)
    # Not in the oldest versions of PyTorch that are supported.
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if is_compiled and stance is not None else nullcontext()


def _takes(function: Callable[..., object], name: str) -> bool:
    r"""Returns whether a function has a parameter of a name; those of TorchScript tell none."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        return False


def _last_layers(net: nn.Module) -> str:
    r"""Returns the names of the last parts of a network, to choose layers from."""
    within, prefix = net, ""
    while len(children := dict(within.named_children())) == 1:  # our backbones wrap one module
        ((name, within),) = children.items()
        prefix += f"{name}."
    return ", ".join([f"{prefix}{child}" for child in children][-4:]) or prefix.rstrip(".")


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    r"""Keeps every module of a network in evaluation mode, and then restores each one's own.

    Arguments:
        net: The network.

    Raises:
        UserError: If a module of it stays in training mode.
    """
    assert isinstance(net, nn.Module), f"net: got {type(net).__name__}, expected an nn.Module."
    modes = [(name, module, module.training) for name, module in net.named_modules()]
    was_training = net.training
    try:
        if any(mode for _, _, mode in modes):
            net.eval()
        stubborn = [name or "itself" for name, module, _ in modes if module.training]
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
        for _, module, mode in modes:
            if module.training != mode:
                module.training = mode


@contextmanager
def explained(net: nn.Module, x: Tensor) -> Iterator[None]:
    r"""Says in one line on what inputs a network fails, with its own error as the cause."""
    try:
        yield
    except UserError:
        raise
    except FAILURES as error:
        kind = str(getattr(x, "dtype", type(x))).removeprefix("torch.")
        raise UserError(
            f"{type(net).__name__}: fails on {kind} inputs of shape "
            f"{tuple(getattr(x, 'shape', ()))} ({one_line(error, 120)})."
        ) from error


def collect_features(
    net: nn.Module,
    data: Tensor | Iterable[Any],
    layers: Sequence[str] = (),
    batch_size: int = 256,
) -> Tensor:
    r"""Returns the features of all inputs, on the CPU, with shape :math:`(N, F)`.

    Arguments:
        net: The network; inputs are moved to its device.
        data: The network's inputs, with shape :math:`(N, *)`, or batches of them: tensors, tuples
            that start with them, or mappings with one of :data:`~ood_osdre.data.inputs.IMAGE_KEYS`.
        layers: As for :func:`extract_features`, whose errors this raises, too.
        batch_size: The number of inputs evaluated at once, if they come in one tensor.
    """
    device = device_of(net)
    parts = [
        extract_features(net, x.to(device), layers).features.cpu()
        for x in input_batches(data, batch_size)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def input_batches(data: Tensor | Iterable[Any], batch_size: int = 256) -> Iterator[Tensor]:
    r"""Yields the inputs of a tensor or a data loader, batch by batch, without labels.

    Arguments:
        data: As for :func:`collect_features`.
        batch_size: The size of batches, if the data come in one tensor.

    Raises:
        UserError: If a batch holds no tensor of inputs.
    """
    if isinstance(data, Tensor):
        yield from data.split(batch_size)
        return
    for batch in data:
        x, _ = split_item(batch, "inputs: a batch")
        if not isinstance(x, Tensor):
            raise UserError(
                f"inputs: got a batch of {type(batch).__name__}, expected a tensor, a tuple that "
                f"starts with one, or a mapping with a key {' or '.join(IMAGE_KEYS)}."
            )
        yield x


def device_of(net: nn.Module) -> torch.device:
    r"""Returns the device of a network, that of its first parameter or buffer; else the CPU."""
    assert isinstance(net, nn.Module), f"net: got {type(net).__name__}, expected an nn.Module."
    for tensor in (*net.parameters(), *net.buffers()):
        return tensor.device
    return torch.device("cpu")


def _is_timm(net: nn.Module) -> bool:
    trunk, head = getattr(net, "forward_features", None), getattr(net, "forward_head", None)
    return callable(trunk) and callable(head) and _takes(head, "pre_logits")


def _by_timm(net: nn.Module, x: Tensor) -> Features:
    # To a type checker, an attribute of a module is a tensor or a module.
    trunk = cast(Callable[..., Tensor], net.forward_features)
    head = cast(Callable[..., Tensor], net.forward_head)

    def call(x: Tensor, take: Take) -> Tensor:
        hidden = trunk(x)
        take(TIMM, head(hidden, pre_logits=True))
        return hidden

    with explained(net, x):
        features, hidden = read_outputs(net, call, x, [TIMM], type(net).__name__)
        # timm builds networks without classes, too.
        logits = head(hidden) if getattr(net, "num_classes", 0) else None
    return Features(features, logits)
