"""Models that decode under a policy: against themselves, and against float64."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)

from coverage_lab.collectors.attention import AttentionCall
from coverage_lab.collectors.models import LoadedModel, probe
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.collectors.summaries import PageSummaries
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.budgets.profiled import Profile
from coverage_lab.policies.estimators import estimators
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.block import Block, geometry
from coverage_lab.replay.choice import Selector, choose
from coverage_lab.replay.replay import PreparedRequest, Replayed, replay_request
from coverage_lab.replay.report import CONTROL, replay, summarize
from coverage_lab.replay.requests import is_degenerate

PAGE = 8
WINDOW = 22  # begins within a page
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, **ALTERNATING, attn_logit_softcapping=8.0, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **ALTERNATING, num_local_experts=2, num_experts_per_tok=1),
}
GENERATOR = torch.Generator().manual_seed(0)
PROMPT = torch.randint(64, (70,), generator=GENERATOR).tolist()
DECODED = torch.randint(64, (12,), generator=GENERATOR).tolist()


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        kind = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
        model = AutoModelForCausalLM.from_config(config(), attn_implementation=kind).eval()
        found[name] = LoadedModel(model, None, *probe(model), {})  # type: ignore[arg-type]
    return found


def call_of(position: int, window: int | None = None, sinks: bool = False, softcap: float | None = None):
    generator = torch.Generator().manual_seed(position)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return AttentionCall(
        layer=0,
        query=normal(1, 6, 1, 16),
        key=normal(1, 2, position + 1, 16),
        value=normal(1, 2, position + 1, 16),
        scaling=0.3,
        window=window,
        softcap=softcap,
        sinks=normal(6) if sinks else None,
        compute=lambda: (torch.empty(1, 1, 6, 16),),
    )


def replayed(loaded: LoadedModel, *policies: str, lists: Any = "live", **options: Any) -> list[Any]:
    parsed = [parse_policy(text) for text in policies]
    return replay_request(loaded, PROMPT, DECODED, parsed, PAGE, lists, **options)


@pytest.mark.parametrize("lists", ["live", "recorded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_page_kept_is_the_dense_model(models: dict[str, LoadedModel], family: str, lists: str):
    (found,) = replayed(models[family], "exact/coverage:1", lists=lists)
    assert found.kl.shape == (12,)
    assert found.kl.max() <= 1e-6
    assert found.agree.all()
    assert found.counts["kept"] == found.counts["pages"]
    assert torch.allclose(found.realised, torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("lists", ["live", "recorded"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "text",
    [
        "mvar/coverage:0.8",
        "ffd/delta:2@query_head",
        "exact/fixed:3@layer",
        "mvar/coverage:0.5,compensate=mean",
        "int4/coverage:0.8,page_size=1@query_head within quest/fixed:8,page_size=4@query_head",
    ],
)
def test_steps_together_are_steps_one_by_one(
    models: dict[str, LoadedModel], family: str, text: str, lists: str, monkeypatch: pytest.MonkeyPatch
):
    """Causal attention lets all tokens that are known go through a layer together."""
    found = []
    for block in (64, 5, 1):
        monkeypatch.setattr("coverage_lab.replay.replay.BLOCK", block)
        (one,) = replayed(models[family], text, lists=lists)
        found.append(one)
    for other in found[1:]:
        assert other.counts == found[0].counts
        assert torch.allclose(other.kl, found[0].kl, rtol=1e-3, atol=1e-6)
        assert torch.allclose(other.realised.sort().values, found[0].realised.sort().values, atol=1e-5)


@pytest.mark.parametrize("estimator", ["mvar", "ffd", "quest", "int2"])
@pytest.mark.parametrize("options", [{}, {"window": WINDOW}, {"window": WINDOW, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("steps", [1, 12])
def test_masses_are_those_that_a_recording_has(estimator: str, options: dict[str, Any], steps: int):
    call, size, cached = call_of(45, **options), 4, 46
    made = estimators.get(estimator)()
    recorder = RequestRecorder(size, {estimator: made})
    for step in range(46):
        part = replace(
            call,
            query=call.query.roll(step, -1),
            key=call.key[:, :, : step + 1],
            value=call.value[:, :, : step + 1],
        )
        recorder.see(part, 0, step + 1, step)
    recorded = recorder.take()[0][cached - steps :]
    queries = torch.cat([call.query.roll(step, -1) for step in range(cached - steps, cached)], 2)
    # A sliding window has forgotten what no step sees.
    forgotten = 0 if call.window is None else cached - steps + 1 - call.window
    together = replace(
        call, query=queries, key=call.key[:, :, forgotten:], value=call.value[:, :, forgotten:]
    )
    summaries = PageSummaries(made, size)
    for seen in (cached - steps, cached):
        summaries.extend(0, call.key[0, :, :seen], 0)
    block = Block(together, cached, size)
    for found, place in ((block.exact, 0), (block.estimate(summaries), 1)):
        for step, wanted in enumerate(recorded):
            rows = found[2 * step : 2 * step + 2]
            pages = wanted.shape[-1]
            assert torch.allclose(rows[..., :pages], wanted[place], atol=1e-4)
            assert (rows[..., pages:] == -torch.inf).all()
    assert block.geometry.rows.n_pages[::2].tolist() == [wanted.shape[-1] for wanted in recorded]


@pytest.mark.parametrize("lists", ["live", "recorded"])
def test_fewer_pages_are_further_from_dense(models: dict[str, LoadedModel], lists: str):
    texts = [f"exact/coverage:{gamma}" for gamma in (0.95, 0.8, 0.5)]
    found = replayed(models["llama"], *texts, lists=lists)
    reads = [one.counts["kept"] / one.counts["pages"] for one in found]
    assert 1 > reads[0] > reads[1] > reads[2] > 0
    divergences = [float(one.kl.mean()) for one in found]
    assert divergences == sorted(divergences)
    assert divergences[-1] > 1e-3
    for gamma, one in zip((0.95, 0.8, 0.5), found, strict=True):
        # The dense run's lists hold so much of the dense run's mass, and not of the sparse run's.
        assert one.realised.min() >= gamma - 1e-5 or lists == "recorded"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "text",
    ["mvar/coverage:0.8", "mean/fixed:3", "quest/proportional:0.4@query_head", "exact/window:2@layer"],
)
def test_every_kind_of_policy_runs(models: dict[str, LoadedModel], family: str, text: str):
    for lists in ("live", "recorded"):
        (found,) = replayed(models[family], text, lists=lists)
        assert found.kl.isfinite().all()
        assert 0 < found.counts["kept"] < found.counts["pages"]
        assert ((found.realised > 0) & (found.realised <= 1 + 1e-5)).all()


def test_layers_can_stay_dense(models: dict[str, LoadedModel]):
    (whole, half) = replayed(models["llama"], "exact/fixed:2", "exact/fixed:2,dense_layers=0")
    pages = whole.counts["pages"] // 2
    assert half.counts["kept"] == pages + whole.counts["kept"] // 2
    assert float(half.kl.mean()) < float(whole.kl.mean())


def test_the_model_is_as_before(models: dict[str, LoadedModel]):
    model = models["llama"].model
    before = model.config._attn_implementation
    ids = torch.tensor([PROMPT])
    logits = model(ids).logits
    replayed(models["llama"], "exact/fixed:2")
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, logits)


PUBLISHED = {
    "FFD": "ffd/delta:2@query_head",
    "FFD, local": "ffd/delta:2,local=2,page_size=4@query_head",
    "Twilight": "int4/coverage:0.8,page_size=1@query_head within quest/fixed:8,page_size=4@query_head",
    "Quest": "quest/fixed:tokens=24,page_size=4@query_head",
    "CompKV": "mvar/coverage:0.7,compensate=mean",
    "sampled keys": "sampled/coverage:0.8",
    "token oracle": "exact/coverage:0.8,page_size=1",
    "large pages": "mvar/coverage:0.5,page_size=16",
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_methods_run(models: dict[str, LoadedModel], family: str, name: str):
    found = {}
    for lists in ("live", "recorded"):
        (found[lists],) = replayed(models[family], PUBLISHED[name], lists=lists)
        assert found[lists].kl.isfinite().all()
        assert 0 < found[lists].counts["kept"] < found[lists].counts["pages"]
        assert 0 < found[lists].counts["values"] < found[lists].counts["dense_values"]
    assert found["live"].counts["pages"] == found["recorded"].counts["pages"]


def test_the_oracle_of_tokens_reads_less_than_that_of_pages(models: dict[str, LoadedModel]):
    pages, tokens = replayed(models["llama"], "exact/coverage:0.8", "exact/coverage:0.8,page_size=1")
    reads = [one.counts["kept"] / one.counts["pages"] for one in (pages, tokens)]
    assert reads[1] < 0.8 * reads[0]
    for one in (pages, tokens):
        assert one.realised.min() >= 0.8 - 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_compensation_brings_the_answer_closer(models: dict[str, LoadedModel], family: str):
    """With the exact mass of what is dropped only the values are off."""
    plain, mended = replayed(models[family], "exact/fixed:3", "exact/fixed:3,compensate=mean")
    assert float(mended.kl.mean()) < 0.8 * float(plain.kl.mean())


def test_what_stands_in_has_the_estimated_mass(models: dict[str, LoadedModel]):
    """Also where the estimate does not choose."""
    found = replayed(
        models["llama"], *(f"{name}/window:2,compensate=mean" for name in ("exact", "mvar", "mean"))
    )
    divergences = [float(one.kl.mean()) for one in found]
    assert len(set(divergences)) == 3
    assert divergences[0] == min(divergences)


def test_recorded_lists_leave_no_trace_of_the_dense_run(models: dict[str, LoadedModel]):
    """What stands in for dropped pages is estimated from the keys that the sparse run has."""
    policy = parse_policy("mean/fixed:2,compensate=mean")
    prompt, fed = PROMPT[:42], DECODED  # the page of token 42 is filled by the run
    (found,) = replay_request(models["llama"], prompt, fed, [policy], PAGE, "recorded")
    selector = Selector(policy, PAGE, torch.float32)
    request = PreparedRequest(models["llama"], prompt, fed, [selector])
    fresh = selector.fork()
    (chosen,) = request.decode_dense(choose=True)
    wanted, other = (request.decode(own, "reference", chosen).kl for own in (fresh, selector))
    assert torch.equal(found.kl, wanted)
    assert not torch.equal(found.kl, other)


class TestCandidates:
    """One policy chooses within the candidates of another."""

    CALL = call_of(45)

    def selector(self, text: str) -> Selector:
        return Selector(parse_policy(text), PAGE)

    def found(self, text: str):
        selector = self.selector(text)
        for cached in (40, 46):
            short = replace(self.CALL, key=self.CALL.key[:, :, :cached], value=self.CALL.value[:, :, :cached])
            selector.see(short, cached)
        return selector.choose(self.CALL, 46)

    def masses(self, page: int) -> Tensor:
        """Exact log masses `[KV heads, G, P]` in float64."""
        query = self.CALL.query[0, :, 0].double().view(2, 3, 16) * self.CALL.scaling
        logits = query @ self.CALL.key[0].double().mT
        parts = logits.split(page, -1)
        return torch.stack([part.logsumexp(-1) for part in parts], -1)

    @pytest.mark.parametrize("size", [4, 16])
    @pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
    def test_pages_of_both_sizes(self, size: int, granularity: str):
        first, second = self.masses(size), self.masses(PAGE)
        found = self.found(
            f"exact/coverage:0.8@{granularity} within exact/fixed:3,page_size={size}@query_head"
        )
        last, wanted = 45 // PAGE, set()
        for head in range(2):
            allowed = []
            for masses in first[head]:
                # The sink, the page of the query, and the best one of the others.
                end = len(masses) - 1
                best = {1 + int(masses[1:end].argmax())} if end > 1 else set()
                pages = {0, end} | best
                allowed.append({token // PAGE for token in range(46) if token // size in pages})
            masses = second[head].clone()
            for group in range(3):
                outside = [page for page in range(last + 1) if page not in allowed[group]]
                masses[group, outside] = -torch.inf
            shares = masses.softmax(-1)
            lists = shares if granularity == "query_head" else shares.mean(0, keepdim=True)
            kept: set[int] = set()
            for share in lists:
                mine = {0, last}
                for page in sorted(range(last + 1), key=lambda page: -float(share[page])):
                    if float(share[list(mine)].sum()) >= 0.8:
                        break
                    mine.add(page)
                kept |= mine
            wanted = kept & set.union(*allowed)
            assert set(found.kept[head].nonzero()[:, 0].tolist()) == wanted

    def test_candidates_of_candidates(self):
        alone = self.found("exact/fixed:3")
        for middle in ("exact/coverage:1", "mean/fixed:5", "exact/coverage:1@query_head"):
            found = self.found(f"exact/coverage:1 within {middle} within exact/fixed:3")
            assert torch.equal(found.kept & alone.kept, found.kept)
            assert found.kept.sum() > 2 * 2  # more than the forced pages
        chained = self.found("exact/coverage:1 within exact/coverage:1 within exact/fixed:3")
        assert torch.equal(chained.kept, alone.kept)
        # Of both heads: three pages twice, and all six once; an exact estimate reads the keys.
        assert chained.values == (2 * 3 + 6) * 2 * PAGE * 16

    def test_everything_is_kept_of_the_candidates_only(self):
        found = self.found("exact/coverage:1 within exact/fixed:3")
        alone = self.found("exact/fixed:3")
        assert torch.equal(found.kept, alone.kept)
        assert found.values == 3 * 2 * PAGE * 16 + 6 * 2 * PAGE * 16


@pytest.mark.parametrize(
    "options", [{}, {"window": WINDOW}, {"sinks": True}, {"softcap": 2.0}, {"window": 5, "sinks": True}]
)
@pytest.mark.parametrize("compensated", [False, True])
def test_attention_over_pages(options: dict[str, Any], compensated: bool):
    """Token by token in float64."""
    position = 45
    call = call_of(position, **options)
    window = call.window or position + 1
    first = (position + 1 - window) // PAGE
    pages = position // PAGE + 1 - first
    kept = torch.rand(2, pages, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[:, -1] = True
    masses = torch.randn(2, 3, pages, generator=torch.Generator().manual_seed(2)) + 2 if compensated else None
    found = Block(call, position + 1, PAGE).attend(kept, masses)
    assert found.shape == (1, 1, 6, 16)
    for head in range(6):
        tokens = [
            token
            for token in range(position + 1 - window, position + 1)
            if kept[head // 3, token // PAGE - first]
        ]
        query = call.query[0, head, 0].double() * call.scaling
        logits = [float(query @ call.key[0, head // 3, token].double()) for token in tokens]
        if call.softcap:
            logits = [call.softcap * math.tanh(logit / call.softcap) for logit in logits]
        weights = [math.exp(logit) for logit in logits]
        values = [call.value[0, head // 3, token].double() for token in tokens]
        for page in (~kept[head // 3]).nonzero()[:, 0].tolist() if masses is not None else ():
            inside = [
                call.value[0, head // 3, token].double()
                for token in range(position + 1 - window, position + 1)
                if token // PAGE - first == page
            ]
            weights.append(math.exp(masses[head // 3, head % 3, page]))
            values.append(sum(inside) / len(inside))
        total = math.fsum(weights) + (math.exp(call.sinks[head]) if call.sinks is not None else 0.0)
        wanted = sum(weight / total * value for weight, value in zip(weights, values, strict=True))
        assert torch.allclose(found[0, 0, head].double(), wanted, atol=1e-5)


class TestChoice:
    MASSES = 2 * torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0))
    ROWS = geometry(9 * PAGE - 2, 1, None, PAGE, 4, 2, torch.device("cpu")).rows

    def chosen(self, text: str) -> Tensor:
        return choose(parse_policy(text), self.MASSES[1], self.ROWS, 4)

    def test_a_list_for_every_kv_head(self):
        shares = self.MASSES[1].softmax(-1).mean(1)
        kept = self.chosen("mvar/fixed:4")
        for head in range(2):
            merit = sorted(range(1, 8), key=lambda page: -float(shares[head, page]))[:2]
            assert kept[head].nonzero()[:, 0].tolist() == sorted([0, 8, *merit])

    def test_query_heads_read_the_union(self):
        kept = self.chosen("mvar/fixed:3@query_head")
        shares = self.MASSES[1].softmax(-1)
        for head in range(2):
            wanted = {0, 8} | {1 + int(shares[head, group, 1:8].argmax()) for group in range(3)}
            assert set(kept[head].nonzero()[:, 0].tolist()) == wanted

    def test_a_layer_has_one_list(self):
        kept = self.chosen("mvar/coverage:0.7@layer")
        assert torch.equal(kept[0], kept[1])
        mean = self.MASSES[1].softmax(-1).mean((0, 1))
        assert float(mean[kept[0]].sum()) >= 0.7

    def test_dense_layers(self):
        policy: Policy = replace(parse_policy("mvar/fixed:2"), dense_layers=(4,))
        assert choose(policy, self.MASSES[1], self.ROWS, 4).all()


@pytest.mark.parametrize("lists", ["live", "recorded"])
def test_reads_of_the_oracle_sets(models: dict[str, LoadedModel], lists: str):
    """The rule on exact shares keeps the oracle set and the forced pages, where its own queries choose."""
    (found,) = replayed(models["llama"], "exact/coverage:0.95", lists=lists)
    rows = 2 * 2 * 12
    counts = found.counts
    assert 0 < counts["oracle"] <= counts["pages"]
    if lists == "live":
        assert counts["oracle"] <= counts["kept"] <= counts["oracle"] + 2 * rows


def test_lines_of_the_summary():
    base = {"steps": 10, "agreement": 1.0, "kept": 10, "pages": 100, "coverage_mean": 0.5, "kl": [0.1] * 10}
    base |= {
        "oracle_pages": 5,
        "reads_metadata": 0.01,
        "nll_mean": None,
        "backend": "reference",
        "rows_below": 0.25,
    }
    long = {"steps": 20, "kl": [0.4] * 20}
    records = [
        {"policy": CONTROL, "request_id": "short", **base, "kl_mean": 0.0},
        {"policy": CONTROL, "request_id": "long", **base, **long, "kl_mean": 0.0},
        {"policy": "a", "request_id": "short", **base, "kl_mean": 0.1, "nll_mean": 1.0},
        {"policy": "a", "request_id": "long", **base, **long, "kl_mean": 0.4, "kept": 50}
        | {"agreement": 0.7, "nll_mean": 2.0},
        # Requests are told by their names, whatever their order.
        {"policy": "b", "request_id": "long", **base, **long, "kl_mean": 0.3},
        {"policy": "b", "request_id": "short", **base, "kl_mean": 0.2},
    ]
    control, first, second = summarize(records)
    assert [math.isnan(control[name]) for name in ("vs_first", "lower")] == [True, True]
    assert (first["policy"], first["requests"], first["steps"]) == ("a", 2, 30)
    assert first["kl_p99"] == pytest.approx(0.4)
    assert first["perplexity"] == pytest.approx(math.exp((10 * 1 + 20 * 2) / 30))
    assert second["perplexity"] is None
    assert second["rows_below"] == pytest.approx(0.25)
    assert first["kl_mean"] == pytest.approx((1 + 8) / 30)
    assert first["reads"] == pytest.approx(60 / 200)
    assert first["agreement"] == pytest.approx((10 + 14) / 30)
    assert first["ci_low"] <= first["kl_mean"] <= first["ci_high"]
    assert first["pages_over_oracle"] == pytest.approx(60 / 10)
    assert (first["vs_first"], first["vs_first_low"], first["lower"]) == (0.0, 0.0, 0.0)
    # 10 steps at +0.1 and 20 at -0.1; paired, so that what both requests share drops out.
    assert second["vs_first"] == pytest.approx((1 - 2) / 30)
    assert second["lower"] == 0.5
    assert -0.1 - 1e-9 <= second["vs_first_low"] <= second["vs_first_high"] <= 0.1 + 1e-9
    (alone,) = summarize(records[2:3])
    assert math.isnan(alone["ci_low"])


def test_answers_that_say_the_same():
    assert is_degenerate([5] * 8)
    assert is_degenerate([5, 6] * 8)
    assert is_degenerate([9, 8, *list(range(20)) * 3, 0, 1])
    assert is_degenerate((list(range(5)) * 4)[:18])
    assert not is_degenerate([5] * 7)
    assert not is_degenerate(list(range(6)) * 2)
    assert not is_degenerate([*range(40), *range(24)])
    # Half of it is a list whose items differ.
    assert not is_degenerate([number for item in range(20) for number in (item, item + 50, 99, 98)])


def test_likelihoods_are_those_of_the_tokens_that_were_fed(models: dict[str, LoadedModel]):
    (found,) = replayed(models["llama"], "exact/coverage:1")
    logits = models["llama"].model(torch.tensor([PROMPT + DECODED])).logits[0].double().log_softmax(-1)
    wanted = [-float(logits[len(PROMPT) - 1 + place, token]) for place, token in enumerate(DECODED)]
    assert found.nll.tolist() == pytest.approx(wanted, abs=1e-4)
    assert found.record()["nll_mean"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)


def test_metadata_of_an_estimate(models: dict[str, LoadedModel]):
    """Of the layers that are estimated alone; of candidates alone, where there are any."""
    size = 2 * PAGE  # vectors of a page
    for text, wanted in (
        ("mvar/fixed:3", 2 / size),
        ("mvar/fixed:3,dense_layers=0", 1 / size),
        ("mean/fixed:3", 1 / size),
        ("mean/fixed:3,compensate=mean", 2 / size),
        ("mvar/window:3", 0),
        ("exact/fixed:3", 1 / 2),
        ("mean/fixed:3,page_size=4", 1 / 8),
        ("mvar/window:3,compensate=mean", 3 / size),
        ("exact/window:3,compensate=mean", 1 / 2 + 1 / size),
    ):
        for lists in ("live", "recorded"):
            (found,) = replayed(models["llama"], text, lists=lists)
            assert found.record()["reads_metadata"] == pytest.approx(wanted)
    (found,) = replayed(models["llama"], "mean/fixed:2 within mvar/fixed:4")
    pages = found.counts["pages"]
    assert found.record()["reads_metadata"] == pytest.approx((2 + 4 * 2 * 2 * 12 / pages) / size)


def test_numbers_of_a_request_are_json(models: dict[str, LoadedModel]):
    (found,) = replayed(models["llama"], "exact/fixed:3")
    record = found.record()
    assert json.loads(json.dumps(record)) == record
    assert record["reads"] == record["kept"] / record["pages"]
    assert record["rows_below"] == float((found.realised < 0.95).double().mean())
    assert 0 < record["rows_below"] <= 1


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A trace of the packaged model's own recording is replayed; wrong options are one line."""
    import synthetic

    from coverage_lab.cli import main

    trace = synthetic.write(tmp_path / "t", synthetic.Shape(requests=1, steps=2))
    for arguments, message in (
        (("--lists", "dead"), "--lists dead is not live or recorded"),
        (("--policies", "mvar/coverag:0.9"), "did you mean 'coverage'"),
        (("mvar/fixed:3",), "policies come after --policies"),
    ):
        monkeypatch.setattr("sys.argv", ["coverage-lab", "replay", str(trace), *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        assert (stop.value.code, said.out) == (2, "")
        assert message in said.err
        assert said.err.count("\n") == 1


class TestJournal:
    """Runs that stop and go on; the model's part is stood in for."""

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        lengths = [3, 5, 7, 9, 11]
        requests = pl.DataFrame(
            {
                "request_id": ["a", "b", "c", "d", "e"],
                "task": ["t", "t", "u", "t", "t"],
                "status": ["ok"] * 4 + ["failed"],
                "prompt_tokens": lengths,
                "prompt_ids": [[1] * length for length in lengths],
                "decoded_ids": [[1, 2]] * 3 + [[], [1, 2]],
            }
        )
        trace: Any = SimpleNamespace(
            requests=requests,
            shards=[SimpleNamespace(request_id=name) for name in "abcd"],
            page_size=PAGE,
            path=tmp_path,
            manifest={"run": {"decode": "greedy"}},
        )
        (tmp_path / "manifest.json").write_text("{}")
        ran: list[int] = []

        def stand_in(
            loaded: Any, prompt: list[int], fed: list[int], policies: Any, *rest: Any, **options: Any
        ) -> list[Replayed]:
            if len(ran) == stop[0]:
                raise KeyboardInterrupt
            if len(prompt) == broken[0]:
                raise torch.OutOfMemoryError("no memory\nfor that")
            ran.append(len(prompt))
            some = torch.full((len(fed),), 1 / (1 + len(prompt)), dtype=torch.float64)
            counts = {"kept": 1 + len(prompt), "pages": 2 + len(prompt), "oracle": 1}
            counts |= {"values": 1, "dense_values": 9}
            return [Replayed(some, some > 0, some[1:], counts, some[None], "reference") for _ in policies]

        stop, broken = [99], [0]
        monkeypatch.setattr("coverage_lab.replay.report.replay_request", stand_in)
        identity = {"weights": "w", "dtype": "float32", "device": "cpu"}
        layer: Any = SimpleNamespace(layer=0, window=7, softcap=None, sinks=False, kv_heads=2)
        self.ran = ran
        loaded = LoadedModel(None, None, (layer,), (), identity)  # type: ignore[arg-type]

        def replayed(
            file: Path | None,
            stop_at: int = 99,
            text: str | list[str] = "exact/fixed:3",
            broken_at: int = 0,
            **options: Any,
        ) -> Any:
            ran.clear()
            stop[0], broken[0] = stop_at, broken_at
            texts = [text] if isinstance(text, str) else text
            outcome = replay(trace, loaded, list(map(parse_policy, texts)), output=file, **options)
            self.outcome = outcome
            return outcome.records, len(ran)

        return replayed

    def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(self, run: Any, tmp_path: Path):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        records, ran = run(whole)
        assert (len(records), ran) == (6, 3)
        with pytest.raises(KeyboardInterrupt):
            run(parts, 2)
        # As if it had been killed while it wrote.
        with parts.open("a") as file:
            file.write('{"request_id": "half')
        again, ran = run(parts)
        assert ran == 1
        assert again == records == run(None)[0]
        assert parts.read_bytes() == whole.read_bytes()
        assert run(parts)[1] == 0

    def test_another_run_is_not_mixed_in(self, run: Any, tmp_path: Path):
        run(tmp_path / "a")
        with pytest.raises(CoverageLabError, match=r"another replay \(policies\); give another --output"):
            run(tmp_path / "a", text="exact/fixed:4")
        (tmp_path / "b").write_text("something else\n")
        with pytest.raises(CoverageLabError, match="b is there already and no file of finished requests"):
            run(tmp_path / "b")
        (tmp_path / "b").write_bytes(b"\x88\xff\n")
        with pytest.raises(CoverageLabError, match="b is there already and no file of finished requests"):
            run(tmp_path / "b")

    def test_a_request_that_is_tried_again_takes_its_place(self, run: Any, tmp_path: Path):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        run(whole)
        run(parts, broken_at=7)  # the second of three
        assert run(parts)[1] == 1
        assert parts.read_bytes() == whole.read_bytes()

    @pytest.mark.parametrize("text", ["my notes", '{"mine": 1}', "x\ny", "", '{"replay"'])
    def test_files_of_the_user_stay_as_they_are(self, run: Any, tmp_path: Path, text: str):
        file = tmp_path / "notes.txt"
        file.write_text(text)
        if text in ("", '{"replay"'):  # the beginning of one of ours
            assert run(file)[1] == 3
            return
        with pytest.raises(CoverageLabError, match="no file of finished requests; give another --output"):
            run(file)
        assert file.read_text() == text

    @pytest.mark.parametrize(
        "line", ["{", "{}", "3", '{"request_id": "a"}', '{"request_id": "a", "records": 1}']
    )
    def test_damaged_lines_are_named(self, run: Any, tmp_path: Path, line: str):
        file = tmp_path / "a"
        run(file)
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join([*lines[:2], line + "\n", *lines[3:]]))
        with pytest.raises(CoverageLabError, match=r"line 3 of .*a is damaged; restore it"):
            run(file)

    def test_a_figure_that_was_changed_is_found(self, run: Any, tmp_path: Path):
        file = tmp_path / "a"
        run(file)
        for old, new in (('"kl', '"kx'), ("0.", "1.")):
            whole = file.read_text()
            lines = whole.splitlines(keepends=True)
            file.write_text("".join([*lines[:2], lines[2].replace(old, new, 1), *lines[3:]]))
            with pytest.raises(CoverageLabError, match=r"line 3 of .*a is damaged; restore it"):
                run(file)
            file.write_text(whole)

    def test_requests_that_changed_places_are_found(self, run: Any, tmp_path: Path):
        file = tmp_path / "a"
        run(file)
        text = file.read_text()
        for old, new in (("a", "?"), ("b", "a"), ("?", "b")):
            text = text.replace(f'\n{{"request_id": "{old}"', f'\n{{"request_id": "{new}"')
        file.write_text(text)
        with pytest.raises(CoverageLabError, match=r"line 2 of .*a is damaged; restore it"):
            run(file)

    @pytest.mark.parametrize("name", ["b", "nobody", "c"])
    def test_a_line_of_another_request_is_found(self, run: Any, tmp_path: Path, name: str):
        """In the file stand a, c and b."""
        file = tmp_path / "a"
        run(file)
        first, *lines = file.read_text().splitlines(keepends=True)
        lines[1] = lines[1].replace('{"request_id": "c"', f'{{"request_id": "{name}"', 1)
        file.write_text("".join([first, *lines, *(lines[1:2] if name == "c" else [])]))
        with pytest.raises(CoverageLabError, match=r"line \d of .*a is damaged; restore it"):
            run(file)

    def test_policies_that_are_given_twice_run_once(self, run: Any):
        records, _ = run(None, text=["mvar/coverage:0.98", "exact/fixed:3", "mvar/coverage:0.980"])
        assert [record["policy"] for record in records[:3]] == [
            "exact/coverage:1",
            "mvar/coverage:0.98",
            "exact/fixed:3",
        ]
        assert len(records) == 9

    def test_profiles_are_checked_before_any_run(self, run: Any, tmp_path: Path):
        short = tmp_path / "short.json"
        Profile("kv_head", ((2.0,),)).save(short)
        for text, message in (
            ("mvar/profiled", "no profile; write profiled:FILE.json"),
            (f"mvar/profiled:{short}", "1 layers of 1 KV heads, fewer than here"),
            (f"exact/fixed:3 within mvar/profiled:{short}", "fewer than here"),
        ):
            with pytest.raises(CoverageLabError, match=message):
                run(None, text=text)
        assert self.ran == []

    def test_a_check_that_would_check_nothing(self, run: Any):
        with pytest.raises(CoverageLabError, match="no policy runs on the kernels here"):
            run(None, check=True)

    def test_a_backend_that_can_not_is_said_of_what_was_asked_for(self, run: Any):
        with pytest.raises(CoverageLabError, match=r"can't run exact/fixed:3 here: layer 0 has a sliding"):
            run(None, backend="triton")

    def test_tasks_come_in_turn(self, run: Any):
        records, _ = run(None)
        assert [record["request_id"] for record in records[::2]] == ["a", "c", "b"]
        # The request that failed while it was recorded is none of them.
        assert self.outcome.empty == 1

    def test_a_request_that_fails_is_marked_and_tried_again(self, run: Any, tmp_path: Path):
        records, ran = run(tmp_path / "a", broken_at=7)
        assert self.outcome.failed == {"c": "no memory for that"}
        assert ran == 2
        assert {record["request_id"] for record in records} == {"a", "b"}
        assert run(tmp_path / "a")[1] == 1
        assert self.outcome.failed == {}

    def test_a_layer_that_the_model_does_not_have(self, run: Any):
        for text in ("exact/fixed:3,dense_layers=1", "exact/fixed:3 within mean/fixed:3,dense_layers=0+1"):
            with pytest.raises(CoverageLabError, match="has no layer 1; it has 0 to 0"):
                run(None, text=text)

    def test_the_control_comes_first_and_once(self, run: Any):
        policies = [record["policy"] for record in run(None, text="exact/coverage:1")[0]]
        assert policies == ["exact/coverage:1"] * 3


def test_the_figure(tmp_path: Path):
    from matplotlib.collections import LineCollection

    from coverage_lab.analyses import divergence

    base = {"ci_low": 1e-4, "ci_high": 1e-2}
    lines = [
        {"policy": "exact/coverage:1", "reads": 1.0, "kl_mean": 1e-9, **base},
        *({"policy": f"mvar/coverage:{g}", "reads": g / 2, "kl_mean": 1e-3 / g, **base} for g in (0.5, 0.9)),
        {"policy": "mvar/fixed:3", "reads": 0.3, "kl_mean": 5e-3, "ci_low": math.nan, "ci_high": math.nan},
        *(
            {"policy": f"quest/fixed:tokens={n}", "reads": n / 999, "kl_mean": 1e-3, **base}
            for n in (64, 128)
        ),
        *({"policy": f"mvar/profiled:e{n}.json", "reads": 0.4, "kl_mean": 1e-3, **base} for n in (1, 2)),
        {"policy": "mvar/coverage:0.9,page_size=16@layer", "reads": 0.3, "kl_mean": 5e-3, **base},
        {"policy": "exact/coverage:9e-05", "reads": 0.1, "kl_mean": 5e-3, **base},
    ]
    drawn = divergence.figure(divergence.to_frame(lines))
    (ax,) = drawn.axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "exact/coverage",
        "mvar/coverage",
        "mvar/fixed",
        "mvar/profiled:e1.json",
        "mvar/profiled:e2.json",
        "mvar/coverage,page_size=16@layer",
        "quest/fixed",
    ]
    curve = ax.lines[1]
    assert curve.get_xdata().tolist() == [0.25, 0.45]
    assert ax.get_yscale() == "log"
    assert "every page kept: 1e-09 nats" in ax.get_title()
    assert sum(isinstance(child, LineCollection) for child in ax.collections) == 7
    drawn.savefig(tmp_path / "f.png")
    # The longest of texts has room, and so have the curves.
    long = "int4/coverage:0.85,page_size=1@query_head within quest/fixed:tokens=128,page_size=16@query_head"
    lines.append({"policy": long, "reads": 0.2, "kl_mean": 2e-3, **base})
    wide = divergence.figure(divergence.to_frame(lines), "a model under policies, live lists: 9 requests")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide.savefig(tmp_path / "wide.png")
    (ax,) = wide.axes
    legend = ax.get_legend().get_window_extent()
    assert legend.x1 <= wide.bbox.width
    assert ax.get_window_extent().width > 3 * wide.dpi
    assert "9 requests\nevery page kept" in ax.get_title()
    labels = [text.get_text() for text in ax.texts]
    assert sorted(labels) == sorted(["0.5", "0.9", "3", "64", "128", "", "", "0.9", "9e-05", "0.85"])
    divergence.figure(divergence.to_frame(lines[:1])).savefig(tmp_path / "control.png")


