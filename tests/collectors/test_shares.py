"""Recorded rows against numpy in float64, from the q and K of one forward pass without a cache."""

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from coverage_lab.collectors.attention import cache_argument, observed_attention
from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.policies.estimators import estimators
from coverage_lab.trace import Trace

GAMMAS = (0.5, 0.9, 0.95, 0.98, 0.99)
ESTIMATES = ("mvar", "mean", "quest")
TOLERANCE = 5e-4
TIE = 1e-6  # a float32 sum this close to gamma may fall on either side of it


@dataclass(frozen=True)
class Layer:
    """What one layer was given: `[query heads, T, D]`, `[KV heads, T, D]` and `[T, T]`."""

    query: np.ndarray
    key: np.ndarray
    visible: np.ndarray


def layers_seen(model: PreTrainedModel, ids: list[int]) -> list[Layer]:
    """Run all tokens at once, by eager attention of our own registration that keeps q, K and the mask."""
    kept = {}

    def keep(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        arrays = [tensor[0].double().numpy() for tensor in (query, key)]
        kept[module.layer_idx] = Layer(*arrays, visible=(mask[0, 0] == 0).numpy())
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **options)

    AttentionInterface.register("keeping", keep)
    AttentionMaskInterface.register("keeping", AttentionMaskInterface()["eager"])
    base = model.config._attn_implementation
    model.set_attn_implementation("keeping")
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    model.set_attn_implementation(base)
    return [kept[index] for index in sorted(kept)]


