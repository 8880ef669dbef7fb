r"""The features of a benchmark's images that a head is trained on, kept on disk between runs."""

__all__ = ["HeadData"]

import math
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config, HeadConfig
from ..data import BenchmarkData, ImageSet, image_files
from ..data.image_files import in_batches
from ..data.images import VERSION, cache_folders
from ..data.sets import hold_out_id
from ..data.transforms import Preprocess, Standardiser
from ..errors import UserError
from ..models import (
    Classifier,
    NetworkDigest,
    classifier_features,
    evaluating,
    explained,
    named_layers,
)
from ..progress import Bar
from ..training import distributed
from ..training.batches import Stream, broadened, limited, step_generator
from ..training.run import caught_signals
from .feature_store import FeatureFolder, Stored, make_room

CHANNELS = 3
# The batches whose features are kept together.
SHARD = 16
# What follows the name of a transformed image; what an ID image in the place of another is called.
BROADENED, MIXED = " (transformed)", "an ID image, by data.mixture"


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
        self.batch_size, self.cache = config.evaluation.batch_size, data.cache
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
        self,
        classifier: Classifier,
        preprocess: Standardiser,
        progress: bool = False,
        time_budget: float | None = None,
    ) -> tuple[tuple[Tensor | Stored, Tensor | Stored], str]:
        r"""Returns the features of ID and of reference images, and what stopped this if it did.

        They are computed as scores are, in single precision and in evaluation mode. Those of images
        that have a key are kept (:mod:`~ood_osdre.detectors.feature_store`), so that what has been
        computed is not computed again. A signal stops it at once, a time budget after a shard that
        has been kept; where none is, it would stop at the same image forever, and so it does not.

        Arguments:
            classifier: The trained classifier.
            preprocess: The preprocessing that it was trained with.
            progress: Whether to show a progress bar.
            time_budget: The number of seconds after which to stop.
        """
        sides, used = list[Stored](), list[FeatureFolder]()
        end = math.inf if time_budget is None else time.monotonic() + time_budget
        total = len(self.id_images) + len(self.reference) - self.mixed
        bar = Bar(total=total, desc="features", unit="img", disable=not progress)
        with caught_signals() as received, bar, evaluating(classifier):
            for images, order, share in self._inputs():
                homes = cache_folders(self.cache) if self.cache and images.key else []
                known = self._key(classifier, preprocess, images, share)
                folder = FeatureFolder(homes, known, len(order), SHARD * self.batch_size)
                used.append(folder)
                parts = list[Tensor]()
                for i, rows in enumerate(folder.rows):
                    part = folder.read(i)
                    # Of several processes one may see already what another has just written.
                    if distributed.gather_rows(np.array([part is None])).any():
                        batches = self._batches(images, order[rows], preprocess, share, i * SHARD)
                        found = []
                        for x in batches:
                            given = classifier_features(classifier, x, self.head.layers)
                            found.append(given.features.cpu().float())
                            bar.update(len(x))
                            name = signal.Signals(received[0]).name if received else ""
                            if stopped := distributed.from_first(name):
                                return (torch.empty(0), torch.empty(0)), stopped
                        part = self._kept(folder, i, torch.cat(found))
                        for features in used:
                            features.mark()
                        late = time.monotonic() >= end and bool(folder.writable)
                        if distributed.from_first(late):
                            return (torch.empty(0), torch.empty(0)), "time budget"
                    else:
                        bar.update(rows.stop - rows.start)
                    assert part is not None
                    parts.append(part)
                sides.append(Stored(parts))
        if distributed.is_first():
            make_room(used)
        if sum(4 * math.prod(side.shape) for side in sides) <= image_files.LIMIT:
            return (torch.cat([*sides[0].parts]), torch.cat([*sides[1].parts])), ""
        return (sides[0], sides[1]), ""

    def _kept(self, folder: FeatureFolder, index: int, features: Tensor) -> Tensor:
        r"""Keeps a shard and returns it as it is kept, or as it is where it cannot be."""
        if distributed.is_first():
            folder.keep(index, features)
        if distributed.from_first(bool(folder.writable)):  # waited for
            features = features if (kept := folder.read(index)) is None else kept
        return features

    def named(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        r"""Returns the scores of held-out features with the labels and names of their images.

        Arguments:
            scores: Those of the outcome of :func:`fit_head`, named by the numbers of features.
        """
        (own, _, _), (others, order, share) = self._inputs()
        names, size = [others.names[i] for i in order], self.batch_size
        for start in range(0, len(names), size):
            some = names[start : start + size]
            # The first of each batch were broadened, see `broadened`.
            for i in range(start, start + round((share or 0.0) * len(some))):
                names[i] += BROADENED
        names += [MIXED] * self.mixed
        known = {"id": (own.labels, own.names), "near": (np.full(len(names), -1), names)}
        return {
            side: (score, known[side][0][rows], [known[side][1][i] for i in rows])
            for side, (score, _, rows) in scores.items()
        }

    def _inputs(self) -> Iterator[tuple[ImageSet, NDArray[np.int64], float | None]]:
        r"""Yields the images of each side, their order, and the share of a batch to be broadened."""
        yield self.id_images, np.arange(len(self.id_images)), None
        # In random order, as the first images of each batch are broadened.
        random = step_generator(self.seed, Stream.SPLIT, 2, "cpu")
        count = len(self.reference)
        order = torch.randperm(count, generator=random)[: count - self.mixed].numpy()
        # A share of all, those replaced included.
        share = self.options.broaden * count / max(len(order), 1)
        yield self.reference, order, share if self.options.broaden else None

    def _batches(
        self,
        images: ImageSet,
        rows: NDArray[np.int64],
        preprocess: Standardiser,
        share: float | None,
        start: int,
    ) -> Iterator[Tensor]:
        r"""Yields batches of some images, the first of which is that of a number."""
        batches = in_batches(images.subset(rows).images, self.batch_size)
        inputs = (preprocess(torch.as_tensor(batch)) for batch in batches)
        if share is None:
            return inputs
        assert isinstance(preprocess, Preprocess)
        return broadened(inputs, preprocess, share, self.seed, start)

    def _key(
        self,
        classifier: Classifier,
        preprocess: Standardiser,
        images: ImageSet,
        share: float | None,
    ) -> tuple[object, ...]:
        r"""Returns all that the features of a set depend on."""
        statistics = tuple(tuple(x.tolist()) for x in preprocess.statistics)
        own = images.key, NetworkDigest.of(classifier).digest, tuple(self.head.layers), statistics
        reference = () if images is self.id_images else (self.seed, self.mixed, share)
        return (VERSION, self.size, self.batch_size, preprocess.device.type, *own, *reference)
