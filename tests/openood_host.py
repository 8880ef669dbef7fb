r"""A stand-in for OpenOOD, written from its measured contract, and data roots in its layout.

:class:`HostEvaluator` does what the real evaluator was seen to do to a postprocessor, in that
order, on loaders of the form that its loaders have. It holds none of its code.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ood_osdre.config import Config
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.plugin.openood.host import Foreign
from ood_osdre.training import checkpoint as checkpoints
from ood_osdre.training.build import build_ratio

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NEAR, FAR = ("cifar100", "tin"), ("mnist", "svhn", "texture", "places365")

#: A configuration whose network is small, with a class head.
SMALL = {
    "id": "cifar10",
    "benchmark": "openood",
    "network": {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2},
    "objective": {"class_weight": 0.5},
    "training": {"ema": 0.5, "warmup": 1},
}


class HostConfig(dict):
    r"""Nested keys as attributes, None for those that are missing."""

    def __getattr__(self, key: str) -> Foreign:
        value = self.get(key)
        return HostConfig(value) if type(value) is dict else value


class Normalised:
    r"""From Pillow images to tensors, normalised; `augment` marks them as a training split's."""

    def __init__(self, augment: bool = False) -> None:
        self.augment = augment
        self.transforms = [self.tensor, Normalisation()]

    def tensor(self, image: Image.Image) -> Tensor:
        x = torch.as_tensor(np.array(image.convert("RGB").resize((32, 32)))).permute(2, 0, 1)
        x = x.float() / 255
        return torch.zeros_like(x) if self.augment else x

    def __call__(self, image: Image.Image) -> Tensor:
        x: Any = image
        for transform in self.transforms:
            x = transform(x)
        return x


class Normalisation:
    mean, std = MEAN, STD

    def __call__(self, x: Tensor) -> Tensor:
        return (x - x.new_tensor(MEAN)[:, None, None]) / x.new_tensor(STD)[:, None, None]


class HostImages(Dataset):
    r"""Images with the attributes and the batches of OpenOOD's data sets."""

    def __init__(
        self, images: np.ndarray, labels: Iterable[int], transform: Foreign, plain: Foreign = None
    ) -> None:
        self.images, self.labels = images, list(labels)
        self.transform_image, self.preprocessor = transform, transform
        self.transform_aux_image = plain or transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = Image.fromarray(self.images[index])
        return {
            "image_name": f"{index}.png",
            "data": self.transform_image(image),
            "data_aux": self.transform_aux_image(image),
            "label": self.labels[index],
        }


def pictures(count: int, seed: int, brightness: int = 0) -> np.ndarray:
    r"""Returns images of smooth noise, brighter or darker."""
    rng = np.random.default_rng(seed)
    coarse = torch.as_tensor(rng.integers(30, 160, (count, 3, 8, 8)), dtype=torch.float32)
    fine = F.interpolate(coarse, size=(32, 32), mode="bilinear") + brightness
    return fine.clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()


class Forbidden:
    r"""A loader that must not be looked at."""

    def __iter__(self) -> Foreign:
        raise AssertionError("An OOD loader was read.")

    __getitem__ = __len__ = __getattr__ = __iter__


class HostLoaders:
    r"""ID, reference and OOD loaders, in the style of the evaluator or of the older pipelines."""

    def __init__(self, style: str = "evaluator", count: int = 24, batch_size: int = 8) -> None:
        plain = Normalised()
        train = plain if style == "evaluator" else Normalised(augment=True)
        test = plain if style == "evaluator" else Normalised()

        def loader(
            seed: int, transform: Foreign, brightness: int, label: int | None
        ) -> DataLoader:
            labels = [i % 4 for i in range(count)] if label is None else [label] * count
            data = HostImages(pictures(count, seed, brightness), labels, transform, plain)
            return DataLoader(data, batch_size=batch_size)

        self.id = {
            "train": loader(0, train, 0, None),
            "val": loader(1, test, 0, None),
            "test": loader(2, test, 0, None),
        }
        near = {name: loader(10 + i, test, 20, -1) for i, name in enumerate(NEAR)}
        far = {name: loader(20 + i, test, 70, 5) for i, name in enumerate(FAR)}
        names = ("near", "far") if style == "evaluator" else ("nearood", "farood")
        self.ood = {"val": loader(3, test, 40, -1), **dict(zip(names, (near, far), strict=True))}
        self.csid = {"cifar10c": loader(4, test, 5, None)}
        self.reference = loader(5, test, 60, -1)


