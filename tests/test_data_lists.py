r"""Tests for the ood_osdre.data.lists module."""

import hashlib
import os
from pathlib import Path

import pytest
from PIL import Image

from ood_osdre.data.lists import image_suffixes, list_folder, parse_list, read_list, write_list
from ood_osdre.errors import UserError


@pytest.mark.parametrize(
    ("line", "name", "label"),
    [
        ("a/b.png 3", "a/b.png", 3),
        ("a dir/b  c.png -1", "a dir/b  c.png", -1),
        ("a/b.png\t7", "a/b.png", 7),
        ("  a/b.png   10  ", "a/b.png", 10),
        ("a\tb/c.png 1", "a\tb/c.png", 1),
        ("ä/ü.png 0", "ä/ü.png", 0),
    ],
)
def test_label_follows_the_last_blank(line: str, name: str, label: int) -> None:
    content = parse_list(f"\n{line}\n\n", "here")
    assert (content.names, content.labels) == ((name,), (label,))


def test_every_bad_line_is_named_at_once() -> None:
    text = "a.png 0\nb.png\nc.png one\n5\nd.png -2\ne.png 1.5\n" + "f.png\n" * 10

    with pytest.raises(UserError) as error:
        parse_list(text, "there.txt")

    message = str(error.value)
    assert message.startswith("there.txt: ")
    assert "\n" not in message
    assert all(f"line {i}:" in message for i in (2, 3, 4, 5, 6))
    assert "15 lines" in message
    assert "and 5 more" in message


def test_checksum_ignores_order_and_line_endings(tmp_path: Path) -> None:
    texts = [
        b"a.png 0\nb c.png 1\n",
        b"\r\nb c.png 1\r\na.png 0",
        b"\xef\xbb\xbfb c.png 1\na.png 0",
    ]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    checksums = {read_list(tmp_path / f"{i}.txt").checksum for i in range(len(texts))}

    assert checksums == {hashlib.sha256(texts[0]).hexdigest()}
    assert parse_list("a.png 1\nb c.png 0\n", "").checksum not in checksums


def test_lists_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "list.txt"
    write_list(path, ["a b.png", "c.png"], [4, -1])
    content = read_list(path)

    assert content.names == ("a b.png", "c.png")
    assert content.labels == (4, -1)
    assert content.checksum == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [b"\x89PNG\xff\xfe 0", None])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "list.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"list\.txt: cannot be read as text in UTF-8 \("):
        read_list(path)


def test_folder_lists_its_images_in_order(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.png", "a c/3.jpeg", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    assert list_folder(tmp_path).names == ("a c/3.jpeg", "b/1.png", "b/2.PNG")
    (tmp_path / "empty").mkdir()
    common = (".jpg", ".png", ".tif", ".webp", ".gif", ".bmp")
    kinds = f"{' '.join(common)} and {len(image_suffixes()) - len(common)} more that Pillow reads"
    with pytest.raises(UserError) as caught:
        list_folder(tmp_path / "empty")
    assert f"holds no image; expected files named {kinds}" in str(caught.value)
    assert image_suffixes().issuperset(common)


def test_a_folder_yields_what_its_user_sees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = ("a/1.jpg", "a b/2.JFIF", "a.b/3.avif", "a-b/4.jp2", "5.tga", "b/6.webp")
    fill(tmp_path, *shown, ".DS_Store", "b/notes.txt", "b/data.h5", "README")
    assert not caplog.records
    # In the order of sorted paths, which is not that of sorted text.
    assert list(list_folder(tmp_path).names) == [
        p.relative_to(tmp_path).as_posix()
        for p in sorted(tmp_path.rglob("*"))
        if p.relative_to(tmp_path).as_posix() in shown
    ]
    (told,) = caplog.messages
    assert "3 files are no images and left out (1 .h5, 1 .txt, 1 without suffix)" in told
    caplog.clear()
    fill(tmp_path / "c", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg", "1.jpg")
    assert list_folder(tmp_path / "c").names == ("1.jpg",)
    assert "2 files are no images and left out (2 hidden)" in caplog.text


def test_every_suffix_of_an_image_is_one_that_pillow_writes_and_reads(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (1, 2, 3)).quantize()
    for suffix in (".gif", ".im", ".jfif", ".jpe", ".pcx", ".qoi", ".sgi", ".tga", ".tif", ".dib"):
        with_mode = image if suffix in (".gif", ".pcx") else image.convert("RGB")
        with_mode.save(tmp_path / f"1{suffix}")
        with Image.open(tmp_path / f"1{suffix}") as read:
            read.load()
        assert suffix in image_suffixes()
    assert not {".txt", ".json", ".npy", ".h5", ".mpg", ".pdf", ""} & image_suffixes()


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def test_linked_folders_and_files_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "set/a/1.png", "apart/2.png", "apart/deep/3.png", "single.png")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "apart")
    (tmp_path / "set" / "c.png").symlink_to("../single.png")
    assert list_folder(tmp_path / "set").names == ("a/1.png", "b/2.png", "b/deep/3.png", "c.png")


def test_links_in_circles_end(tmp_path: Path) -> None:
    fill(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "here").symlink_to(".")
    assert list_folder(tmp_path).names == ("a/1.png", "b/2.png")


@pytest.mark.parametrize("kind", ["dangling", "circle", "fifo"])
def test_names_without_a_file_are_refused(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, "good.png")
    bad = tmp_path / "bad\nname.png"
    if kind == "fifo":
        os.mkfifo(bad)
    else:
        bad.symlink_to("nowhere.png" if kind == "dangling" else bad.name)
    with pytest.raises(UserError, match=r"got 1 other file: 'bad.nname\.png', expected") as error:
        list_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "good.png", os.fsdecode(b"\xff.png"))
    with pytest.raises(UserError, match=r"got 1 other file: '.udcff\.png', expected .*UTF-8"):
        list_folder(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "a/1.png", "b/2.png")
    scan = os.scandir

    def refuse(path: str) -> object:
        if os.path.basename(path.rstrip("/")) == "b":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"b: cannot be read \(Permission denied\)"):
        list_folder(tmp_path)
