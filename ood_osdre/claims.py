r"""One run a folder: a claim that a second process is refused, and that ends with its holder."""

__all__ = ["claimed"]

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

LOCK = ".lock"


@contextmanager
def claimed(folder: Path, option: str = "") -> Iterator[None]:
    r"""Holds a folder, created if needed, against other runs while the block lasts.

    The system ends the claim with the process, however that ends.

    Arguments:
        folder: The folder.
        option: What to put before the folder in messages, the name of an option.

    Raises:
        UserError: If another run holds the folder, or it cannot be written.
    """
    import fcntl

    where = f"{option} {folder}".strip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(f"{where}: cannot be written: {error.strerror}") from None
    except ValueError as error:  # a null character
        raise UserError(f"{where!r}: cannot be written: {error}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{where}: another run is writing here.") from None
        yield
