"""Models that decode under a policy: both backends, both caches, against the dense model."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from coverage_lab.collectors.models import LoadedModel, probe
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.decoder import Decoder, backend_for
from coverage_lab.replay.kernel import selects, why_not
from coverage_lab.replay.replay import replay_request

PAGE = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
GENERATOR = torch.Generator().manual_seed(0)
PROMPT = torch.randint(64, (92,), generator=GENERATOR).tolist()
DECODED = torch.randint(64, (6,), generator=GENERATOR).tolist()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def make(config: Any, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model = model.to(DEVICE, dtype)
    return LoadedModel(model, None, *probe(model), {})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def half() -> LoadedModel:
    """In a type that the kernels take, on a GPU or in Triton's interpreter."""
    return make(LlamaConfig(**SHAPE), torch.float16)


@pytest.fixture(scope="module")
def single() -> LoadedModel:
    return make(LlamaConfig(**SHAPE), torch.float32)


# What runs where


def test_what_estimate_and_select_express():
    for text in (
        "mvar/coverage:0.9",
        "mean/fixed:3",
        "quest/fixed:tokens=64",
        "mvar/coverage:1,dense_layers=1",
    ):
        assert selects(parse_policy(text)), text
    for text in (
        "exact/coverage:0.9",
        "mvar/fixed:2.5",
        "mvar/proportional:0.3",
        "mvar/coverage:0.9@query_head",
        "mvar/coverage:0.9,compensate=mean",
        "mvar/coverage:0.9 within quest/fixed:3",
    ):
        assert not selects(parse_policy(text)), text
    assert not selects(None)


def test_why_the_kernels_can_not(half: LoadedModel, single: LoadedModel):
    policy = parse_policy("mvar/coverage:0.9")
    assert why_not(half, policy, PAGE) is None
    for model, text, size, reason in (
        (half, "exact/coverage:0.9,page_size=1", PAGE, "page_size: 1 is not one of"),
        (half, "exact/coverage:0.9", 8, "page_size: 8 is not one of"),
        (half, "mvar/coverage:0.9,compensate=mean", PAGE, "compensate nothing"),
        (
            make(MistralConfig(**SHAPE, sliding_window=40), torch.float16),
            "mvar/fixed:3",
            PAGE,
            "a sliding window",
        ),
        (make(LlamaConfig(**SHAPE | {"head_dim": 48}), torch.float16), "mvar/fixed:3", PAGE, "head_dim: 48"),
        *([] if GPU else [(single, "mvar/fixed:3", PAGE, "the model is torch.float32 on cpu")]),
    ):
        assert reason in str(why_not(model, parse_policy(text), size))
        assert backend_for(model, parse_policy(text), size) == "reference"
        with pytest.raises(CoverageLabError, match=r"the kernels can't run .* --backend reference can"):
            backend_for(model, parse_policy(text), size, "triton")
    assert backend_for(half, policy, PAGE) == backend_for(half, policy, PAGE, "triton") == "triton"
    assert backend_for(half, policy, PAGE, "reference") == "reference"
    with pytest.raises(CoverageLabError, match="'cuda' is not reference or triton"):
        backend_for(half, policy, PAGE, "cuda")


# Replay on both


@pytest.mark.parametrize("lists", ["live", "recorded"])
@pytest.mark.parametrize(
    "text",
    [
        "exact/coverage:1",
        "mvar/coverage:0.8",
        "mean/fixed:4",
        "quest/coverage:0.9,dense_layers=1",
        "exact/coverage:0.8@query_head",
        "mvar/proportional:0.5@layer",
        "int4/coverage:0.8 within quest/fixed:5",
    ],
)
def test_both_backends_keep_the_same_pages(half: LoadedModel, text: str, lists: Any):
    policies = [parse_policy(text)]
    plain, fast = (
        replay_request(half, PROMPT, DECODED, policies, PAGE, lists, backend=name, check=True)[0]
        for name in ("reference", "triton")
    )
    assert (plain.backend, fast.backend) == ("reference", "triton")
    for name in ("pages", "values", "dense_values"):
        assert plain.counts[name] == fast.counts[name]
    assert fast.counts["kept"] == pytest.approx(plain.counts["kept"], rel=0.02)
    assert torch.allclose(plain.kl, fast.kl, atol=1e-4, rtol=0.05)
    if selects(policies[0]) and lists == "live":
        layers = 2 - len(policies[0].dense_layers)
        assert fast.counts["rows"] == layers * 2 * len(DECODED)
        assert fast.counts["equal"] >= 0.99 * fast.counts["rows"]
        assert fast.record()["checked_rows"] == fast.counts["rows"]
    else:
        assert "rows" not in fast.counts
    if text == "exact/coverage:1":
        assert plain.kl.max() <= 1e-5
        assert fast.kl.max() <= 1e-5


# The decoder


