"""How long calls take: CUDA graph replays where the kernels run on a GPU, the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TypeVar

import torch

Call = Callable[[], object]
CallT = TypeVar("CallT", bound=Call)

# Calls in a graph at least: a decode step has some tens of layers, and its launch is paid for once.
CALLS = 16

REPLAYS = 30
CLOCKED = 3


def enough(calls: Sequence[CallT], device: torch.device) -> list[CallT]:
    """Return the calls, over and over until there are as many as a decode step might have."""
    return list(islice(cycle(calls), max(len(calls), CALLS))) if has_graphs(device) else list(calls)


def has_graphs(device: torch.device) -> bool:
    """Return whether times are those of CUDA graphs: plain torch references ask the host for lengths."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def seconds_a_call(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median time of one call, in seconds.

    Where the kernels run on a GPU all calls, one a layer, are captured in one CUDA graph, as the layers of a
    decode step are: the time of a replay over the calls. Each call finds the level-2 cache full of what the
    others read.
    """
    if not has_graphs(device):
        return statistics.median(_clocked(calls, device) for _ in range(CLOCKED)) / len(calls)
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def host_seconds_a_call(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median time of one call on the host's clock, what it waits for on the device included."""
    return statistics.median(_clocked([call], device) for call in calls)


def _clocked(calls: Sequence[Call], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for call in calls:
        call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
