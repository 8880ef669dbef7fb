r"""Features of many images on disk: computed once, read by the next head, never all in memory.

Features are kept beside decoded images, in shards of a few thousand rows, each written whole or not
at all, with a checksum, and mapped into memory when read. A folder `features-KEY` is named after all
that they depend on: the version of the program, the digest of the network, its layers, the
preprocessing, the images and their order, and for a reference what broadens it. A run that was stopped goes on with the first
shard that is missing; a second head on the same network trains at once. Of the folders that a run
does not use, those used last are kept up to :data:`KEPT` bytes, and the others removed unless another
run may be at work on them (:data:`RECENT`); all of them may be deleted at any time.

:class:`Stored` stands for a tensor of features where one would be too large: it has a length and a
shape, comes in pieces, and gives the rows that are asked for.
"""

__all__ = ["KEPT", "FeatureFolder", "Stored", "Whitened", "make_room", "remove_features"]

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..data.images import load, save
from ..errors import UserError
from ..files import map_array, sweep
from ..models import Whitening

#: The most bytes of features that are kept in a folder, beside those in use.
KEPT = 8 * 2**30
#: The seconds after their last use for which features are kept, however many. A run uses all of its
#: features whenever it has computed a shard, and until its head is trained it should not need longer.
RECENT = 21_600.0
PREFIX = "features-"

log = logging.getLogger(__name__)


class Stored:
    r"""Vectors that stand one after the other in several tensors, some of them mapped from files.

    Arguments:
        parts: The tensors, each with shape :math:`(n, F)`, at least one.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.ends = torch.as_tensor(np.cumsum([len(part) for part in parts]))
        self.shape = torch.Size((int(self.ends[-1]), parts[0].shape[1]))
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        rows = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows.cpu()
        found = torch.empty(len(rows), self.shape[1], dtype=self.dtype)
        which = torch.searchsorted(self.ends, rows.contiguous(), right=True)
        for i in which.unique().tolist():
            mine, part = which == i, self.parts[i]
            found[mine] = part[rows[mine] - (self.ends[i] - len(part))]
        return found

    def split(self, count: int) -> Iterator[Tensor]:
        r"""Yields all vectors in order, in pieces of at most so many."""
        for part in self.parts:
            yield from part.split(count)


class Whitened:
    r"""The whitened components of some of many features, computed when they are asked for.

    Arguments:
        features: The features.
        whitening: The map from features to components.
        rows: Which of them, with shape :math:`(N)`.
        device: Where the components are wanted, that of the whitening.
    """

    def __init__(
        self, features: Stored, whitening: Whitening, rows: Tensor, device: torch.device | str
    ) -> None:
        self.features, self.whitening, self.rows = features, whitening, rows
        self.device = torch.device(device)
        self.shape = torch.Size((len(rows), whitening.shape[1]))

    def __len__(self) -> int:
        return len(self.rows)

    @torch.no_grad()
    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        chosen = self.rows[rows if isinstance(rows, slice) else rows.cpu()]
        return self.whitening(self.features[chosen].to(self.device))


class FeatureFolder:
    r"""The shards of one set of features.

    Arguments:
        homes: The folders in which they may be kept: the first that can be written to is taken;
            none keeps what is computed in memory.
        key: All that the features depend on, part by part.
        count: The number of vectors.
        size: The number of them in a shard; the last may have fewer.
    """

    def __init__(
        self, homes: Sequence[Path], key: Sequence[object], count: int, size: int
    ) -> None:
        digest = hashlib.sha256()
        # Another version of the program may compute other numbers.
        for part in (__version__, *key):
            text = repr(part).encode()
            digest.update(b"%d:" % len(text) + text)
        self.folders = [home / f"{PREFIX}{digest.hexdigest()[:20]}" for home in homes]
        self.writable = list(self.folders)
        self.rows = [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def read(self, index: int) -> Tensor | None:
        r"""Maps a shard; None if it has not been kept, or is damaged, which is said in a line.

        Its checksum is looked at: a head looks at every number anyway, to whiten them.
        """
        count = self.rows[index].stop - self.rows[index].start
        for path in self._paths(index, self.folders):
            width: tuple[int, ...] = ()
            with contextlib.suppress(UserError):  # what it is, `load` says
                width = map_array(path).shape[1:]
            if (array := load(path, (count, *width), np.float32, whole=True)) is not None:
                return torch.as_tensor(array)
        return None

    def keep(self, index: int, features: Tensor) -> None:
        r"""Writes a shard; where that cannot be, this and the next ones are kept elsewhere."""
        for path in self._paths(index, self.writable):
            try:
                save(path, features.numpy())
                return
            except UserError as error:
                log.warning("features are not kept: %s", error)
                self.writable.remove(path.parent)

    def mark(self) -> None:
        r"""Marks the features as used now."""
        for folder in self.folders:
            with contextlib.suppress(OSError):  # absent, or read-only
                os.utime(folder)

    def _paths(self, index: int, folders: Sequence[Path]) -> list[Path]:
        return [folder / f"{index:05d}.npy" for folder in folders]


def remove_features(home: Path) -> None:
    r"""Removes all features that are kept in a folder."""
    for folder in home.glob(f"{PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def make_room(used: Sequence[FeatureFolder]) -> None:
    r"""Marks the features of a run as used, and removes those that were used long ago.

    Those of the run itself stay, however many they are, and those that another may be using.
    """
    mine = {folder for features in used for folder in features.folders if folder.is_dir()}
    for features in used:
        features.mark()
    for folder in mine:
        sweep(folder)
    for home in {folder.parent for folder in mine}:
        with contextlib.suppress(OSError):  # another process was faster
            others = set(home.glob(f"{PREFIX}*")) - mine
            total = 0
            for folder in sorted(others, key=lambda f: f.stat().st_mtime, reverse=True):
                total += sum(file.stat().st_size for file in folder.iterdir())
                if total > KEPT and time.time() - folder.stat().st_mtime > RECENT:
                    shutil.rmtree(folder, ignore_errors=True)