def fed(decoder: Decoder, prompts: Any = (PROMPT,), tokens: Any = DECODED) -> torch.Tensor:
    """Logits after the prompt and after every token, `[1 + steps, B, vocabulary]`."""
    found = [decoder.prefill(prompts)]
    found += [decoder.step([token] * len(prompts)) for token in tokens]
    return torch.stack(found).float()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("max_tokens", [None, 98])
@pytest.mark.parametrize("text", [None, "exact/coverage:1", "mvar/coverage:1"])
def test_every_page_is_the_dense_model(
    half: LoadedModel, text: str | None, max_tokens: int | None, backend: str
):
    policy = None if text is None else parse_policy(text)
    decoder = Decoder(half, policy, PAGE, backend=backend, max_tokens=max_tokens)
    logits = fed(decoder)
    ids = torch.tensor([PROMPT + DECODED], device=DEVICE)
    wanted = half.model(ids).logits[0, len(PROMPT) - 1 :].float()
    assert torch.allclose(logits[:, 0], wanted, atol=0.02 * float(wanted.abs().max()))
    kept, pages = decoder.reads
    assert kept == pages
    assert pages == (0 if text is None else 2 * 2 * sum((92 + t) // PAGE + 1 for t in range(6)))


@pytest.mark.parametrize(
    "text", ["mvar/coverage:0.8", "quest/fixed:4,dense_layers=0", "exact/coverage:0.7@query_head"]
)
def test_caches_and_backends_agree(half: LoadedModel, text: str):
    found, reads = [], []
    for backend in ("reference", "triton"):
        for max_tokens in (None, 110):
            decoder = Decoder(half, parse_policy(text), PAGE, backend=backend, max_tokens=max_tokens)
            found.append(fed(decoder))
            reads.append(decoder.reads)
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=0.02 * float(found[0].abs().max()))
    assert len({pages for _, pages in reads}) == 1
    kept = [kept for kept, _ in reads]
    assert max(kept) <= 1.02 * min(kept) < reads[0][1]


def test_a_decoder_starts_anew_with_every_prompt(half: LoadedModel):
    decoder = Decoder(half, parse_policy("mvar/coverage:0.8"), PAGE, max_tokens=160)
    first = fed(decoder)
    reads = decoder.reads
    fed(decoder, [PROMPT[::-1]], DECODED[:3])
    assert torch.equal(fed(decoder), first)
    assert decoder.reads == reads


def test_a_batch_on_the_kernels_is_its_requests(half: LoadedModel):
    decoder = Decoder(half, parse_policy("mvar/coverage:0.8"), PAGE, max_tokens=100)
    prompts = [PROMPT, PROMPT[::-1]]
    together = fed(decoder, prompts, DECODED[:4])
    for place, prompt in enumerate(prompts):
        alone = fed(decoder, [prompt], DECODED[:4])[:, 0]
        # Where two pages are close, rounding decides which is kept.
        close = (together[:, place] - alone).abs().amax(-1) <= 0.02 * alone.abs().max()
        assert close.sum() >= len(close) - 1
    for text in ("exact/coverage:0.9", "mvar/proportional:0.3"):
        with pytest.raises(CoverageLabError, match="for one request at a time"):
            Decoder(half, parse_policy(text), PAGE, max_tokens=160).prefill(prompts)


@pytest.mark.parametrize("max_tokens", [None, 160])
def test_sliding_windows_on_both_caches(max_tokens: int | None):
    model = make(MistralConfig(**SHAPE, sliding_window=40), torch.float32)
    logits = fed(Decoder(model, parse_policy("exact/coverage:1"), PAGE, max_tokens=max_tokens))
    wanted = model.model(torch.tensor([PROMPT + DECODED], device=DEVICE)).logits[0, len(PROMPT) - 1 :]
    assert torch.allclose(logits[:, 0], wanted, atol=1e-4)


def test_answers_are_greedy(single: LoadedModel):
    wanted = list(PROMPT)
    for _ in range(8):
        wanted.append(int(single.model(torch.tensor([wanted], device=DEVICE)).logits[0, -1].argmax()))
    answer = wanted[len(PROMPT) :]
    for policy in (None, parse_policy("exact/coverage:1")):
        decoder = Decoder(single, policy, PAGE)
        assert decoder.generate(PROMPT, 8) == answer
        assert decoder.generate(PROMPT, 8, {answer[3]}) == answer[: answer.index(answer[3])]
        assert decoder.generate(PROMPT, 0) == []


def test_bad_input_is_one_line(single: LoadedModel):
    policy = parse_policy("exact/coverage:0.9")
    for arguments, message in (
        ({"max_tokens": 257}, "a cache of 257 tokens; the model's window has 256"),
        ({"max_tokens": 0}, "a cache of 0 tokens"),
        ({"max_tokens": 9.5}, "max_tokens 9.5 is no number of tokens"),
        ({"page_size": 3}, "page size 3 is not a power of two"),
        ({"graph": True}, "can't be captured: it needs a static cache"),
        *([] if GPU else [({"graph": True, "max_tokens": 9}, "can't be captured: it needs a GPU")]),
    ):
        with pytest.raises(CoverageLabError, match=message):
            Decoder(single, policy, **arguments)
    for text, message in (
        ("exact/fixed:3,dense_layers=7", "the model has no layer 7; it has 0 to 1"),
        ("exact/profiled", "no profile"),
    ):
        with pytest.raises(CoverageLabError, match=message):
            Decoder(single, parse_policy(text), PAGE)
    decoder = Decoder(single, policy, PAGE, max_tokens=94)
    with pytest.raises(CoverageLabError, match="call prefill first"):
        decoder.step([1])
    for prompts in ([[]], [], [[1], [1, 2]]):
        with pytest.raises(
            CoverageLabError, match="must have a token or more, and in one batch as many each"
        ):
            decoder.prefill(prompts)
    with pytest.raises(CoverageLabError, match="95 tokens do not fit in the cache of 94"):
        decoder.prefill([[1] * 95])
    with pytest.raises(CoverageLabError, match="95 tokens do not fit in the cache of 94"):
        decoder.generate(PROMPT, 4)
    decoder.prefill([PROMPT[:20]])
    with pytest.raises(CoverageLabError, match="2 tokens for 1 requests; give one for each"):
        decoder.step([1, 2])
    for tokens, message in (
        ([64], "token 64 is not one of the model's 64"),
        ([-1], "token -1 is not"),
        ([0.5], "one token id of each request"),
        ([True], "one token id of each request"),
        ([[1]], "one token id of each request"),
        (["a"], "one token id of each request"),
        (3, "one token id of each request"),
        ([], "0 tokens for 1 requests"),
    ):
        with pytest.raises(CoverageLabError, match=message):
            decoder.step(tokens)  # type: ignore[arg-type]
    # Nothing of them is left, and any kind of whole number is one.
    first = decoder.step([1])
    for dtype in (torch.uint8, torch.int16, torch.int32):
        decoder.prefill([torch.tensor(PROMPT[:20], dtype=dtype)])  # type: ignore[list-item]
        assert torch.equal(decoder.step(torch.tensor([1], dtype=dtype)), first)
    decoder.prefill(np.array([PROMPT[:20]], np.uint16))  # type: ignore[arg-type]
    assert torch.equal(decoder.step(np.array([1], np.uint16)), first)  # type: ignore[arg-type]
    assert Decoder(single, policy, max_tokens=np.int64(99)).max_tokens == 99  # type: ignore[arg-type]
    for prompts in (5, [5], [None], [[True, False]], ["text"], [[0.5]]):
        with pytest.raises(CoverageLabError, match="a prompt is a list of token ids"):
            decoder.prefill(prompts)  # type: ignore[arg-type]
    with pytest.raises(CoverageLabError, match="'smollm2' is no loaded model; load_model"):
        Decoder("smollm2", policy)  # type: ignore[arg-type]
    with pytest.raises(CoverageLabError, match="5 is no policy"):
        Decoder(single, 5)  # type: ignore[arg-type]
    with pytest.raises(CoverageLabError, match="backend 'cuda' is not reference or triton"):
        Decoder(single, backend="cuda")
    with pytest.raises(CoverageLabError, match="257 tokens do not fit in the model's window of 256"):
        Decoder(single, policy).prefill([[1] * 257])
    for prompts in ("text", ["text"], [[[1, 2], [3, 4]]], [[0.5]], [[None]]):
        with pytest.raises(CoverageLabError, match="a prompt is a list of token ids"):
            decoder.prefill(prompts)  # type: ignore[arg-type]
    size = len(single.model.get_input_embeddings().weight)  # type: ignore[arg-type]
    for token in (-1, size):
        with pytest.raises(CoverageLabError, match=f"token {token} is not one of the model's {size}"):
            decoder.generate([1, token], 1)
    with pytest.raises(CoverageLabError, match="-1 steps; give how many tokens"):
        decoder.generate([1], -1)


def test_a_policy_can_be_a_text(single: LoadedModel) -> None:
    assert Decoder(single, "exact/fixed:3", PAGE).policy == parse_policy("exact/fixed:3")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "text", [None, "mvar/coverage:0.8", "quest/fixed:4,dense_layers=0", "mvar/coverage:1"]
)
def test_a_captured_step_gives_the_same_tokens(half: LoadedModel, text: str | None, batch: int):
    policy = None if text is None else parse_policy(text)
    eager, graph = (Decoder(half, policy, PAGE, max_tokens=160, graph=graph) for graph in (False, True))
    prompts = [PROMPT, PROMPT[::-1], PROMPT[5:] + PROMPT[:5]][:batch]
    for turn in (prompts, [prompt[:70] for prompt in prompts], prompts):
        wanted, found = fed(eager, turn), fed(graph, turn)
        assert torch.equal(wanted.argmax(-1), found.argmax(-1))
        assert torch.allclose(wanted, found, atol=0.01 * float(wanted.abs().max()))
        assert eager.reads == graph.reads
