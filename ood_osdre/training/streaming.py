r"""The stored images of training steps: on the device, gathered in memory, or decoded ahead.

A set that is small enough lies on the device as one uint8 tensor. Of a larger one only the rows of a
step are fetched. Those of files are decoded by the workers of a data loader, which are given the
rows of the steps to come: which images a step has depends on its number alone, so a run that is
resumed begins anywhere and sees the batches of one that was not. Of several processes each decodes
the files that it trains on itself (:func:`own_places`).
"""

__all__ = ["StepImages", "own_places"]

import atexit
import itertools
import multiprocessing
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import image_files
from ..data.image_files import ArrayRows, ImageFiles, Pixels, array_of, cores
from ..errors import UserError, one_line
from ..sections import DataConfig
from . import distributed

#: The most bytes of decoded pixels that wait for their step, and the most processes that decode.
AHEAD, WORKERS = 192 * 2**20, 8
# The steps in a row after which it is worth while to start processes: a rehearsal takes two.
IN_A_ROW = 3

Rows: TypeAlias = NDArray[np.intp]
Fetched: TypeAlias = list[NDArray[np.uint8]]


def own_places(size: int, options: DataConfig) -> tuple[Tensor, Tensor]:
    r"""Returns the places of a batch whose ID and whose reference images this process needs.

    They are those that it trains on, and what these are made from
    (:meth:`~ood_osdre.training.batches.PixelBatches.varied`): of the reference images the last, a share
    `mixture`, are replaced by the ID image one place before, and the first, a share `broaden`, are
    broadened together, some of them by the image beside them.

    Arguments:
        size: The size :math:`B` of the batch.
        options: The shares.
    """
    own = torch.arange(size)[distributed.share(size)]
    before = (own[own >= size - round(options.mixture * size)] - 1) % size
    together = torch.arange(round(options.broaden * size))
    needed = [own, together] if (own < len(together)).any() else [own]
    return torch.cat([own, before]).unique(), torch.cat(needed).unique()


class StepImages:
    r"""The images of steps, of one or several sets.

    Arguments:
        sets: The sets.
        rows: From a step to the rows of each set that it has, each a tensor with shape :math:`(B)`.
        device: Where the images are wanted.
        places: The places in a step's batch whose images are wanted, for each set; None for all. Of a
            set that is not on the device the others are not fetched, and another image stands there.
    """

    def __init__(
        self,
        sets: Sequence[Pixels],
        rows: Callable[[int], Sequence[Tensor]],
        device: torch.device,
        places: Sequence[Tensor] | None = None,
    ) -> None:
        self.sets, self.rows, self.device = sets, rows, device
        self.places = [slice(None) for _ in sets] if places is None else places
        self.whole = [_whole(images, device) for images in sets]
        files = [
            i
            for i, images in enumerate(sets)
            if self.whole[i] is None and isinstance(images, ImageFiles)
        ]
        self.ahead = _Ahead([sets[i] for i in files], lambda step: self._rows(step, files))
        self.files = files

    def __call__(self, step: int) -> list[tuple[Tensor, Tensor]]:
        r"""Returns the images of a step.

        Returns:
            Of each set uint8 images on the device, with shape :math:`(N, H, W, 3)`, and which of
            them the step has, with shape :math:`(B)`.

        Raises:
            UserError: If a file cannot be decoded; the message names it.
        """
        decoded = dict(zip(self.files, self.ahead(step), strict=True)) if self.files else {}
        found = []
        for i, (images, rows) in enumerate(zip(self.sets, self.rows(step), strict=True)):
            if (whole := self.whole[i]) is not None:
                kept, places = whole
                found.append((kept, self.placed(rows if places is None else places[rows])))
                continue
            wanted = rows[self.places[i]].numpy()
            batch = decoded[i] if i in decoded else np.ascontiguousarray(images[wanted])
            within = torch.zeros(len(rows), dtype=torch.long)
            within[self.places[i]] = torch.arange(len(batch))
            found.append((self.placed(torch.as_tensor(batch)), self.placed(within)))
        return found

    def close(self) -> None:
        r"""Ends the processes that decode."""
        self.ahead.close()

    def placed(self, x: Tensor) -> Tensor:
        r"""Returns a tensor on the device; the copy to a GPU is not waited for."""
        if self.device.type == "cuda":
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def _rows(self, step: int, which: Sequence[int]) -> list[Rows]:
        rows = self.rows(step)
        return [rows[i][self.places[i]].numpy() for i in which]