def test_failed_requests_are_named_even_when_quiet(capsys: pytest.CaptureFixture[str]):
    import typer

    from coverage_lab.cli.running import finish
    from coverage_lab.replay.requests import Outcome

    records = [{"request_id": "a", "degenerate": True}]
    for quiet, lines in ((True, 1), (False, 3)):
        with pytest.raises(typer.Exit) as stop:
            finish(Outcome(records, {"b": "no memory"}, 2), quiet)
        assert stop.value.exit_code == 1
        said = capsys.readouterr().err
        assert said.count("\n") == lines
        assert said.endswith("b failed: no memory\n")
    finish(Outcome(records, {}, 0), True)
    assert capsys.readouterr().err == ""


def test_comparisons_without_a_layer_or_a_request(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from coverage_lab.replay.reproduce import Settings, equal_reads, granularity
    from coverage_lab.replay.requests import Outcome

    with pytest.raises(CoverageLabError, match="layers with full attention"):
        granularity.run(None, models["mistral"], Settings())  # type: ignore[arg-type]
    monkeypatch.setattr(equal_reads, "matched", lambda *rest: lambda place: [])
    monkeypatch.setattr(equal_reads, "replay", lambda *rest, **options: Outcome([], {"a": "no memory"}, 0))
    geometry = {"query_heads": 4, "kv_heads": 2, "layers": [{"layer": 0}]}
    trace: Any = SimpleNamespace(require=lambda columns: None, geometry=geometry, page_size=64)
    report = equal_reads.run(trace, models["llama"], Settings())
    assert (report.findings, report.joined().failed) == ([], {"a": "no memory"})


def test_what_the_command_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """The lines of the table in CSV; in JSON those and the records of every request."""
    import tiny

    from coverage_lab.cli import main

    prompts = tiny.write_prompts(tmp_path / "tasks", {"a": (60, 75), "b": (90,)})
    model = tiny.save_model(tmp_path / "model")
    trace = tiny.record_trace(tmp_path / "t", model, prompts, steps=4, page_size=PAGE)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv")}
    arguments = ["replay", str(trace.path), "-q", "--policies", "mvar/fixed:3", "exact/coverage:0.8"]
    arguments += [part for name, file in files.items() for part in (f"--{name}", str(file))]
    monkeypatch.setattr("sys.argv", ["coverage-lab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "95% interval" in said
    assert "first, 95%" in said
    # Of one policy, which is the first, there is nothing to take it from.
    monkeypatch.setattr("sys.argv", ["coverage-lab", *arguments[:2], "--policies", "mvar/fixed:3"])
    with pytest.raises(SystemExit):
        main()
    assert "first" not in capsys.readouterr().out
    document = json.loads(files["json"].read_text())
    assert len(document["records"]) == 3 * 3
    assert [len(record["kl"]) for record in document["records"]] == [4] * 9
    lines = pl.read_csv(files["csv"])
    assert lines["policy"].to_list() == [line["policy"] for line in document["summary"]]
    for name in ("reads", "reads_metadata", "ci_low", "vs_first_high", "kl_p99", "pages_over_oracle"):
        assert lines[name].to_list() == [line[name] for line in document["summary"]]


def test_a_manifest_of_another_geometry_is_refused(tmp_path: Path):
    import tiny

    from coverage_lab.replay.requests import load_traced_model
    from coverage_lab.trace import Trace

    prompts = tiny.write_prompts(tmp_path / "tasks", {"a": (60,)})
    trace = tiny.record_trace(
        tmp_path / "t", tiny.save_model(tmp_path / "model"), prompts, steps=2, page_size=PAGE
    )
    load_traced_model(trace)
    manifest = json.loads((trace.path / "manifest.json").read_text())
    manifest["geometry"]["kv_heads"] += 1
    (trace.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CoverageLabError, match="was recorded with other kv_heads than"):
        load_traced_model(Trace(trace.path))
