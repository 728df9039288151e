"""How long calls take: CUDA graph replays on a GPU, the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

REPLAYS = 30
CPU_REPEATS = 3


def seconds_a_call(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median time of one call, in seconds.

    On a GPU all calls, one a layer, are captured in one CUDA graph, as the layers of a decode step are: the
    time of a replay over the calls. Each call finds the level-2 cache full of what the others read.
    """
    if device.type != "cuda":
        return min(_clocked(calls) for _ in range(CPU_REPEATS)) / len(calls)
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
    times = []
    for call in calls:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(_clocked([call]))
    return statistics.median(times)


def _clocked(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
