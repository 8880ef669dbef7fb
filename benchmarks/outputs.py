r"""Where a benchmark writes, looked at before the work whose result it is to hold."""

import tempfile
from pathlib import Path

from ood_osdre.errors import UserError


def require_writable(folder: Path) -> None:
    r"""Refuses a folder in which no file can be made, and makes none.

    Arguments:
        folder: The folder that the option `--out` gave, which need not be there yet.

    Raises:
        UserError: If nothing can be written there.
    """
    try:
        above = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}.") from None
