r"""The features of a benchmark's images that a head is trained on."""

__all__ = ["HeadData"]

import signal
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ..config import Config, HeadConfig
from ..data import BenchmarkData, ImageSet
from ..data.sets import hold_out_id
from ..data.transforms import Preprocess, Standardiser
from ..errors import UserError
from ..models import Classifier, classifier_features, evaluating, explained, named_layers
from ..training import distributed
from ..training.batches import Stream, broadened, limited, step_generator
from ..training.run import caught_signals

CHANNELS = 3


class HeadData:
    r"""The images whose features a head is trained on, those that train a run without a head.

    They are not augmented, but a share `data.broaden` of the reference is strongly transformed, and
    one of `data.mixture` left out, for :func:`fit_head` to put ID images in its place.

    Arguments:
        config: The configuration of the run.
        head: The head.
        data: The benchmark.
    """

    def __init__(self, config: Config, head: HeadConfig, data: BenchmarkData) -> None:
        options, self.seed = config.data, config.training.seed
        self.options, self.head, self.size = options, head, data.manifest.size
        self.batch_size = config.evaluation.batch_size
        id_train, held = hold_out_id(data.id_train, options.hold_out_id)
        id_images = held if held is not None and head.id_from == "held_out" else id_train
        self.id_images = limited(id_images, options.train_limit, self.seed)
        #: The classes of the ID images, with shape (N), and how many there are.
        self.classes = torch.as_tensor(self.id_images.labels), data.classes
        reference, _ = data.split_reference(options.hold_out_reference)
        limit = options.reference_limit or options.train_limit
        self.reference = limited(reference, limit, self.seed)
        #: How many of the reference are to be replaced by ID images.
        self.mixed = round(options.mixture * len(self.reference))

    def check(self, classifier: Classifier) -> None:
        r"""Refuses, before anything is trained, layers that are not there and ranks that cannot be.

        Arguments:
            classifier: The classifier, trained or not.

        Raises:
            UserError: If it has no layer of a name, layers give no features, or the rank is larger
                than the number of features or not smaller than that of images.
        """
        head, net = self.head, classifier.backbone
        zeros = torch.zeros(2, CHANNELS, self.size, self.size).to(next(net.parameters()))
        with evaluating(classifier), explained(net, zeros), torch.no_grad():
            named_layers(net, head.layers)
            count = classifier_features(classifier, zeros, head.layers).features.shape[1]
        images = len(self.id_images) + len(self.reference)
        for limit, what in ((count, "features"), (images - 1, "images, but one")):
            if head.rank is not None and head.rank > limit:
                raise UserError(
                    f"head.rank: got {head.rank}, expected at most {limit}, the number of {what}."
                )

    @torch.no_grad()
    def features(
        self, classifier: Classifier, preprocess: Standardiser, progress: bool = False
    ) -> tuple[tuple[Tensor, Tensor], str]:
        r"""Returns the features of ID and of reference images, and what stopped this if it did.

        They are computed as scores are, in single precision and in evaluation mode. A signal stops
        it; a time budget does not, as nothing of it is kept.

        Arguments:
            classifier: The trained classifier.
            preprocess: The preprocessing that it was trained with.
            progress: Whether to show a progress bar.
        """
        stopped = ""
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        total = len(self.id_images) + len(self.reference) - self.mixed
        bar = tqdm(total=total, desc="features", unit="img", disable=not progress)
        with caught_signals() as received, bar, evaluating(classifier):
            for side, batches in zip(parts, self._inputs(preprocess), strict=True):
                for x in batches:
                    given = classifier_features(classifier, x, self.head.layers)
                    side.append(given.features.cpu().float())
                    bar.update(len(x))
                    name = signal.Signals(received[0]).name if received else ""
                    if stopped := distributed.from_first(name):
                        break
                if stopped:
                    return (torch.empty(0), torch.empty(0)), stopped
        x_1, x_0 = (torch.cat(side) for side in parts)
        return (x_1, x_0), stopped

    def _inputs(self, preprocess: Standardiser) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
        # In random order, as the first images of each batch are broadened.
        random = step_generator(self.seed, Stream.SPLIT, 2, "cpu")
        count = len(self.reference)
        order = torch.randperm(count, generator=random)[: count - self.mixed].numpy()

        def batches(images: ImageSet, rows: NDArray[np.int64]) -> Iterator[Tensor]:
            for start in range(0, len(rows), self.batch_size):
                batch = images.images[rows[start : start + self.batch_size]]
                yield preprocess(torch.as_tensor(np.ascontiguousarray(batch)))

        reference: Iterator[Tensor] = batches(self.reference, order)
        if self.options.broaden:
            assert isinstance(preprocess, Preprocess)
            # A share of all, those replaced included.
            share = self.options.broaden * count / max(len(order), 1)
            reference = broadened(reference, preprocess, share, self.seed)
        return batches(self.id_images, np.arange(len(self.id_images))), reference