class Expected:
    """One row, computed with loops.

    Parameters
    ----------
    layer : Layer
    kv_head, position, page_size : int
    scaling, softcap : float
    """

    def __init__(
        self, layer: Layer, kv_head: int, position: int, page_size: int, scaling: float, softcap: float | None
    ) -> None:
        group = len(layer.query) // len(layer.key)
        self.queries = scaling * layer.query[kv_head * group : (kv_head + 1) * group, position]
        self.keys, self.softcap, self.size = layer.key[kv_head], softcap, page_size
        tokens = np.flatnonzero(layer.visible[position])
        assert tokens[-1] == position
        self.pages: dict[int, list[int]] = {}
        for token in tokens.tolist():
            self.pages.setdefault(token // page_size, []).append(token)
        logits = [self.cap(self.keys @ q) for q in self.queries]
        self.masses = np.array(
            [[math.log(sum(np.exp(row[tokens]))) for tokens in self.pages.values()] for row in logits]
        )
        self.heads = softmax(self.masses)
        self.share = self.heads.mean(0)
        self.log_total = np.mean([math.log(sum(np.exp(row))) for row in self.masses])
        self.entropy = -sum(p * math.log(p) for p in self.share if p > 0)

    def cap(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap)

    def covered(self, pages: int) -> float:
        return float(np.sort(self.share)[::-1][:pages].sum())

    def oracle(self, gamma: float) -> int:
        return next(n for n in range(1, len(self.share) + 1) if self.covered(n) >= gamma - 1e-12)

    def estimate(self, name: str) -> np.ndarray:
        """Return `[G, pages]` shares; of all pages only the sink page and the current one are exact."""
        masses = self.masses.copy()
        for column, (page, tokens) in enumerate(self.pages.items()):
            if page == 0 or column == len(self.pages) - 1:
                continue
            keys = self.keys[page * self.size : (page + 1) * self.size]
            low, high, mean, variance = keys.min(0), keys.max(0), keys.mean(0), keys.var(0)
            for head, q in enumerate(self.queries):
                logit = {
                    "quest": np.maximum(q * low, q * high).sum(),
                    "mean": q @ mean,
                    "mvar": q @ mean + 0.5 * (q**2 @ variance),
                }[name]
                # Of a page that the window cuts, the part that is visible counts.
                masses[head, column] = self.cap(logit) + math.log(len(tokens))
        return softmax(masses)


def softmax(masses: np.ndarray) -> np.ndarray:
    powers = np.exp(masses - masses.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@dataclass
class Tally:
    """Oracle counts compared, and those that a tie within rounding decided otherwise."""

    counts: int = 0
    ties: int = 0

    def compare(self, expected: Expected, row: dict[str, Any]) -> None:
        counts = [row[f"oracle_pages_{gamma:g}"] for gamma in GAMMAS]
        assert all(a <= b for a, b in pairwise(counts))
        for gamma, count in zip(GAMMAS, counts, strict=True):
            self.counts += 1
            want = expected.oracle(gamma)
            if count != want:
                self.ties += 1
                assert abs(expected.covered(min(count, want)) - gamma) < TIE


def check_rows(trace: Trace, model: PreTrainedModel, tally: Tally) -> list[float]:
    """Check every row and column of a trace with query heads.

    Returns the entropies of the rows with more than two pages, relative to the most they can be.
    """
    scalar = getattr(model.config, "query_pre_attn_scalar", model.model.layers[0].self_attn.head_dim)
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    entropies = []
    for request in trace.requests.iter_rows(named=True):
        layers = layers_seen(model, request["prompt_ids"] + request["decoded_ids"])
        rows = trace.scan().filter(request_id=request["request_id"]).collect()
        kv_heads = len(layers[0].key)
        assert len(rows) == len(layers) * kv_heads * request["steps"]
        for row in rows.iter_rows(named=True):
            position = request["prompt_tokens"] + row["step"]
            want = Expected(
                layers[row["layer"]], row["kv_head"], position, trace.page_size, scalar**-0.5, softcap
            )
            assert row["position"] == position
            assert row["n_pages"] == len(want.pages)
            assert row["first_page"] == min(want.pages)
            assert row["log_total"] == pytest.approx(want.log_total, abs=1e-4)
            assert row["entropy"] == pytest.approx(want.entropy, abs=1e-4)
            near(row["share"], want.share)
            for name in ESTIMATES:
                heads = want.estimate(name)
                near(row[f"share_{name}"], heads.mean(0))
                for head, share in enumerate(heads):
                    near(row[f"share_{name}_q{head}"], share)
            for head, share in enumerate(want.heads):
                near(row[f"share_q{head}"], share)
            tally.compare(want, row)
            if len(want.pages) > 2:
                entropies.append(want.entropy / math.log(len(want.pages)))
    return entropies


def near(share: list[float], want: np.ndarray) -> None:
    assert len(share) == len(want)
    assert np.abs(np.array(share) - want).max() < TOLERANCE


TALLY = Tally()
LENGTHS = (96, 109, 67)  # whole pages of 4 and 16; one short of a fourth of a page; pages fill on the way
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def oracle_counts_differ_at_ties_only() -> Iterator[None]:
    """Checked over the rows of all models together, when they are done."""
    yield
    assert TALLY.ties <= max(1, TALLY.counts / 1000)  # one alone where few rows were chosen to run


class TestTinyModels:
    @pytest.mark.parametrize("page_size", [4, 16])
    def test_rows_equal_float64(self, zoo: Any, family: str, page_size: int, tmp_path: Path):
        loaded = zoo.loaded(family)
        options = {
            "model": str(zoo.directory(family)),
            "dataset": "jsonl",
            "data_dir": zoo.prompts(tmp_path / "rows.jsonl", LENGTHS),
            "steps": STEPS,
            "ignore_eos": True,
            "page_size": page_size,
            "estimators": ESTIMATES,
            "gammas": GAMMAS,
            "record": "query-heads",
        }
        traces = {}
        for batch_size, share_dtype in ((1, "float16"), (3, "float32")):
            output = tmp_path / f"batch{batch_size}"
            collect(
                CollectOptions(**options, output=output, batch_size=batch_size, share_dtype=share_dtype),
                loaded=loaded,
            )
            traces[batch_size] = Trace(output)
        assert traces[1].requests["prompt_tokens"].to_list() == list(LENGTHS)

        entropies = check_rows(traces[1], loaded.model, TALLY)
        assert min(entropies) < 0.6 < max(entropies)  # neither flat nor all alike
        self.check_equal(traces[1], traces[3])

    def test_window_of_one_page(self, zoo: Any, tmp_path: Path):
        """A page must be summarised in the step that fills it: in the next one its first key is gone."""
        directory = zoo.save(zoo.build("mistral", sliding_window=8), "one-page-window")
        loaded = load_model(str(directory), device="cpu")
        options = CollectOptions(
            model=str(directory),
            dataset="jsonl",
            data_dir=zoo.prompts(tmp_path / "rows.jsonl", (29, 32)),
            output=tmp_path / "trace",
            steps=20,
            ignore_eos=True,
            page_size=8,
            estimators=ESTIMATES,
            gammas=GAMMAS,
            record="query-heads",
            batch_size=2,
        )
        collect(options, loaded=loaded)
        check_rows(Trace(options.output), loaded.model, TALLY)

    @staticmethod
    def check_equal(alone: Trace, batched: Trace) -> None:
        """What a request's rows are does not depend on its batch."""
        columns = ["request_id", "prompt_ids", "decoded_ids", "steps", "stop"]
        assert alone.requests.select(columns).equals(batched.requests.select(columns))
        one, three = alone.scan().collect(), batched.scan().collect()
        for name, dtype in one.schema.items():
            if dtype.is_nested():
                differences = (one[name].explode().cast(pl.Float64) - three[name].explode()).abs()
                assert differences.max() < TOLERANCE, name
            elif dtype.is_float():
                assert (one[name] - three[name]).abs().max() < 1e-4, name
            elif not name.startswith("oracle"):
                assert one[name].equals(three[name]), name
            else:
                assert (one[name] != three[name]).mean() < 1e-3, name


class TestSmolLM2:
    """The packaged model; where nobody used it before, it is converted first, which takes a minute."""

    @pytest.fixture(scope="class")
    def loaded(self) -> LoadedModel:
        return load_model("smollm2", "float32", "cpu")

    @pytest.fixture(scope="class")
    def trace(self, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Trace:
        options = CollectOptions(
            model="smollm2",
            dataset="docs",
            output=tmp_path_factory.mktemp("smollm2") / "trace",
            limit=1,
            max_prompt_tokens=300,
            steps=4,
            page_size=16,
            estimators=ESTIMATES,
            gammas=GAMMAS,
            record="query-heads",
            device="cpu",
        )
        collect(options, loaded=loaded)
        return Trace(options.output)

    def test_rows_equal_float64(self, loaded: LoadedModel, trace: Trace):
        tally = Tally()
        check_rows(trace, loaded.model, tally)
        assert tally.counts == 30 * 3 * 4 * len(GAMMAS)
        assert tally.ties <= tally.counts / 1000

    def test_logits_do_not_change(self, loaded: LoadedModel, trace: Trace):
        request = trace.requests.row(0, named=True)
        assert request["prompt_tokens"] == 300
        pieces = [request["prompt_ids"], *([token] for token in request["decoded_ids"])]
        recorder = RequestRecorder(16, {name: estimators.get(name)() for name in ESTIMATES})
        plain, recorded = [], []
        with torch.inference_mode():
            for logits, observed in ((plain, False), (recorded, True)):
                held = {cache_argument(loaded.model): DynamicCache(config=loaded.model.config)}
                for step, piece in enumerate(pieces, start=-1):
                    see = partial(recorder.see, row=0, cached=301 + step, step=None if step < 0 else step)
                    with observed_attention(loaded.model, see) if observed else nullcontext():
                        logits.append(
                            loaded.model(torch.tensor([piece]), use_cache=True, **held).logits[0, -1]
                        )
        torch.testing.assert_close(torch.stack(recorded), torch.stack(plain), atol=1e-5, rtol=0)
        assert [int(step.argmax()) for step in plain[:-1]] == request["decoded_ids"]
        assert len(recorder.take()[29]) == 4
