"""`collect` end to end on tiny saved models: what a trace holds, and what decides it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from real import shared
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import GenerationConfig

from coverage_lab.collectors import collect as module
from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.collectors.decode import decode_batch
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.policies.compare import compare
from coverage_lab.policies.estimators import estimators
from coverage_lab.trace import Trace
from coverage_lab.trace.schema import ROUNDING

LENGTHS = (37, 21, 60)
STEPS = 6
GAMMAS = (0.9, 0.99)
SCALARS = {
    "request_id": pl.String,
    "layer": pl.UInt16,
    "kv_head": pl.UInt16,
    "step": pl.UInt32,
    "position": pl.UInt32,
    "n_pages": pl.UInt32,
    "first_page": pl.UInt32,
    "log_total": pl.Float32,
    "entropy": pl.Float32,
    "oracle_pages_0.9": pl.UInt32,
    "oracle_pages_0.99": pl.UInt32,
}


class Collector:
    """Collects from one family with a few options changed, into a new directory each time."""

    def __init__(self, zoo: Any, root: Path) -> None:
        self._zoo, self._root, self._count = zoo, root, 0
        self.rows = zoo.prompts(root / "rows.jsonl", LENGTHS)

    def options(self, family: str = "llama", **changes: Any) -> CollectOptions:
        self._count += 1
        held = {
            "model": str(self._zoo.directory(family)),
            "dataset": "jsonl",
            "data_dir": self.rows,
            "output": self._root / f"trace{self._count}",
            "steps": STEPS,
            "page_size": 8,
            "gammas": GAMMAS,
            "ignore_eos": True,
        }
        return CollectOptions(**held | changes)

    def __call__(self, family: str = "llama", loaded: Any = None, **changes: Any) -> Trace:
        options = self.options(family, **changes)
        collect(options, loaded=loaded or self._zoo.loaded(family))
        return Trace(options.output)


@pytest.fixture
def recorded(zoo: Any, tmp_path: Path) -> Collector:
    return Collector(zoo, tmp_path)


def rows(trace: Trace) -> pl.DataFrame:
    return trace.scan().collect()


def files(trace: Trace) -> dict[str, bytes]:
    return {str(p.relative_to(trace.path)): p.read_bytes() for p in trace.path.rglob("*") if p.is_file()}


class TestTrace:
    def test_schema_and_order(self, recorded: Collector):
        trace = recorded(estimators=("quest", "exact", "mvar"))
        frame = rows(trace)
        lists = dict.fromkeys(("share", "share_quest", "share_mvar"), pl.List(pl.Float16))
        assert dict(frame.schema) == {**SCALARS, **lists}
        assert len(frame) == len(LENGTHS) * 4 * 2 * STEPS
        for shard, length in zip(trace.shards, LENGTHS, strict=True):
            shard_rows = pl.read_parquet(shard.path)  # polars alone reads it
            assert shard_rows["request_id"].unique().to_list() == [shard.request_id]
            key = shard_rows.select("layer", "kv_head", "step").rows()
            assert key == [
                (layer, head, step) for layer in range(4) for head in range(2) for step in range(STEPS)
            ]
            assert shard_rows["position"].to_list() == [length + step for step in range(STEPS)] * 8
            assert (shard_rows["n_pages"] == shard_rows["position"] // 8 + 1).all()
            for name in lists:
                assert (shard_rows[name].list.len() == shard_rows["n_pages"]).all()
                sums = shard_rows[name].list.eval(pl.element().cast(pl.Float64)).list.sum()
                assert (sums - 1).abs().max() < 2**-11

    def test_real_longbench_rows(self, recorded: Collector):
        directory = shared("longbench/v1")
        options = {"dataset": "longbench", "data_dir": directory, "tasks": ("hotpotqa", "gov_report")}
        trace = recorded(**options, limit=1, max_prompt_tokens=120, chat=False)
        assert trace.requests["task"].to_list() == ["hotpotqa", "gov_report"]
        assert trace.requests["prompt_tokens"].to_list() == [120, 120]
        assert (trace.requests["dropped_tokens"] > 1000).all()  # the middle of a long document
        assert all(all(answers) and answers for answers in trace.requests["answers"].to_list())
        assert len(rows(trace)) == 2 * 4 * 2 * STEPS
        found = compare(trace, target_coverage=0.9)
        assert {line["rows"] for line in found} == {len(rows(trace))}

    def test_requests_table(self, recorded: Collector, zoo: Any):
        table = recorded(limit=2).requests
        assert table["request_id"].to_list() == ["rows-00000", "rows-00001"]
        first = table.row(0, named=True)
        prompt = json.loads(recorded.rows.read_text().splitlines()[0])["prompt"]
        assert first["prompt_ids"] == zoo.tokenizer(prompt).input_ids
        assert (first["dataset"], first["task"], first["status"]) == ("jsonl", "rows", "ok")
        assert (first["prompt_tokens"], first["decode_start"], first["dropped_tokens"]) == (37, 37, 0)
        assert (first["steps"], first["stop"], first["error"]) == (STEPS, "length", None)
        assert len(first["decoded_ids"]) == STEPS
        assert first["answers"] == []

    def test_manifest(self, recorded: Collector, zoo: Any):
        trace = recorded("gemma3", estimators=("mean",), seed=5)
        manifest = json.loads((trace.path / "manifest.json").read_text())
        assert (manifest["schema"], manifest["schema_version"]) == ("coverage-lab trace", 1)
        run = manifest["run"]
        assert run["estimators"] == ["exact", "mean"]
        assert (run["page_size"], run["steps"], run["decode"], run["seed"]) == (8, STEPS, "greedy", 5)
        assert run["gammas"] == list(GAMMAS)
        assert run["dataset"] == {
            "name": "jsonl",
            "files": {"rows.jsonl": hashlib.sha256(recorded.rows.read_bytes()).hexdigest()},
        }
        assert run["model"] == zoo.loaded("gemma3").identity
        assert {"coverage-lab", "device", "git", "polars", "python", "torch", "transformers"} <= set(
            run["versions"]
        )
        assert "output" not in run
        assert manifest["geometry"] == zoo.loaded("gemma3").geometry()
        windows = [layer["window"] for layer in manifest["geometry"]["layers"]]
        assert windows == [zoo.window, None] * 2
        assert manifest["share_rounding"] == ROUNDING["float16"]
        held = {name: data for name, data in files(trace).items() if name != "manifest.json"}
        assert {file["path"] for file in manifest["files"]} == set(held)
        for file in manifest["files"]:
            data = held[file["path"]]
            assert file["sha256"] == hashlib.sha256(data).hexdigest()
            assert file["bytes"] == len(data)
            assert file["rows"] == len(pl.read_parquet(data))

    def test_rounding_in_the_manifest_holds(self, recorded: Collector):
        half, single = recorded(), recorded(share_dtype="float32")
        assert rows(single).schema["share"] == pl.List(pl.Float32)
        difference = rows(half)["share"].explode().cast(pl.Float64) - rows(single)["share"].explode()
        assert 0 < difference.abs().max() <= half.manifest["share_rounding"]
        scalars = list(SCALARS)
        assert rows(half).select(scalars).equals(rows(single).select(scalars))


class TestRecords:
    def test_counts(self, recorded: Collector):
        shares, counts = recorded(), recorded(record="counts", estimators=("exact", "mvar"))
        assert list(rows(counts).columns) == list(SCALARS)
        assert rows(counts).equals(rows(shares).select(list(SCALARS)))
        assert counts.manifest["share_rounding"] == 0

    def test_no_gammas(self, recorded: Collector):
        frame = rows(recorded(gammas=()))
        assert not [column for column in frame.columns if column.startswith("oracle")]
        assert len(frame)

    def test_query_heads(self, recorded: Collector):
        frame = rows(recorded(record="query-heads", share_dtype="float32"))
        for name in ("share", "share_mvar"):
            heads = [frame[f"{name}_q{head}"].explode().to_numpy() for head in range(3)]
            np.testing.assert_allclose(np.mean(heads, 0), frame[name].explode().to_numpy(), atol=1e-6)
            assert np.abs(heads[0] - heads[1]).max() > 0.1
        assert not [column for column in frame.columns if column.endswith("_q3")]

    @pytest.mark.parametrize("family", ["llama", "mistral"])
    def test_tensors_reproduce_the_shares(self, recorded: Collector, zoo: Any, family: str):
        trace = recorded(family, record="tensors", tensor_steps=(0, 4), batch_size=2, share_dtype="float32")
        frame = rows(trace)
        for request in trace.requests.iter_rows(named=True):
            tensors = load_file(trace.path / "tensors" / f"{request['request_id']}.safetensors")
            assert set(tensors) == {f"{p}.{l}.{s}" for p in "qkv" for l in range(4) for s in (0, 4)}
            for step in (0, 4):
                tokens = request["prompt_tokens"] + step + 1
                held = min(tokens, zoo.window) if family == "mistral" else tokens
                for layer in range(4):
                    q, k, v = (tensors[f"{part}.{layer}.{step}"] for part in "qkv")
                    assert (q.shape, k.shape, v.shape) == ((6, 16), (2, held, 16), (2, held, 16))
                    for head in range(2):
                        logits = q[3 * head : 3 * head + 3] @ k[head].T / 4
                        weights = np.exp(logits - logits.max(1, keepdims=True))
                        page = np.arange(tokens - held, tokens) // 8
                        sums = np.stack(
                            [weights[:, page == p].sum(1) for p in range(page[0], page[-1] + 1)], 1
                        )
                        share = (sums / sums.sum(1, keepdims=True)).mean(0)
                        row = frame.filter(
                            request_id=request["request_id"], layer=layer, kv_head=head, step=step
                        )
                        np.testing.assert_allclose(row["share"].item().to_numpy(), share, atol=1e-5)

    def test_buffers_do_not_show(self, recorded: Collector, monkeypatch: pytest.MonkeyPatch):
        whole = recorded()
        monkeypatch.setattr(module, "_BUFFER_BYTES", 1)  # a buffer is emptied after every step
        assert rows(recorded()).equals(rows(whole))


class TestDecoding:
    def test_greedy_tokens_are_those_of_generate(self, recorded: Collector, zoo: Any, family: str):
        model = zoo.loaded(family).model
        greedy = GenerationConfig(max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
        for request in recorded(family, batch_size=3).requests.iter_rows(named=True):
            prompt = torch.tensor([request["prompt_ids"]])
            ids = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy, eos_token_id=None
            )
            assert request["decoded_ids"] == ids[0, prompt.shape[1] :].tolist()

    def test_end_of_sequence(self, recorded: Collector, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        """The third token of the longest prompt ends it and is not fed; that of another prompt goes on."""
        loaded = zoo.loaded("llama")
        free = recorded().requests["decoded_ids"].to_list()
        stop = next(token for token in free[2][1:] if token not in free[2][0:1] and token not in free[0])
        at = free[2].index(stop)
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [stop, 319])
        for batch_size in (1, 3):
            trace = recorded(ignore_eos=False, batch_size=batch_size)
            table = trace.requests
            assert len(rows(trace).filter(request_id="rows-00002")) == 4 * 2 * at
            assert table["decoded_ids"].to_list()[2] == free[2][:at]
            assert table["stop"].to_list()[2] == "eos"
            assert table["steps"].to_list()[2] == at
            assert table.row(0, named=True)["decoded_ids"] == free[0]
            assert table.row(0, named=True)["stop"] == "length"
        assert recorded(ignore_eos=True).requests["decoded_ids"].to_list() == free

    def test_end_at_once_leaves_no_rows(self, recorded: Collector, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        first = recorded().requests["decoded_ids"].to_list()[1][0]
        monkeypatch.setattr(zoo.loaded("llama").model.generation_config, "eos_token_id", first)
        trace = recorded(ignore_eos=False)
        row = trace.requests.row(1, named=True)
        assert (row["steps"], row["stop"], row["status"], row["decoded_ids"]) == (0, "eos", "ok", [])
        assert "rows-00001" not in [shard.request_id for shard in trace.shards]

    def test_forced(self, recorded: Collector, zoo: Any, tmp_path: Path):
        data = zoo.prompts(tmp_path / "answered.jsonl", LENGTHS, answer="fish on the mill")
        reference = zoo.tokenizer("fish on the mill", add_special_tokens=False).input_ids
        for batch_size in (1, 3):
            options = {"data_dir": data, "decode": "forced", "batch_size": batch_size, "ignore_eos": False}
            table = recorded(**options, steps=40).requests
            assert table["decoded_ids"].to_list() == [reference] * 3
            assert table["stop"].to_list() == ["reference"] * 3
            short = recorded(**options, steps=2).requests
            assert short["decoded_ids"].to_list() == [reference[:2]] * 3
            assert short["stop"].to_list() == ["length"] * 3

    def test_order_and_neighbours_do_not_matter(self, recorded: Collector, zoo: Any, tmp_path: Path):
        """A request's rows are the same in another order, after other requests and in other batches."""
        forward = recorded("gemma3")
        lines = recorded.rows.read_text().splitlines(keepends=True)
        (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
        turned = recorded("gemma3", data_dir=tmp_path / "turned.jsonl")
        again = recorded("gemma3", limit=2)
        for index in range(3):
            mine = rows(forward).filter(request_id=f"rows-0000{index}").drop("request_id")
            assert len(mine)
            assert mine.equals(rows(turned).filter(request_id=f"turned-0000{2 - index}").drop("request_id"))
            if index < 2:
                assert mine.equals(rows(again).filter(request_id=f"rows-0000{index}").drop("request_id"))

    def test_one_bos(self, recorded: Collector, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        tokenizer = zoo.loaded("llama").tokenizer
        template = "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}: "
        for held, chat in ((None, None), (template, True)):
            monkeypatch.setattr(tokenizer, "chat_template", held)
            for ids in recorded(chat=chat).requests["prompt_ids"].to_list():
                assert ids.count(tokenizer.bos_token_id) == 1
                assert ids[0] == tokenizer.bos_token_id


class TestCost:
    def test_no_tensor_of_query_heads_times_tokens_times_d(self, recorded: Collector, zoo: Any):
        """KV heads are not repeated: nothing the recorder makes is larger than one layer's keys."""
        largest = 0

        class Sizes(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                nonlocal largest
                result = function(*args, **(kwargs or {}))
                for tensor in filter(torch.is_tensor, result if isinstance(result, tuple) else (result,)):
                    largest = max(largest, tensor.untyped_storage().nbytes() // 4)
                return result

        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 12, 1, 32, generator=generator)
        key = torch.randn(1, 2, 256, 32, generator=generator)
        call = AttentionCall(0, query, key, key, 0.2, None, None, None, lambda: (query.transpose(1, 2),))
        recorder = RequestRecorder(16, {name: estimators.get(name)() for name in ("mvar", "mean", "quest")})
        with Sizes():
            recorder.see(call, 0, 255, None)
            recorder.see(call, 0, 256, 0)
        assert key.numel() // 4 <= largest <= key.numel()

    def test_recording_waits_for_nothing(self, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        """On a GPU `item` and the like stop the host until the device has come so far."""
        waits: list[str] = []

        class Waits(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if function.name() in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"):
                    waits.append(function.name())
                return function(*args, **(kwargs or {}))

        see = RequestRecorder.see

        def watched(recorder: RequestRecorder, *arguments: Any) -> None:
            with Waits():
                see(recorder, *arguments)

        monkeypatch.setattr(RequestRecorder, "see", watched)
        held = {"mvar": estimators.get("mvar")()}
        recorders = [RequestRecorder(8, held, padding) for padding in (0, 9)]
        decode_batch(zoo.loaded("gemma3"), [[5] * 30, [6] * 21], recorders, STEPS)
        assert not waits
        assert len(recorders[1].take()[0]) == STEPS

    def test_summary(self, recorded: Collector, zoo: Any):
        options = recorded.options()
        seen: list[Any] = []

        class Reporter:
            def begin(self, total: int, done: int, plan: str) -> None:
                seen.append((total, done, plan))

            def request(self, request: dict[str, Any], seconds: float) -> None:
                seen.append(request["request_id"])

        summary = collect(options, Reporter(), zoo.loaded("llama"))
        plan = f"3 prompts of 21 to 60 tokens (no chat template), up to {STEPS} steps each"
        assert seen == [(3, 0, plan), "rows-00000", "rows-00001", "rows-00002"]
        trace = Trace(options.output)
        assert summary.requests == {"ok": 3}
        assert (summary.rows, summary.steps) == (len(rows(trace)), 3 * STEPS)
        assert summary.errors == ()
        assert summary.bytes == sum(file["bytes"] for file in trace.manifest["files"])

    def test_finished_trace_is_left_alone(self, recorded: Collector, zoo: Any):
        options = recorded.options()
        first = collect(options, loaded=zoo.loaded("llama"))
        before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in options.output.rglob("*")}
        again = collect(options, loaded=zoo.loaded("llama"))
        assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in options.output.rglob("*")} == before
        assert (again.rows, again.bytes) == (first.rows, first.bytes)
