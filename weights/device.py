"""Device names -> devices."""

from __future__ import annotations

import warnings

import torch

from model import InputError


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best there is. Raises InputError when it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the refusal says enough
            device = torch.device(name)
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise InputError(f"device {name!r} is not there: {reason:.120}") from None
    if device.type == "meta":
        raise InputError("device 'meta' holds no numbers: give cpu or cuda")
    return device