class HostEvaluator:
    r"""What the evaluator does with a postprocessor, in its order."""

    def __init__(self, net: nn.Module, postprocessor: Foreign, loaders: HostLoaders) -> None:
        self.net, self.postprocessor = net, postprocessor
        self.dataloader_dict = {"id": loaders.id, "ood": loaders.ood, "csid": loaders.csid}
        postprocessor.setup(net, loaders.id, loaders.ood)
        if postprocessor.APS_mode and not postprocessor.hyperparam_search_done:
            self.search()
        net.eval()

    def search(self) -> None:
        r"""Tries every combination, the first parameter fastest, and keeps the first best."""
        values = list(self.postprocessor.args_dict.values())
        validation = [self.dataloader_dict[role]["val"] for role in ("id", "ood")]
        self.tried: list[tuple[float, list[Any]]] = []
        for backwards in product(*reversed(values)):
            combination = list(reversed(backwards))
            self.postprocessor.set_hyperparam(combination)
            conf = [self.postprocessor.inference(self.net, loader)[1] for loader in validation]
            self.tried.append((ood_metrics(*conf).auroc, combination))
        chosen = max(self.tried, key=lambda t: t[0])[1]
        self.postprocessor.set_hyperparam(chosen)
        self.postprocessor.hyperparam_search_done = True


class HostNet(nn.Module):
    r"""A classifier with the face of OpenOOD's networks."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)
        self.passes = 0

    def forward(self, x: Tensor, return_feature: bool = False) -> Foreign:
        self.passes += 1
        features = F.relu(self.norm(self.conv(x))).mean(dim=(2, 3))
        logits = self.fc(features)
        return (logits, features) if return_feature else logits


def write_run(folder: Path, classes: int = 4, seed: int = 0, **changes: Foreign) -> Config:
    r"""Writes a model that nothing trained, with heads that are not zero, as a run leaves it."""
    config = Config.from_mapping({**SMALL, **changes})
    torch.manual_seed(seed)
    ratio = build_ratio(config, classes).float()
    for name, p in ratio.named_parameters():
        if "head" in name:
            nn.init.normal_(p)
    metadata = {"classes": classes, "mean": MEAN, "std": STD, "size": 32, "reference": "toy"}
    checkpoints.write_checkpoint(
        folder, checkpoints.MODEL, ratio.state_dict(), {"config": config.to_dict(), **metadata}
    )
    return config


def write_root(root: Path, count: int = 12) -> Path:
    r"""Writes a complete data root of the CIFAR benchmarks, of made-up images."""
    sets = {
        "train_cifar10": ("cifar10/train", 0, 10),
        "val_cifar10": ("cifar10/val", 0, 10),
        "test_cifar10": ("cifar10/test", 0, 10),
        "test_cifar10c": ("cifar10c", 10, 10),
        "val_tin": ("tin/val", 40, 0),
        "test_cifar100": ("cifar100", 20, 0),
        "test_tin": ("tin/test", 30, 0),
        "test_mnist": ("mnist", 90, 0),
        "test_svhn": ("svhn", 60, 0),
        "test_texture": ("texture", -40, 0),
        "test_places365": ("places365", 50, 0),
        "train_tin597": ("tin597", 60, 0),
    }
    lists = root / "benchmark_imglist" / "cifar10"
    lists.mkdir(parents=True)
    for index, (name, (folder, brightness, classes)) in enumerate(sets.items()):
        lines = []
        for i, image in enumerate(pictures(count + index, index, brightness)):
            path = root / "images_classic" / folder / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(image)
            # Sizes and modes differ, as in the real sets.
            picture = picture.convert("L").resize((28, 28)) if name == "test_mnist" else picture
            picture = picture.resize((64, 48)) if "tin" in name else picture
            picture.save(path)
            lines.append(f"{folder}/{i:03d}.png {i % classes if classes else -1}\n")
        (lists / f"{name}.txt").write_text("".join(lines))
    return root
