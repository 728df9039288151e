"""Where a benchmark ran: device, clocks, versions."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

from coverage_lab import __version__
from coverage_lab.kernels.baselines import fa3_op

_VERSIONS = ("torch", "transformers", "triton", "flashinfer-python", "vllm")
# Fields of nvidia-smi: MHz, W, and the driver.
_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")


def describe(device: torch.device) -> dict[str, Any]:
    """Return device, clocks and versions as a JSON object."""
    versions = {"coverage-lab": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    library = fa3_op.library()
    if library is not None:
        with library.open("rb") as file:
            versions["fa3"] = f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    if device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "clocks": _clocks(device),
        "versions": versions,
    }


def _clocks(device: torch.device) -> dict[str, str]:
    """Return what nvidia-smi says of clocks and driver; nothing where it is not there."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    number = device.index if device.index is not None else torch.cuda.current_device()
    options = [f"--id={number}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    run = subprocess.run([command, *options], capture_output=True, text=True, check=False)
    values = run.stdout.strip().split(", ")
    return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}
