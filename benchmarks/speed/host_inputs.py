r"""What OpenOOD's loop and a plain DataLoader take: files one by one, a network with logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from ood_osdre.data.status import SetStatus
from ood_osdre.models.ratio import RatioModel


class Files(Dataset[Tensor]):
    r"""The images of a set, decoded and normalised one by one."""

    def __init__(self, status: SetStatus, transform: Callable[[Image.Image], Tensor]) -> None:
        assert status.list is not None
        self.paths = [status.images / name for name in status.list.names]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


class Logits(nn.Module):
    r"""The folded ratio as a host sees it: a network with logits."""

    def __init__(self, ratio: RatioModel) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the logits, with shape :math:`(B, C)`."""
        logits = self.ratio.predict(x).logits
        assert logits is not None
        return logits


@contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    r"""Makes a tensor's `.cuda()` do nothing on a device that is none."""
    if device.type == "cuda":
        yield
        return
    with mock.patch.object(Tensor, "cuda", lambda x: x):
        yield
