r"""Laws of the training batches, and of what happens to images on the batch."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from ood_osdre.data import ImageSet
from ood_osdre.data.transforms import (
    BROADENINGS,
    Preprocess,
    Randomness,
    Standardise,
    broaden,
    flip_crop,
)
from ood_osdre.errors import UserError
from ood_osdre.sections import DataConfig
from ood_osdre.training.batches import ImageBatches, Stream, VectorBatches, step_generator

RNG = np.random.default_rng(0)


def image_set(size: int, value: int | None = None, side: int = 8) -> ImageSet:
    images = RNG.integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    if value is not None:
        images[:] = value
    return ImageSet(images, np.arange(size) % 10, [f"x/{i}.png" for i in range(size)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random() -> Randomness:
    return Randomness(generator(), generator(1))


def make(
    id_train: ImageSet, reference: ImageSet, seed: int = 0, **options: object
) -> ImageBatches:
    config = DataConfig(**{"flip": "none", "crop": 0, **options})  # type: ignore[arg-type]
    preprocess = Preprocess((0.0,) * 3, (1.0,) * 3)
    return ImageBatches(id_train, reference, config, preprocess, 4, seed)


class TestStreams:
    @pytest.mark.parametrize("kind", ["images", "features", "tasks"])
    def test_streams_of_one_kind_of_run_differ(self, kind: str) -> None:
        streams = [s for s in Stream if s.value[0] in (kind, "any")]
        numbers = [s.value[1] for s in streams]
        assert len(set(numbers)) == len(numbers) > 2
        first = {torch.rand(4, generator=step_generator(3, s, 5, "cpu")) for s in streams}
        assert len({tuple(x.tolist()) for x in first}) == len(streams)

    def test_a_generator_depends_on_seed_stream_and_step_alone(self) -> None:
        given = [(3, Stream.BATCH, 5), (3, Stream.BATCH, 5), (4, Stream.BATCH, 5)]
        given += [(3, Stream.BATCH, 6), (3, Stream.PROBE, 5)]
        seeds = [step_generator(*one, "cpu").initial_seed() for one in given]
        assert seeds[0] == seeds[1]
        assert len(set(seeds)) == len(seeds) - 1


class TestPreprocess:
    def test_channels_are_standardised_by_their_own_statistics(self) -> None:
        images = torch.as_tensor(image_set(5).images)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        x = Preprocess(mean, std)(images)

        assert x.shape == (5, 3, 8, 8)
        assert x.dtype == torch.float32
        for c in range(3):
            expected = (images[..., c].double() / 255 - mean[c]) / std[c]
            torch.testing.assert_close(x[:, c].double(), expected, rtol=1e-6, atol=1e-6)

    def test_a_batch_is_standardised_as_its_pixels_are(self) -> None:
        preprocess = Preprocess((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
        images = torch.as_tensor(image_set(4).images)[:, :5]
        for batch in (images, images.transpose(1, 2), images[:0]):
            before = batch.clone()
            x = preprocess(batch)
            assert torch.equal(x, preprocess.normalise(preprocess.pixels(batch)))
            assert torch.equal(batch, before)


class TestBatches:
    def test_an_epoch_has_every_image_once(self) -> None:
        id_train, reference = image_set(10), image_set(6)
        batches = make(id_train, reference)
        seen = [batches(step) for step in range(5)]  # 20 images: two epochs of 10

        first = torch.cat([b.label for b in seen])[:10]
        assert sorted(first.tolist()) == sorted(id_train.labels.tolist())
        points = torch.cat([b.x_0 for b in seen])[:6]
        stored = torch.as_tensor(reference.images).permute(0, 3, 1, 2).float() / 255
        assert all(any(torch.equal(x, s) for s in stored) for x in points)
        assert len({x.numpy().tobytes() for x in points}) == 6

    def test_labels_belong_to_their_images(self) -> None:
        id_train = image_set(10)
        batch = make(id_train, image_set(6))(3)
        stored = torch.as_tensor(id_train.images).permute(0, 3, 1, 2).float() / 255
        assert batch.label is not None
        for x, label in zip(batch.x_1, batch.label, strict=True):
            (index,) = [i for i, s in enumerate(stored) if torch.equal(x, s)]
            assert id_train.labels[index] == label

    def test_a_batch_is_a_function_of_seed_and_step(self) -> None:
        sets = image_set(10), image_set(6)
        options = {"flip": "random", "crop": 2, "broaden": 0.5}
        a, b = make(*sets, **options), make(*sets, **options)
        for step in (0, 1, 2, 7):
            a(step)
        for x, y in zip(a(5), b(5), strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
        assert not torch.equal(a(5).noise, a(6).noise)
        assert not torch.equal(a(5).noise, make(*sets, seed=1, **options)(5).noise)

    def test_alternating_flips_alternate_from_a_fair_coin(self) -> None:
        sets = image_set(401), image_set(75)
        batches = make(*sets, flip="alternating")
        again = make(*sets, flip="alternating")
        sizes = {"x_0": 75, "x_1": 401}
        seen: dict[str, list[dict[int, bool]]] = {name: [] for name in sizes}
        for name, images in zip(sizes, sets[::-1], strict=True):
            # Each pixel row tells the image, and which way round it is.
            x = torch.as_tensor(images.images).permute(0, 3, 1, 2).float() / 255
            whole = {row.numpy().tobytes(): (i, False) for i, row in enumerate(x)}
            whole |= {row.numpy().tobytes(): (i, True) for i, row in enumerate(x.flip(3))}
            flips = [
                whole[one.contiguous().numpy().tobytes()]
                for step in range(3 * 401 // 4 + 1)
                for one in getattr(batches(step), name)
            ]
            count = sizes[name]
            seen[name] = [dict(flips[k * count : (k + 1) * count]) for k in range(3)]
        for name, (first, second, third) in seen.items():
            assert len(first) == len(second) == sizes[name]
            assert all(second[i] != flipped for i, flipped in first.items())
            assert third == first
        # Four standard deviations of a fair coin.
        share = np.mean(list(seen["x_1"][0].values()))
        assert abs(share - 0.5) < 4 * 0.5 / 401**0.5
        # Neither the steps before nor the order of the epoch count.
        assert torch.equal(again(200).x_1, batches(200).x_1)
        other = make(*sets, seed=1, flip="alternating")._first_flips[Stream.SHUFFLE_ID]
        assert not torch.equal(other, batches._first_flips[Stream.SHUFFLE_ID])

    def test_mixture_puts_id_images_into_the_reference_but_not_into_their_own_pair(self) -> None:
        batch = make(image_set(10), image_set(6, value=0), mixture=0.5)(0)
        mixed = batch.x_0.flatten(1).sum(1) > 0
        assert mixed.tolist() == [False, False, True, True]
        for x_0, x_1 in zip(batch.x_0[mixed], batch.x_1[mixed], strict=True):
            assert not torch.equal(x_0, x_1)
            assert any(torch.equal(x_0, x) for x in batch.x_1)

    def test_broadening_changes_its_share_of_the_reference_and_no_id_image(self) -> None:
        sets = image_set(10), image_set(6)
        plain, broad = make(*sets)(0), make(*sets, broaden=0.5)(0)
        changed = (plain.x_0 != broad.x_0).flatten(1).any(1)
        assert changed.tolist() == [True, True, False, False]
        assert torch.equal(plain.x_1, broad.x_1)

    @pytest.mark.parametrize(
        ("limits", "sizes"),
        [
            ({"train_limit": 3}, (3, 3)),
            ({"reference_limit": 2}, (10, 2)),
            ({"train_limit": 3, "reference_limit": 5}, (3, 5)),
        ],
    )
    def test_limits_use_that_many_images(
        self, limits: dict[str, int], sizes: tuple[int, int]
    ) -> None:
        batches = make(image_set(10), image_set(6), **limits)
        assert (len(batches.id_images), len(batches.reference_images)) == sizes

    def test_crops_fit_into_the_images(self) -> None:
        with pytest.raises(UserError, match=r"data\.crop: got 8, expected less than .* 8"):
            make(image_set(10), image_set(6), crop=8)

    def test_a_probe_is_there_where_an_objective_needs_it_and_changes_nothing_else(self) -> None:
        batches = make(image_set(10), image_set(6))
        plain = batches(2)
        assert plain.probe is None
        batches.needs_probe = True
        probed, again = batches(2), batches(2)
        assert torch.equal(probed.probe, again.probe)
        assert not torch.equal(probed.probe, batches(3).probe)
        assert not torch.equal(probed.probe, probed.noise)
        for x, y in zip(plain[:5], probed[:5], strict=True):
            assert torch.equal(x, y)

    def test_vectors_are_standardised_and_keep_their_labels(self) -> None:
        x_1, x_0 = torch.randn(9, 3), torch.randn(7, 3)
        standardise = Standardise([1.0, 2.0, 3.0], [0.5, 1.0, 2.0])
        batch = VectorBatches(x_1, torch.arange(9), x_0, standardise, 16, 0)(0)
        assert torch.equal(batch.x_1, standardise(x_1)[batch.label])
        assert all((x == standardise(x_0)).all(1).any() for x in batch.x_0)


class TestFlipCrop:
    @pytest.mark.parametrize("flip", [False, True])
    def test_without_a_crop_images_are_whole(self, flip: bool) -> None:
        images = torch.as_tensor(image_set(40).images)
        out = flip_crop(images, torch.arange(40), flip, 0, generator())
        same = (out == images).flatten(1).all(1)
        mirrored = (out == images.flip(2)).flatten(1).all(1)
        assert bool((same | mirrored).all())
        assert bool(same.all()) != flip
        chosen = torch.arange(40) % 3 == 0
        out = flip_crop(images, torch.arange(40), chosen, 0, generator())
        assert torch.equal((out == images.flip(2)).flatten(1).all(1), chosen)

    def test_a_crop_is_the_reflect_padded_image_shifted(self) -> None:
        images = torch.as_tensor(image_set(20).images)
        out = flip_crop(images, torch.arange(20), False, 3, generator())
        padded = torch.nn.functional.pad(
            images.permute(0, 3, 1, 2).double(), (3,) * 4, mode="reflect"
        ).permute(0, 2, 3, 1)
        shifts = set()
        for x, p in zip(out, padded, strict=True):
            grid = itertools.product(range(7), repeat=2)
            found = [(i, j) for i, j in grid if torch.equal(x, p[i : i + 8, j : j + 8].byte())]
            assert found
            shifts.update(found)
        assert len(shifts) > 8


class TestBroaden:
    @pytest.mark.parametrize("name", BROADENINGS)
    def test_every_family_stays_in_range_changes_images_and_is_finite(self, name: str) -> None:
        for x in (torch.rand(8, 3, 16, 16), torch.zeros(8, 3, 16, 16), torch.ones(8, 3, 16, 16)):
            y = BROADENINGS[name](x, random())
            assert y.shape == x.shape
            assert bool((y >= 0).all() and (y <= 1).all())
        x = torch.rand(8, 3, 16, 16)
        assert bool((BROADENINGS[name](x, random()) != x).flatten(1).any(1).all())

    def test_half_of_the_images_are_grey(self) -> None:
        y = broaden(torch.rand(400, 3, 8, 8), random())
        grey = ((y - y.mean(dim=1, keepdim=True)).abs() < 1e-12).flatten(1).all(1)
        assert 0.4 < float(grey.double().mean()) < 0.75  # edges and thresholds are grey anyway

    def test_one_image_and_none(self) -> None:
        for size in (0, 1):
            x: Tensor = torch.rand(size, 3, 8, 8)
            assert broaden(x, random()).shape == x.shape
