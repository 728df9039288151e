"""What runs where."""

from __future__ import annotations

import functools
import os
from importlib import metadata
from typing import Literal

import torch


def backend(device: torch.device, dtype: torch.dtype) -> Literal["triton", "reference"]:
    """Return what runs: the Triton kernels on a GPU with bf16 or in Triton's interpreter, else plain torch.

    The interpreter gets bf16 arithmetic wrong, so there plain torch serves.
    """
    if device.type == "cuda":
        return "triton" if torch.cuda.get_device_capability(device) >= (8, 0) else "reference"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and dtype != torch.bfloat16
    return "triton" if interpreted else "reference"


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can be launched before the one it waits for ends: Hopper and later."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build under another name
        return False
    return tuple(map(int, version.split(".")[:2])) >= (3, 5)


def power_of_two(number: int) -> int:
    """Return the least power of two from `number` on."""
    return 1 << (number - 1).bit_length()
