"""What runs where."""

from __future__ import annotations

import functools
import os
from importlib import metadata
from typing import Literal

import torch


def backend(device: torch.device) -> Literal["triton", "reference"]:
    """Return what runs on a device: the Triton kernels on a GPU with bf16 or in Triton's interpreter."""
    if device.type == "cuda":
        return "triton" if torch.cuda.get_device_capability(device) >= (8, 0) else "reference"
    return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "reference"


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can be launched before the one it waits for ends: Hopper and later."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    return tuple(map(int, metadata.version("triton").split(".")[:2])) >= (3, 5)


def power_of_two(number: int) -> int:
    """Return the least power of two from `number` on."""
    return 1 << (number - 1).bit_length()