def _whole(images: Pixels, device: torch.device) -> tuple[Tensor, Tensor | None] | None:
    r"""Returns all images on the device, and the place there of each of the set; None if too many."""
    if device.type == "cpu" and isinstance(images, np.ndarray | ArrayRows):
        # Nothing is copied, however large. What is read-only or in pieces goes on below.
        array = images.array if isinstance(images, ArrayRows) else images
        if array.flags.c_contiguous and array.flags.writeable:
            places = torch.as_tensor(images.rows) if isinstance(images, ArrayRows) else None
            return torch.as_tensor(array), places
    if images.nbytes > image_files.LIMIT:
        return None
    array = array_of(images)
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device=device), None


class _Decoded(Dataset[Any]):
    r"""The images of steps, by their rows; a mistake in a file is returned, to be one line."""

    def __init__(self, sets: Sequence[ImageFiles]) -> None:
        self.sets = sets

    def __getitem__(self, rows: Sequence[Rows]) -> Fetched | UserError:
        try:
            return [images[own] for images, own in zip(self.sets, rows, strict=True)]
        except UserError as error:
            return error


class _Ahead:
    r"""Decodes the images of steps before they are asked for, as long as these follow each other."""

    def __init__(self, sets: Sequence[Any], rows: Callable[[int], Sequence[Rows]]) -> None:
        self.sets, self.rows = sets, rows
        self.next, self.in_a_row = -1, 0
        self.coming: Iterator[Fetched | UserError] | None = None

    def __call__(self, step: int) -> Fetched:
        self.in_a_row = self.in_a_row + 1 if step == self.next else 1
        self.next = step + 1
        if self.in_a_row < IN_A_ROW or not _may_fork():
            self.coming = None
            found = _Decoded(self.sets)[self.rows(step)]
        else:
            if self.coming is None:
                self.coming = self._start(step)
            try:
                found = next(self.coming)
            except RuntimeError as error:  # such as one that the system ended for want of memory
                self.coming = None
                raise UserError(
                    f"images: a process that decodes them has died ({one_line(error, None)})."
                ) from error
        if isinstance(found, UserError):
            self.coming = None
            raise found
        return found

    def close(self) -> None:
        # Not left to the collector of cycles: it closes their queues before it tells them to end, and
        # waits ten seconds for each.
        self.coming = None

    def _start(self, step: int) -> Iterator[Any]:
        rows = self.rows(step)
        size = sum(len(r) * x.nbytes // len(x) for r, x in zip(rows, self.sets, strict=True))
        workers = max(1, min(cores(), WORKERS, AHEAD // size))
        threads = max(1, cores() // workers)
        sets = [images.pick(slice(None), threads) for images in self.sets]
        loader = DataLoader(
            _Decoded(sets),
            batch_size=None,
            sampler=map(self.rows, itertools.count(step)),
            num_workers=workers,
            prefetch_factor=max(1, min(4, AHEAD // size // workers)),
            # Arrays are sent through a pipe: shared memory is 64 MB in many a container.
            collate_fn=_as_they_are,
            # Not the global one, whose next numbers are the network's.
            generator=torch.Generator(),
            multiprocessing_context="fork",
            worker_init_fn=_leave_signals,
        )
        coming = iter(loader)
        # At the end of the program they would be waited for, and they ignore the signal to end.
        atexit.register(_end, weakref.ref(coming))
        return coming


def _end(coming: Callable[[], Any]) -> None:
    r"""Ends the processes that decode, of an iterator that may be gone."""
    if (found := coming()) is not None:
        found._shutdown_workers()


def _may_fork() -> bool:
    # A daemon may have no children, and scripts without a guard cannot be imported by any.
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def _as_they_are(found: Any) -> Any:  # noqa: ANN401
    return found


def _leave_signals(worker: int) -> None:
    # A run that is stopped takes its last step first, with what they have decoded.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
