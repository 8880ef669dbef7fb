r"""Which device to compute on."""

__all__ = ["find_device"]

import torch

from .errors import UserError


def find_device(name: torch.device | str | None = None, option: str = "device") -> torch.device:
    r"""Returns the device of a name, refusing one that is not there.

    Arguments:
        name: The name; None for a GPU if there is one, else the CPU.
        option: What to call it in messages.

    Raises:
        UserError: If there is no such device here, or it holds no data.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" exists, but holds no data
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{option} {name}: not available here ({reason})") from None
    return device
