"""Recording on a GPU: the same rows as on a CPU, and no waiting for the device within a step."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.collectors.decode import decode_batch
from coverage_lab.collectors.models import load_model
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.policies.estimators import estimators
from coverage_lab.trace import Trace

pytestmark = pytest.mark.gpu

LENGTHS = (96, 109, 67)


def recorded(zoo: Any, family: str, root: Path, **changes: Any) -> Trace:
    options = {
        "model": str(zoo.directory(family)),
        "dataset": "jsonl",
        "data_dir": zoo.prompts(root / "rows.jsonl", LENGTHS),
        "output": root / "trace",
        "steps": 8,
        "ignore_eos": True,
        "page_size": 8,
        "estimators": ("mvar", "mean", "quest"),
        "share_dtype": "float32",
    }
    collect(CollectOptions(**options | changes))
    return Trace(options["output"])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_the_cpu(zoo: Any, family: str, tmp_path: Path, batch_size: int):
    traces = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        changes = {"device": device, "dtype": "float32", "batch_size": batch_size}
        traces[device] = recorded(zoo, family, tmp_path / device, **changes)
    decoded = [trace.requests["decoded_ids"].to_list() for trace in traces.values()]
    assert decoded[0] == decoded[1]
    cpu, cuda = (trace.scan().collect() for trace in traces.values())
    for name, dtype in cpu.schema.items():
        if dtype.is_nested():
            assert (cpu[name].explode() - cuda[name].explode()).abs().max() < 5e-4, name
        elif dtype.is_float():
            assert (cpu[name] - cuda[name]).abs().max() < 1e-3, name
        elif name.startswith("oracle"):
            assert (cpu[name] != cuda[name]).mean() < 2e-3, name
        else:
            assert cpu[name].equals(cuda[name]), name


def test_half_precision(zoo: Any, family: str, tmp_path: Path):
    """Shares are those of the rounded q and K, in float32: their sum is one, not one in half precision."""
    trace = recorded(zoo, family, tmp_path, device="cuda")
    assert trace.manifest["run"]["model"]["dtype"] == "bfloat16"
    sums = trace.scan().select(pl.col("share").list.sum()).collect()["share"]
    assert (sums - 1).abs().max() < 1e-5


def test_recording_waits_for_nothing(zoo: Any, family: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever stops the host within a call of the recorder is an error here."""
    loaded = load_model(str(zoo.directory(family)), device="cuda")
    see, calls = RequestRecorder.see, []

    def strictly(self: RequestRecorder, *arguments: Any) -> None:
        calls.append(arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            see(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(RequestRecorder, "see", strictly)
    held = {name: estimators.get(name)() for name in ("mvar", "mean", "quest")}
    recorders = [RequestRecorder(8, held, padding) for padding in (0, 9)]
    decode_batch(loaded, [[5] * 30, [6] * 21], recorders, steps=12)
    assert len(calls) == 2 * 4 * 13


def test_memory_of_a_long_prompt():
    """Summaries of a layer's keys take some copies of them in float32, and leave little behind."""
    keys = torch.randn(1, 8, 1 << 16, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    call = AttentionCall(0, query, keys, keys, 128**-0.5, None, None, None, lambda: (query.transpose(1, 2),))
    recorder = RequestRecorder(64, {"mvar": estimators.get("mvar")()})
    single = keys.numel() * 4
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    recorder.see(call, 0, keys.shape[-2] - 1, None)
    assert torch.cuda.memory_allocated() - before < single / 16
    assert torch.cuda.max_memory_allocated() - before < 3.5 * single
    torch.cuda.reset_peak_memory_stats()
    recorder.see(call, 0, keys.shape[-2], 0)
    assert torch.cuda.max_memory_allocated() - before < 2.5 * single
