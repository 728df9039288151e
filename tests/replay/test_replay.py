"""Models that decode under a policy: against themselves, and against float64."""

import json
import math
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
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.compare import metadata_reads
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.choice import choose, rows_of
from coverage_lab.replay.replay import Replayed, replay_request
from coverage_lab.replay.report import is_degenerate, replay, summarize
from coverage_lab.replay.sparse import attend_pages

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


def replayed(loaded: LoadedModel, *policies: str, lists: Any = "live") -> list[Any]:
    parsed = [parse_policy(text) for text in policies]
    return replay_request(loaded, PROMPT, DECODED, parsed, PAGE, lists)


@pytest.mark.parametrize("lists", ["live", "recorded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_page_kept_is_the_dense_model(models: dict[str, LoadedModel], family: str, lists: str):
    (found,) = replayed(models[family], "exact/coverage:1", lists=lists)
    assert found.kl.shape == (12,)
    assert found.kl.max() <= 1e-6
    assert found.agree.all()
    assert found.kept == found.pages
    assert torch.allclose(found.realised, torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("lists", ["live", "recorded"])
def test_fewer_pages_are_further_from_dense(models: dict[str, LoadedModel], lists: str):
    texts = [f"exact/coverage:{gamma}" for gamma in (0.95, 0.8, 0.5)]
    found = replayed(models["llama"], *texts, lists=lists)
    reads = [one.kept / one.pages for one in found]
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
        assert 0 < found.kept < found.pages
        assert ((found.realised > 0) & (found.realised <= 1 + 1e-5)).all()


def test_layers_can_stay_dense(models: dict[str, LoadedModel]):
    (whole, half) = replayed(models["llama"], "exact/fixed:2", "exact/fixed:2,dense_layers=0")
    pages = whole.pages // 2
    assert half.kept == pages + whole.kept // 2
    assert float(half.kl.mean()) < float(whole.kl.mean())


def test_the_model_is_as_before(models: dict[str, LoadedModel]):
    model = models["llama"].model
    before = model.config._attn_implementation
    ids = torch.tensor([PROMPT])
    logits = model(ids).logits
    replayed(models["llama"], "exact/fixed:2")
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, logits)


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
        output=torch.empty(1, 1, 6, 16),
    )


@pytest.mark.parametrize(
    "options", [{}, {"window": WINDOW}, {"sinks": True}, {"softcap": 2.0}, {"window": 5, "sinks": True}]
)
def test_attention_over_pages(options: dict[str, Any]):
    """Token by token in float64."""
    position = 45
    call = call_of(position, **options)
    window = call.window or position + 1
    first = (position + 1 - window) // PAGE
    pages = position // PAGE + 1 - first
    kept = torch.rand(2, pages, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[:, -1] = True
    found = attend_pages(call, kept, first, position, PAGE)
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
        total = math.fsum(weights) + (math.exp(call.sinks[head]) if call.sinks is not None else 0.0)
        wanted = sum(
            weight / total * call.value[0, head // 3, token].double()
            for weight, token in zip(weights, tokens, strict=True)
        )
        assert torch.allclose(found[0, 0, head].double(), wanted, atol=1e-5)


class TestChoice:
    MASSES = 2 * torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0))
    ROWS = rows_of(4, 2, 9 * PAGE - 3, range(0, 9), PAGE, "cpu")

    def chosen(self, text: str) -> Tensor:
        return choose(parse_policy(text), self.MASSES[1], self.ROWS)

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
        assert choose(policy, self.MASSES[1], self.ROWS).all()


@pytest.mark.parametrize("lists", ["live", "recorded"])
def test_reads_of_the_oracle_sets(models: dict[str, LoadedModel], lists: str):
    """The rule on exact shares keeps the oracle set and the forced pages, where its own queries choose."""
    (found,) = replayed(models["llama"], "exact/coverage:0.95", lists=lists)
    rows = 2 * 2 * 12
    assert 0 < found.oracle <= found.pages
    if lists == "live":
        assert found.oracle <= found.kept <= found.oracle + 2 * rows


def test_lines_of_the_summary():
    base = {"steps": 10, "kl_p99": 1.0, "agreement": 1.0, "kept": 10, "pages": 100, "coverage_mean": 0.5}
    base |= {"oracle_pages": 5, "reads_metadata": 0.01}
    records = [
        {"policy": "a", **base, "kl_mean": 0.1},
        {"policy": "a", **base, "kl_mean": 0.4, "steps": 20, "kept": 50, "agreement": 0.7, "kl_p99": 3.0},
        {"policy": "b", **base, "kl_mean": 0.2},
        {"policy": "b", **base, "kl_mean": 0.3, "steps": 20},
    ]
    first, second = summarize(records)
    assert (first["policy"], first["requests"], first["steps"], first["kl_p99"]) == ("a", 2, 30, 3.0)
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
    (alone,) = summarize(records[:1])
    assert math.isnan(alone["ci_low"])


def test_answers_that_say_the_same():
    assert is_degenerate([5] * 8)
    assert is_degenerate([5, 6] * 8)
    assert not is_degenerate([5] * 7)
    assert not is_degenerate(list(range(6)) * 2)


def test_metadata_of_an_estimate():
    """Of the layers that are estimated alone."""
    geometry = {"head_dim": 128, "layers": [{"layer": 0}, {"layer": 1}]}
    trace: Any = SimpleNamespace(geometry=geometry, page_size=64)
    for text, wanted in (
        ("mvar/coverage:0.9", 1 / 64),
        ("mvar/coverage:0.9,dense_layers=0", 1 / 128),
        ("mean/fixed:3", 1 / 128),
        ("mvar/window:3", 0),
    ):
        assert metadata_reads(parse_policy(text), trace) == wanted


def test_numbers_of_a_request_are_json(models: dict[str, LoadedModel]):
    (found,) = replayed(models["llama"], "exact/fixed:3")
    record = found.record()
    assert json.loads(json.dumps(record)) == record
    assert record["reads"] == record["kept"] / record["pages"]


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
        lengths = [3, 5, 7]
        requests = pl.DataFrame(
            {
                "request_id": ["a", "b", "c"],
                "status": ["ok"] * 3,
                "prompt_tokens": lengths,
                "prompt_ids": [[1] * length for length in lengths],
                "decoded_ids": [[1, 2]] * 3,
            }
        )
        trace: Any = SimpleNamespace(
            requests=requests,
            page_size=PAGE,
            path=tmp_path,
            geometry={"head_dim": 16, "layers": [{"layer": 0}]},
        )
        (tmp_path / "manifest.json").write_text("{}")
        ran: list[int] = []

        def stand_in(
            loaded: Any, prompt: list[int], fed: list[int], policies: Any, *rest: Any
        ) -> list[Replayed]:
            if len(ran) == stop[0]:
                raise KeyboardInterrupt
            ran.append(len(prompt))
            some = torch.full((len(fed),), 1 / (1 + len(prompt)), dtype=torch.float64)
            return [
                Replayed(some, some > 0, 1 + len(prompt), 2 + len(prompt), 1, some[None]) for _ in policies
            ]

        stop = [99]
        monkeypatch.setattr("coverage_lab.replay.report.replay_request", stand_in)
        identity = {"weights": "w", "dtype": "float32", "device": "cpu"}
        loaded = LoadedModel(None, None, (), (), identity)  # type: ignore[arg-type]

        def replayed(file: Path | None, stop_at: int = 99, text: str = "exact/fixed:3") -> Any:
            ran.clear()
            stop[0] = stop_at
            return replay(trace, loaded, [parse_policy(text)], output=file), len(ran)

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
        with pytest.raises(CoverageLabError, match="does not begin like one"):
            run(tmp_path / "b")

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
    ]
    drawn = divergence.figure(divergence.to_frame(lines))
    (ax,) = drawn.axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["mvar/coverage", "mvar/fixed"]
    curve = ax.lines[0]
    assert curve.get_xdata().tolist() == [0.25, 0.45]
    assert ax.get_yscale() == "log"
    assert "every page kept: 1e-09 nats" in ax.get_title()
    assert sum(isinstance(child, LineCollection) for child in ax.collections) == 2
    drawn.savefig(tmp_path / "f.png")
