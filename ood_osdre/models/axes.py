r"""Which axes of a layer's output are its batch and its features: measured, never assumed.

Layers return vectors :math:`(B, F)`, maps with their channels first or last, :math:`(B, F, H, W)`
or :math:`(B, H, W, F)`, tokens :math:`(B, N, F)`, sequences :math:`(N, B, F)`. No tensor says which
of them it is, and a mean over the wrong axes is a number, too. Vectors with a row for each input
are taken as they are, unless there are as many features as inputs: their transpose looks the same.
For anything else the network runs on blank inputs, once for each layer and
shape of inputs: on 2 of them, on 3, and, of images, on 2 of twice the side.

1. The batch is the axis of length 2, then 3.
2. What changes with the side are cells or tokens; an axis of length 1 beside longer ones is none.
3. If one axis is left, it holds the features. If several are, as where a network takes no other
   side, it is the one that is as long as the last layer with weights is wide, among those that ran
   before the output was there: the channels of a convolution or a normalisation, the outputs of an
   affine map.

Features are means over all axes but these two. What cannot be told apart is refused. A tuple, a
list or a mapping stands for the tensors in it, side by side in their order.
"""

__all__ = ["FAILURES", "Axes", "Call", "Known", "Take", "read_outputs"]

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UserError

# What modules, timm's among them, raise for inputs of another type, shape or dtype.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError)
# Where modules say how wide they are; else the length of their own vectors does, as gains have it.
WIDTHS = ("out_features", "out_channels", "embed_dim")

#: Is given an output, with its name, while it still is what the layer returned.
Take: TypeAlias = Callable[[str, object], None]
#: Runs a network on inputs, has its outputs taken, and returns its result.
Call: TypeAlias = Callable[[Tensor, Take], Any]
Shape: TypeAlias = tuple[int, ...]


class Axes(NamedTuple):
    r"""The batch axis and the feature axis of a tensor; the latter None where nothing tells both."""

    batch: int = 0
    features: int | None = None

    @classmethod
    def of(cls, two: Shape, three: Shape | None, wide: Shape | None, width: int | None) -> "Axes":
        r"""Returns the axes of a tensor.

        Arguments:
            two: Its shape for two inputs.
            three: That for three inputs, None if there was no such tensor.
            wide: That for two inputs of twice the side, likewise.
            width: The width of the last layer with weights.
        """
        if three is None or len(three) != len(two):
            return cls()
        changed = [a for a, pair in enumerate(zip(two, three, strict=True)) if pair[0] != pair[1]]
        if len(changed) != 1 or (two[changed[0]], three[changed[0]]) != (2, 3):
            return cls()
        rest = [a for a in range(len(two)) if a != changed[0]]
        left = rest
        if wide is not None and len(wide) == len(two):
            left = [a for a in rest if wide[a] == two[a]]
        left = [a for a in left if two[a] > 1] or left[:1]
        if len(left) != 1:
            left = [a for a in left or rest if two[a] == width]
        if len(rest) == 1:
            left = rest
        return cls(changed[0], left[0] if len(left) == 1 else None)


#: What was measured, by the name of the output and the shape of an input.
Known: TypeAlias = dict[tuple[str, Shape], list[Axes]]
KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()


