"""Policies taken apart: every run against a model in float64 that shares no code with the package."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
import torch
from tiny import DIM, GROUP, HEADS, LAYERS, record_trace, save_model, write_prompts
from torch import Tensor

from coverage_lab.cli import main
from coverage_lab.collectors.models import LoadedModel
from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import Rows
from coverage_lab.policies.policy import Policy, parse_policy
from coverage_lab.replay.explain import explain, log_error, only, summarize, without
from coverage_lab.replay.replay import replay_request
from coverage_lab.replay.requests import Outcome, load_traced_model
from coverage_lab.trace import Trace

PAGE, STEPS = 8, 5
# Prompt lengths by task; the current page of a step may be its first token or its last.
TASKS = {"news": (61, 84), "tales": (75,)}
SWAPS = ("exact ranking, own counts", "own ranking, exact counts", "exact shares")
SPARED = "3 worst heads whole"


def recorded(root: Path, model: Path) -> Trace:
    prompts = write_prompts(root / "tasks", TASKS)
    return record_trace(root / "trace", model, prompts, steps=STEPS, page_size=PAGE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explain")


@pytest.fixture(scope="module")
def other(root: Path) -> Path:
    """A model of the same shape with other weights."""
    return save_model(root / "other", seed=1)


@pytest.fixture(scope="module")
def trace(root: Path) -> Trace:
    return recorded(root, save_model(root / "model"))


@pytest.fixture(scope="module")
def loaded(trace: Trace) -> LoadedModel:
    return load_traced_model(trace, device="cpu")


@pytest.fixture(scope="module")
def explained(trace: Trace, loaded: LoadedModel) -> Callable[[str], Outcome]:
    return cache(lambda text: explain(trace, loaded, parse_policy(text)))


# What a row keeps: from layer, position, and the exact and estimated shares by KV head, to sets of pages.
Shares = Sequence[Sequence[float]]
Lists = Callable[[int, int, Shares, Shares], list[set[int]]]


class Double:
    """The model of a configuration in float64; decode steps attend the pages that a rule gives them."""

    def __init__(self, model: Any) -> None:
        self._weights = {name: weights.double() for name, weights in model.state_dict().items()}
        self._config = model.config

    def logits(self, ids: Sequence[int], prompt: int, estimator: str, lists: Lists) -> tuple[Tensor, Any]:
        """Return the logits after each token beyond the prompt, and notes on each row by layer and head."""
        w, config, notes = self._weights, self._config, dict[tuple[int, int], list[dict[str, Any]]]()
        tokens, heads, group = len(ids), config.num_key_value_heads, GROUP
        angles = torch.arange(tokens)[:, None] * config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, DIM, 2).double() / DIM
        )
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(config.num_hidden_layers):
            block = f"model.layers.{layer}."
            h = self._norm(x, block + "input_layernorm")
            q, k, v = (
                (h @ w[f"{block}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM)).transpose(0, 1)
                for name in "qkv"
            )
            q, k = (self._turned(part, angles) for part in (q, k))
            q = q / math.sqrt(DIM)
            mixed = torch.empty(heads * group, tokens, DIM, dtype=torch.float64)
            for place in range(tokens):
                seen = [torch.ones(place + 1, dtype=torch.bool)] * heads
                if place >= prompt:
                    exact, guess = self._masses(q, k, place, estimator)
                    shares = [exact.softmax(-1).mean(1).tolist(), guess.softmax(-1).mean(1).tolist()]
                    kept = lists(layer, place, *shares)
                    seen = [
                        torch.tensor([token // PAGE in pages for token in range(place + 1)]) for pages in kept
                    ]
                    for head, pages in enumerate(kept):
                        middle = slice(1, exact.shape[-1] - 1)
                        off = guess[head, :, middle].logsumexp(-1) - exact[head, :, middle].logsumexp(-1)
                        note = {"kept": len(pages), "pages": exact.shape[-1], "error": float(off.mean())}
                        note["covered"] = math.fsum(shares[0][head][page] for page in pages)
                        notes.setdefault((layer, head), []).append(note)
                for head in range(heads * group):
                    mine = seen[head // group]
                    weights = (k[head // group, : place + 1][mine] @ q[head, place]).softmax(-1)
                    mixed[head, place] = weights @ v[head // group, : place + 1][mine]
            x = x + mixed.transpose(0, 1).flatten(1) @ w[block + "self_attn.o_proj.weight"].T
            h = self._norm(x, block + "post_attention_layernorm")
            gate, up, down = (w[f"{block}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down
        return self._norm(x, "model.norm")[prompt:] @ w["lm_head.weight"].T, notes

    def _norm(self, x: Tensor, name: str) -> Tensor:
        root = (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        return x / root * self._weights[f"{name}.weight"]

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _masses(self, q: Tensor, k: Tensor, place: int, estimator: str) -> tuple[Tensor, Tensor]:
        """Exact and estimated log masses, `[KV heads, G, pages]`; the sink and the last page are known."""
        exact, guess = [], []
        query = q[:, place].unflatten(0, (-1, GROUP))  # [KV heads, G, D]
        for start in range(0, place + 1, PAGE):
            keys = k[:, start : min(start + PAGE, place + 1)]
            exact.append((query @ keys.mT).logsumexp(-1))
            mean, variance = keys.mean(1)[..., None], keys.var(1, correction=0)[..., None]
            spread = 0.5 * query.square() @ variance if estimator == "mvar" else 0
            known = start == 0 or start + PAGE > place or estimator == "exact"
            guess.append(exact[-1] if known else (query @ mean + spread)[..., 0] + math.log(PAGE))
        return torch.stack(exact, -1), torch.stack(guess, -1)


def row(layer: int, head: int, position: int) -> plain.Row:
    return plain.Row(0, layer, head, 0, position, position // PAGE + 1, 0, PAGE, {}, {})


def chosen(policy: Policy, layer: int, position: int, shares: Shares) -> list[set[int]]:
    """What the policy keeps of some shares."""
    if layer in policy.dense_layers:
        return whole(position)
    together = policy.granularity == "layer"
    return [
        plain.choose(policy.budget, share, row(layer, head, position), together)
        for head, share in enumerate(shared(policy, shares))
    ]


def shared(policy: Policy, shares: Shares) -> Shares:
    """Shares that lists are chosen from: those of the head, or the mean over heads."""
    if policy.granularity != "layer":
        return shares
    return [[math.fsum(page) / HEADS for page in zip(*shares, strict=True)]] * HEADS


def whole(position: int) -> list[set[int]]:
    return [set(range(position // PAGE + 1))] * HEADS


def best(policy: Policy, layer: int, position: int, shares: Shares, of: list[set[int]]) -> list[set[int]]:
    """As many pages as each of some lists has, by falling share."""
    ranked = zip(shared(policy, shares), of, strict=True)
    return [
        plain.first_of(share, len(pages), row(layer, 0, position))
        if layer not in policy.dense_layers
        else pages
        for share, pages in ranked
    ]


def rules(policy: Policy) -> dict[str, Lists]:
    def own(layer: int, position: int, exact: Shares, guess: Shares) -> list[set[int]]:
        return chosen(policy, layer, position, guess)

    found: dict[str, Lists] = {"every page": lambda layer, position, exact, guess: whole(position)}
    found["as it is"] = own
    if policy.estimator.name == "exact":
        return found
    exact_ranking, exact_counts, exact_shares = SWAPS
    found[exact_ranking] = lambda layer, position, exact, guess: best(
        policy, layer, position, exact, chosen(policy, layer, position, guess)
    )
    found[exact_counts] = lambda layer, position, exact, guess: best(
        policy, layer, position, guess, chosen(policy, layer, position, exact)
    )
    found[exact_shares] = lambda layer, position, exact, guess: chosen(policy, layer, position, exact)
    return found


def following(policy: Policy, heads: set[tuple[int, int]]) -> Lists:
    """Some (layer, KV head) follow the policy, the others read everything."""

    def lists(layer: int, position: int, exact: Shares, guess: Shares) -> list[set[int]]:
        own = chosen(policy, layer, position, guess)
        everything = whole(position)
        return [own[head] if (layer, head) in heads else everything[head] for head in range(HEADS)]

    return lists


def wanted(model: Double, line: dict[str, Any], policy: Policy) -> dict[Any, dict[str, Any]]:
    """The records that a request should have, by variant or by layer and KV head."""
    ids, prompt = line["prompt_ids"] + line["decoded_ids"], len(line["prompt_ids"])
    found = dict[Any, dict[str, Any]]()
    dense = Tensor()

    def run(name: Any, lists: Lists) -> dict[tuple[int, int], list[dict[str, Any]]]:
        nonlocal dense
        logits, notes = model.logits(ids, prompt, policy.estimator.name, lists)
        if name == "every page":
            dense = logits.log_softmax(-1)
        divergence = (dense.exp() * (dense - logits.log_softmax(-1))).sum(-1)
        found[name] = {
            "kl": float(divergence.mean()),
            **figures([note for own in notes.values() for note in own]),
        }
        return notes

    everyone = {(layer, head) for layer in range(LAYERS) for head in range(HEADS)}
    notes = {name: run(name, lists) for name, lists in rules(policy).items()}
    for head in everyone:
        run(head, following(policy, {head}))
        # What a head reads is that of the run in which all of them follow.
        own = notes["as it is"][head]
        found[head] |= figures(own)
        found[head]["log_error"] = math.fsum(note["error"] for note in own) / len(own)
        found[head]["coverage_low"] = min(note["covered"] for note in own)
    worst = set(sorted(everyone, key=lambda head: found[head]["kl"])[-3:])
    run(SPARED, following(policy, everyone - worst))
    return found


def figures(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(note[name] for note in notes) for name in ("kept", "pages")}
    return counts | {"coverage_mean": math.fsum(note["covered"] for note in notes) / len(notes)}


def name_of(record: dict[str, Any]) -> Any:
    return record["variant"] if record["what"] == "variants" else (record["layer"], record["kv_head"])


@pytest.mark.parametrize(
    "text",
    [
        "mvar/coverage:0.8",
        "mean/coverage:0.9@layer",
        "mvar/proportional:0.4,dense_layers=1",
        "mean/fixed:4",
        "exact/coverage:0.7",
    ],
)
def test_every_run_is_that_of_a_model_in_float64(
    text: str, trace: Trace, loaded: LoadedModel, explained: Callable[[str], Outcome]
):
    """The variants, every KV head alone, and the worst heads spared, on live lists in both layers."""
    model, records = Double(loaded.model), explained(text).records
    for line in trace.requests.to_dicts()[:2]:
        own = [record for record in records if record["request_id"] == line["request_id"]]
        truth = wanted(model, line, parse_policy(text))
        assert len(own) == len(truth)
        assert {name_of(record) for record in own} == set(truth)
        for record in own:
            expected = truth[name_of(record)]
            assert {"task", "prompt_tokens", "degenerate"} <= record.keys()
            assert record["steps"] == STEPS
            for name in ("kept", "pages"):
                assert record[name] == expected[name], (name, record)
            assert record["kl"] == pytest.approx(expected["kl"], rel=2e-3, abs=1e-7), record
            for name in expected.keys() - {"kept", "pages", "kl"}:
                assert record[name] == pytest.approx(expected[name], abs=1e-4), (name, record)


def test_every_page_is_the_dense_model(explained: Callable[[str], Outcome]):
    for record in explained("mvar/coverage:0.8").records:
        if name_of(record) == "every page":
            assert record["kl"] <= 1e-6
            assert record["kept"] == record["pages"]
            assert record["coverage_mean"] == pytest.approx(1, abs=1e-5)
        else:
            assert record["kept"] < record["pages"]
            assert record["kl"] > 1e-5


@pytest.mark.parametrize("text", ["mvar/coverage:0.8", "mean/coverage:0.9@layer", "exact/window:3"])
def test_as_it_is_is_what_a_replay_reports(
    text: str, trace: Trace, loaded: LoadedModel, explained: Callable[[str], Outcome]
):
    lines = {line["request_id"]: line for line in trace.requests.to_dicts()}
    own = [record for record in explained(text).records if name_of(record) == "as it is"]
    assert {record["request_id"] for record in own} == set(lines)
    for record in own:
        line = lines[record["request_id"]]
        (found,) = replay_request(loaded, line["prompt_ids"], line["decoded_ids"], [parse_policy(text)], PAGE)
        assert record["kl"] == pytest.approx(float(found.kl.mean()), rel=1e-6)
        assert (record["kept"], record["pages"]) == (found.counts["kept"], found.counts["pages"])
        assert record["coverage_mean"] == pytest.approx(float(found.realised.mean()), rel=1e-6)


@pytest.mark.parametrize("text", ["exact/coverage:0.7", "exact/window:3", "mvar/window:3"])
def test_where_no_estimate_is_read_there_is_nothing_to_swap(text: str, explained: Callable[[str], Outcome]):
    variants = [name_of(record) for record in explained(text).records if record["what"] == "variants"]
    assert variants == ["every page", "as it is", SPARED] * 3


def test_swaps_keep_as_many_pages_where_queries_are_alike(tmp_path: Path):
    """In a model of one layer the queries do not depend on what was kept."""
    trace = recorded(tmp_path, save_model(tmp_path / "model", num_hidden_layers=1))
    outcome = explain(trace, load_traced_model(trace, device="cpu"), parse_policy("mvar/coverage:0.8"))
    for request in trace.requests["request_id"]:
        kept = {name_of(r): r["kept"] for r in outcome.records if r["request_id"] == request}
        assert kept["exact ranking, own counts"] == kept["as it is"]
        assert kept["own ranking, exact counts"] == kept["exact shares"]
        assert kept["as it is"] != kept["exact shares"]
        # Of 3 KV heads of one layer the 3 worst are all.
        assert kept[SPARED] == kept["every page"]


class TestRules:
    """On made-up masses of two KV heads in three steps."""

    WIDTH = 9
    POSITIONS = (WIDTH * PAGE - 10, WIDTH * PAGE - 9, WIDTH * PAGE - 8)  # 8, 8 and 9 pages
    ROWS = Rows(
        n_pages=torch.tensor([8, 8, 8, 8, 9, 9]),
        first_page=torch.zeros(6, dtype=torch.long),
        position=torch.tensor(POSITIONS).repeat_interleave(2),
        layer=torch.full((6,), 4),
        kv_head=torch.tensor([0, 1] * 3),
        page_size=PAGE,
    )
    POLICY = parse_policy("mvar/fixed:3")

    @pytest.fixture
    def masses(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        found = 2 * torch.randn(2, 6, GROUP, self.WIDTH, generator=generator)
        found[:, :4, :, -1] = -torch.inf
        return found[0], found[1]

    def test_one_head_follows_and_the_others_read_everything(self, masses: tuple[Tensor, Tensor]):
        exact, guess = masses
        for layer, kept in ((4, [8, 3, 8, 3, 9, 3]), (5, [8, 8, 8, 8, 9, 9])):
            found = only(self.POLICY, layer, 1)(exact, guess, self.ROWS, 4)
            assert found.sum(1).tolist() == kept
        found = only(self.POLICY, 4, 1)(exact, guess, self.ROWS, 4)
        for place in (1, 3, 5):
            middle = guess[place].double().softmax(-1).mean(0)[1 : kept[place] - 1]
            pages = {0, 1 + int(middle.argmax()), kept[place] - 1}
            assert set(found[place].nonzero()[:, 0].tolist()) == pages

    def test_spared_heads_read_everything_and_the_others_follow(self, masses: tuple[Tensor, Tensor]):
        exact, guess = masses
        for heads, kept in (
            ({(4, 0)}, [8, 3, 8, 3, 9, 3]),
            ({(4, 0), (4, 1)}, [8, 8, 8, 8, 9, 9]),
            ({(3, 0), (5, 1)}, [3] * 6),
            (set(), [3] * 6),
        ):
            assert without(self.POLICY, heads)(exact, guess, self.ROWS, 4).sum(1).tolist() == kept

    def test_one_head_of_a_list_that_a_layer_shares(self, masses: tuple[Tensor, Tensor]):
        policy = replace(self.POLICY, granularity="layer")
        found = only(policy, 4, 0)(*masses, self.ROWS, 4)
        assert found.sum(1).tolist() == [3, 8, 3, 8, 3, 9]
        for step in range(3):
            shares = masses[1][2 * step : 2 * step + 2].double().softmax(-1).mean((0, 1))
            last = int(self.ROWS.n_pages[2 * step]) - 1
            page = 1 + int(shares[1:last].argmax())
            assert set(found[2 * step].nonzero()[:, 0].tolist()) == {0, page, last}

    def test_log_error_is_that_of_the_pages_that_are_estimated(self, masses: tuple[Tensor, Tensor]):
        exact, guess = masses
        found = log_error(exact, guess, self.ROWS)
        for place, pages in enumerate(self.ROWS.n_pages.tolist()):
            summed = [
                np.exp(part[place, :, 1 : pages - 1].double().numpy()).sum(1) for part in (guess, exact)
            ]
            assert float(found[place]) == pytest.approx(float(np.log(summed[0] / summed[1]).mean()), abs=1e-5)
        # A window that has left the sink behind: its first page is estimated too.
        later = replace(self.ROWS, first_page=torch.full((6,), 2))
        off = [part[0, :, :7].double().exp().sum(1).log() for part in (guess, exact)]
        assert float(log_error(exact, guess, later)[0]) == pytest.approx(
            float((off[0] - off[1]).mean()), abs=1e-5
        )

    def test_there_is_no_error_where_every_page_is_known(self, masses: tuple[Tensor, Tensor]):
        short = replace(self.ROWS, n_pages=torch.tensor([1, 2, 2, 1, 3, 3]))
        found = log_error(*masses, short)
        assert found.isfinite().tolist() == [False] * 4 + [True] * 2


def variant(request: str, name: str, steps: int, kl: float, kept: int) -> dict[str, Any]:
    record = {"what": "variants", "variant": name, "kl": kl, "kept": kept, "pages": 10 * steps}
    return {"request_id": request, "steps": steps, "coverage_mean": 1 - kl, **record}


def head(request: str, layer: int, steps: int, kl: float, error: float | None, low: float) -> dict[str, Any]:
    record = variant(request, "", steps, kl, steps)
    del record["variant"]
    return record | {"what": "heads", "layer": layer, "kv_head": 1, "log_error": error, "coverage_low": low}


class TestLines:
    """The summary of made-up records."""

    RECORDS = (
        variant("a", "every page", 10, 0.0, 100),
        variant("a", "as it is", 10, 0.4, 30),
        head("a", 0, 10, 0.1, -1.0, 0.5),
        head("a", 1, 10, 0.2, None, 0.7),
        head("a", 3, 10, 0.0, None, 0.9),
        variant("b", "every page", 30, 0.0, 300),
        variant("b", "as it is", 30, 0.2, 150),
        head("b", 0, 30, 0.5, 2.0, 0.4),
        head("b", 1, 30, 0.0, -3.0, 0.8),
        head("b", 3, 30, 0.2, None, 0.6),
    )
    LINES = summarize(RECORDS, seed=5)

    def test_variants_come_first_and_heads_by_falling_divergence(self):
        names = [name_of(line) for line in self.LINES]
        assert names == ["every page", "as it is", (0, 1), (3, 1), (1, 1)]

    def test_steps_weigh_alike(self):
        every, own, first, second, third = self.LINES
        assert (every["kl"], every["reads"], every["coverage_mean"]) == (0, 1, 1)
        assert own["requests"] == 2
        assert own["kl"] == pytest.approx((10 * 0.4 + 30 * 0.2) / 40)
        assert own["coverage_mean"] == pytest.approx((10 * 0.6 + 30 * 0.8) / 40)
        assert own["reads"] == pytest.approx(180 / 400)
        assert first["kl"] == pytest.approx((10 * 0.1 + 30 * 0.5) / 40)
        assert (second["kl"], third["kl"]) == (pytest.approx(0.15), pytest.approx(0.05))

    def test_shares_are_of_the_sum_of_all_heads(self):
        heads = self.LINES[2:]
        assert [line["share"] for line in heads] == pytest.approx([0.4 / 0.6, 0.15 / 0.6, 0.05 / 0.6])
        assert "share" not in self.LINES[0]
        nothing = [record | {"kl": 0.0} for record in self.RECORDS]
        assert [line["share"] for line in summarize(nothing)[2:]] == [0, 0, 0]

    def test_errors_are_of_the_requests_that_have_one(self):
        assert [line["log_error"] for line in self.LINES[2:]] == [0.5, None, -3.0]
        assert [line["coverage_low"] for line in self.LINES[2:]] == [0.4, 0.6, 0.7]

    def test_intervals_resample_requests(self):
        own = self.LINES[1]
        # Of two requests a resample has both, or one of them twice.
        assert (own["ci_low"], own["ci_high"]) == (pytest.approx(0.2), pytest.approx(0.4))
        (alone,) = summarize(self.RECORDS[:1])
        assert math.isnan(alone["ci_low"])


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(
    trace: Trace, loaded: LoadedModel, tmp_path: Path
):
    policy, told = parse_policy("mvar/coverage:0.8"), list[tuple[str, int, int]]()
    runs = 5 + LAYERS * HEADS + 1  # variants, heads, and one more without the worst

    def stop(request: str, done: int, all_: int) -> None:
        told.append((request, done, all_))
        if done == runs + 4:  # in the second request
            raise KeyboardInterrupt

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    records = explain(trace, loaded, policy, output=whole).records
    with pytest.raises(KeyboardInterrupt):
        explain(trace, loaded, policy, output=parts, progress=stop)
    assert parts.read_text().count("\n") == 2
    assert told[-1][2] == 3 * runs
    told.clear()
    again = explain(trace, loaded, policy, output=parts, progress=lambda *told_: told.append(told_))
    assert again.records == records
    assert parts.read_bytes() == whole.read_bytes()
    # One word on the request that was finished; then every run, and the end of each request.
    assert [request for request, *_ in told].count(told[0][0]) == 1
    assert len(told) == 1 + 2 * (runs + 1)
    assert told[-1][1:] == (3 * runs, 3 * runs)
    with pytest.raises(CoverageLabError, match=r"another replay \(heads\)"):
        explain(trace, loaded, policy, heads=False, output=parts)


def test_requests_of_all_tasks_come_in_turn_and_steps_can_be_few(trace: Trace, loaded: LoadedModel):
    found = explain(trace, loaded, parse_policy("mvar/fixed:3"), heads=False, limit=2, steps=2).records
    assert [record["request_id"] for record in found[:: len(SWAPS) + 2]] == ["news-00000", "tales-00000"]
    assert {record["what"] for record in found} == {"variants"}
    assert {record["steps"] for record in found} == {2}
    assert found[0]["pages"] == LAYERS * HEADS * sum((61 + step) // PAGE + 1 for step in range(2))


def test_what_can_not_be_taken_apart_is_refused(trace: Trace, loaded: LoadedModel):
    for text, message in (
        ("mvar/coverage:0.8@query_head", "query heads share what is read; leave out @query_head"),
        ("mvar/coverage:0.8 within mean/fixed:4", "candidates are not taken apart"),
        ("mvar/coverage:0.8,dense_layers=0+7", "the model has no layer 7; it has 0 to 1"),
    ):
        with pytest.raises(CoverageLabError, match=message) as error:
            explain(trace, loaded, parse_policy(text))
        assert "\n" not in str(error.value)
        assert text in str(error.value)


class TestCommand:
    @pytest.fixture
    def run(
        self, trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Iterator[Callable[..., tuple[Any, str, str]]]:
        def command(*arguments: Any) -> tuple[Any, str, str]:
            given = ["coverage-lab", "explain", str(trace.path), "--device", "cpu", *map(str, arguments)]
            monkeypatch.setattr("sys.argv", given)
            with pytest.raises(SystemExit) as stop:
                main()
            said = capsys.readouterr()
            return stop.value.code, said.out, said.err

        yield command
        import matplotlib.pyplot as plt

        plt.close("all")

    def test_json_alone(self, run: Any, explained: Callable[[str], Outcome]):
        code, out, _ = run("--policy", "mvar/coverage:0.8", "--json", "-")
        assert code == 0
        document = json.loads(out)
        assert document["records"] == summarize(explained("mvar/coverage:0.8").records)
        assert document["failed"] == {}
        assert document["machine"]["versions"]["torch"]

    def test_tables(self, run: Any):
        code, out, err = run("--policy", "mean/fixed:4", "--limit", 1)
        assert (code, err) == (0, "")
        assert "under mean/fixed:4: 1 request\n" in out
        assert f"The {LAYERS * HEADS} worst of {LAYERS * HEADS} KV heads" in out
        for name in ("every page", "as it is", *SWAPS, SPARED, "layer 1, KV head 2"):
            assert name in out
        _, out, _ = run("--policy", "mean/fixed:4", "--limit", 1, "--no-heads")
        assert "every page" in out
        assert "KV head" not in out

    def test_records_are_kept_and_a_second_run_does_nothing(
        self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        arguments = ("--policy", "mean/fixed:4", "--limit", 2, "--json", "-", "-o", tmp_path / "kept")
        first = run(*arguments)
        monkeypatch.setattr("coverage_lab.replay.explain.PreparedRequest", None)
        assert run(*arguments) == first
        assert first[0] == 0
        assert (tmp_path / "kept").read_text().count("\n") == 3

    def test_the_figure(self, run: Any, tmp_path: Path):
        code, out, _ = run("--policy", "mvar/fixed:4", "--limit", 1, "--figure", tmp_path / "heads.png")
        assert code == 0
        assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
        assert "worst" in out

    def test_wrong_options_are_one_line(self, run: Any, other: Path, tmp_path: Path):
        for arguments, message in (
            (("--figure", tmp_path / "f.png", "--no-heads"), "--figure draws the KV heads; leave out"),
            (("--policy", "mvar/coverage:0.8@query_head"), "leave out @query_head"),
            (("--policy", "mvar/fixed:3,dense_layers=2"), "the model has no layer 2; it has 0 to 1"),
            (("--policy", "mvar/coverag:0.9"), "did you mean 'coverage'"),
            (("--model", other), f"the weights of {other} are not those that"),
            (("--limit", 0), "--limit"),
            (("-o", tmp_path / "none" / "kept"), "make it first"),
        ):
            code, out, err = run(*arguments)
            assert (code, out) == (2, "")
            assert message in err
            assert err.count("\n") == 1
        assert not list(tmp_path.iterdir())
