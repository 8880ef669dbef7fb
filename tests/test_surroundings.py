r"""The process and the machine that a caller happens to have: no home, a notebook's variables."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from ood_osdre.data.images import cached_array
from ood_osdre.data.inputs import read
from ood_osdre.errors import UserError
from ood_osdre.files import local


def test_without_a_home_decoded_images_are_kept_where_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user that nobody knows
    made = []

    def build() -> np.ndarray:
        made.append(1)
        return np.ones((2, 4, 4, 3), np.uint8)

    for _ in range(2):
        assert cached_array(build, (2, 4, 4, 3), [b"k"], "x", tmp_path).all()
    assert len(made) == len(list(tmp_path.iterdir())) == 1
    # Where nothing can be kept, images are used all the same.
    (tmp_path / "file").touch()
    assert cached_array(build, (2, 4, 4, 3), [b"k"], "x", tmp_path / "file").all()
    # Nor does a folder that is called ~ come to be.
    with pytest.raises(UserError, match=r"^~/run: there is no home folder"):
        local("~/run")
    assert local("run~/~") == Path("run~/~")


def test_a_backend_that_is_not_here_is_not_missed() -> None:
    code = "import ood_osdre.evaluation.plots, os; print(os.environ['MPLBACKEND'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MPLBACKEND": "no_such_backend"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "no_such_backend\n", done.stderr


def test_a_stream_that_knows_its_length_is_read_in_batches() -> None:
    class Sized(IterableDataset):
        def __iter__(self):  # noqa: ANN204
            yield from (torch.full((2, 3, 4, 4), i / 4) for i in range(3))

        def __len__(self) -> int:
            return 3

    assert read(Sized(), 4, "data").values[:, 0, 0, 0].tolist() == [0, 0, 64, 64, 128, 128]
