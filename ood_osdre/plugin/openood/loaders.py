r"""What OpenOOD's loaders can tell: which images to take, and how they were preprocessed.

Its loaders come in two styles. The evaluator gives every split one and the same test transform.
The older pipelines augment `data` of the ID training split and keep the test transform for
`data_aux`. Statistics are wanted of images as they will be at test time, so the key is chosen by
comparing the transforms of the training and the test split.
"""

__all__ = ["ReferenceImages", "View", "images_of", "normalisation_of", "view_of"]

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...data.images import DAMAGE
from ...data.lists import list_folder, read_list
from ...errors import UserError, one_line
from .host import Foreign

#: Where data sets of OpenOOD, and of torchvision, keep their transform.
TRANSFORMS = ("transform_image", "preprocessor", "transform")
AUGMENTED, PLAIN = "data", "data_aux"


class View(NamedTuple):
    r"""How to look at a loader's images as they are at test time.

    Attributes:
        key: The key of a batch.
        transform: The transform behind it, from Pillow images to tensors; None if it is unknown.
    """

    key: str
    transform: Foreign


def view_of(id_loaders: Mapping[str, Any], split: str) -> View:
    r"""Chooses the key of a batch, and names the transform behind it.

    Arguments:
        id_loaders: OpenOOD's ID loaders by split.
        split: The split to look at.

    Raises:
        UserError: If there is no such split.
    """
    if split not in id_loaders:
        raise UserError(f"id_split: no {split!r} among the ID loaders {', '.join(id_loaders)}.")
    data = getattr(id_loaders[split], "dataset", None)
    own = _transform(data)
    others = [getattr(id_loaders[k], "dataset", None) for k in ("test", "val") if k in id_loaders]
    plain = getattr(data, "transform_aux_image", None)
    # One object serves all splits of an evaluator; a pipeline builds one a split.
    if plain is not None and others and all(_transform(other) is not own for other in others):
        return View(PLAIN, plain)
    return View(AUGMENTED, own)


def images_of(loader: Iterable[Mapping[str, Any]], key: str) -> Iterator[Tensor]:
    r"""Yields the images under a key of a loader's batches."""
    for batch in loader:
        if not isinstance(batch, Mapping):
            raise UserError(
                f"loader: a batch is a {type(batch).__name__}, expected a mapping with {key!r}."
            )
        if key not in batch:
            raise UserError(f"loader: a batch has no {key!r}, only {', '.join(map(str, batch))}.")
        yield batch[key]


def normalisation_of(transform: object) -> tuple[list[float], list[float]] | None:
    r"""Finds the last normalisation within a transform.

    Arguments:
        transform: A transform, or nested compositions of transforms.

    Returns:
        The mean and the standard deviation of each channel; None if there is none.
    """
    mean, std = (getattr(transform, name, None) for name in ("mean", "std"))
    if mean is not None and std is not None:
        return [float(m) for m in mean], [float(s) for s in std]
    inner = getattr(transform, "transforms", None) or [getattr(transform, "transform", None)]
    found = [normalisation_of(t) for t in inner if t is not None]
    return next((f for f in reversed(found) if f is not None), None)


class ReferenceImages(Dataset):
    r"""The images of a folder or a list file, through the host's own transform.

    Arguments:
        path: A folder of images, or a list file, `relative/path.png LABEL` a line.
        root: The folder that a list's paths are relative to; None for the list's own.
        transform: From Pillow images to tensors.
    """

    def __init__(self, path: Path, root: Path | None, transform: Foreign) -> None:
        if path.is_dir():
            names, folder = list_folder(path).names, path
        elif path.is_file():
            names, folder = read_list(path).names, root or path.parent
        else:
            raise UserError(f"reference: {path}: no such folder or list file.")
        self.paths = [folder / name for name in names]
        absent = [p for p in self.paths if not p.is_file()]
        if absent or not self.paths:
            what = f"{len(absent)} of {len(self.paths)} images are missing, {absent[0]} for one"
            raise UserError(f"reference: {path}: {what if absent else 'no images'}.")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        try:
            with Image.open(self.paths[index]) as image:
                rgb = image.convert("RGB")
        except DAMAGE as error:
            reason = one_line(error)
            raise UserError(f"reference: {self.paths[index]}: not readable ({reason}).") from None
        return self.transform(rgb)

    def loader(self, like: object) -> DataLoader:
        r"""Returns a loader with the batch size and the workers of another."""
        return DataLoader(
            self,
            batch_size=getattr(like, "batch_size", None) or 200,
            num_workers=getattr(like, "num_workers", 0),
        )


def _transform(data: object) -> Foreign:
    found = (getattr(data, name, None) for name in TRANSFORMS)
    return next((t for t in found if t is not None), None)