def read_outputs(
    net: nn.Module,
    call: Call,
    x: Tensor,
    names: Sequence[str],
    what: str,
    known: Known | None = None,
) -> tuple[Tensor, Any]:
    r"""Runs a network and returns the features in some of its outputs.

    Arguments:
        net: The network.
        call: Runs it, in evaluation mode.
        x: Its inputs, with shape :math:`(B, *)`.
        names: The names of the outputs.
        what: What to call the network in errors.
        known: Where to keep what was measured; None to keep it for as long as the network lives.

    Returns:
        The features side by side, in the order of names, at least in single precision, with shape
        :math:`(B, F)`, and what `call` returned.

    Raises:
        UserError: If an output is not there once, or has no row for each input or no features.
    """
    known = KNOWN.setdefault(net, {}) if known is None else known
    shape = tuple(x.shape[1:])
    rows: dict[str, Tensor] = {}

    def take(name: str, output: object) -> None:
        tensors, count, axes = list(_tensors_in(output)), x.shape[0], known.get((name, shape))
        if axes is None and not all(_is_plain(t, count) and t.shape[1] != count for t in tensors):
            raise _UnmeasuredError
        parts = [_rows(t, count, a) for t, a in zip_longest(tensors, axes or [])]
        if name in rows or not parts or any(part is None for part in parts):
            found = " and ".join(str(tuple(t.shape)) for t in tensors) or "no tensor"
            again = " again" if name in rows else ""
            raise UserError(
                f"{what}: {name}: got {found}{again} for {count} inputs, expected once tensors "
                "with a row for each input and one axis of features."
            )
        # A copy even of one, before an activation behind the layer writes in place.
        rows[name] = torch.cat([part for part in parts if part is not None], dim=1)

    try:
        result = call(x, take)
    except _UnmeasuredError:
        rows.clear()
        known.update({(n, shape): axes for n, axes in _measured(net, call, x).items()})
        result = call(x, take)
    if absent := [name for name in names if name not in rows]:
        raise UserError(f"{what}: {absent[0]}: took no part for {len(x)} inputs.")
    return torch.cat([rows[name] for name in names], dim=1), result


class _UnmeasuredError(Exception):
    r"""An output is no plain vectors, and its axes are not known yet."""


def _rows(x: Tensor | None, count: int, axes: Axes | None) -> Tensor | None:
    r"""Returns the features in a tensor, with shape :math:`(B, F)`; None without."""
    if x is None:
        return None
    if axes is None and _is_plain(x, count):
        rows = x
    elif axes is None or axes.features is None or x.shape[axes.batch] != count:
        return None
    else:
        others = [a for a in range(x.ndim) if a not in axes]
        rows = x.mean(dim=others) if others else x
        rows = rows if axes.batch < axes.features else rows.T
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _is_plain(x: Tensor, count: int) -> bool:
    return x.ndim == 2 and x.shape[0] == count


def _tensors_in(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors_in(part)


@torch.no_grad()
def _measured(net: nn.Module, call: Call, x: Tensor) -> dict[str, list[Axes]]:
    r"""Measures the axes of the tensors in each output."""
    ones = [1] * (x.ndim - 1)
    blank = torch.zeros_like(x[:1])
    two, three, wide = _Trial(), _Trial(), _Trial()
    two.run(net, call, blank.repeat(2, *ones))
    three.run(net, call, blank.repeat(3, *ones))
    if x.ndim > 3:
        # Many a network takes no other side; what it returned until then counts, too.
        with contextlib.suppress(*FAILURES):
            wide.run(net, call, blank.repeat(2, 1, *(2 for _ in ones[1:])))
    return {
        name: [
            Axes.of(shape, three.shape(name, i), wide.shape(name, i), two.widths[name])
            for i, shape in enumerate(shapes)
        ]
        for name, shapes in two.shapes.items()
    }


class _Trial:
    r"""The shapes of the tensors in each output of a run, and how wide the last layer was."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[Shape]] = {}
        self.widths: dict[str, int | None] = {}
        self._width: int | None = None

    def run(self, net: nn.Module, call: Call, x: Tensor) -> None:
        layers = [m for m in net.modules() if next(m.parameters(recurse=False), None) is not None]
        # Before the hooks of `call`, which are to find the width of their own layer.
        handles = [layer.register_forward_hook(self._see) for layer in layers]
        try:
            call(x, self._take)
        finally:
            for handle in handles:
                handle.remove()

    def shape(self, name: str, index: int) -> Shape | None:
        shapes = self.shapes.get(name, [])
        return shapes[index] if index < len(shapes) else None

    def _take(self, name: str, output: object) -> None:
        self.shapes[name] = [tuple(t.shape) for t in _tensors_in(output)]
        self.widths[name] = self._width

    def _see(self, module: nn.Module, args: object, output: object) -> None:
        widths = [w for w in (getattr(module, n, None) for n in WIDTHS) if isinstance(w, int)]
        widths += [len(p) for p in module.parameters(recurse=False) if p.ndim == 1]
        self._width = widths[0] if widths else self._width
