"""Observing attention changes nothing that a model computes, and leaves nothing behind."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from coverage_lab.collectors import attention
from coverage_lab.collectors.attention import AttentionCall, cache_argument, observed_attention
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.estimators import estimators

STEPS = 6
PAGE = 4


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 300, (n,), generator=generator).tolist() for n in lengths]


class Recording:
    """Recorders for a batch, fed like `decode_batch` does."""

    def __init__(self, lengths: Sequence[int]) -> None:
        held = {name: estimators.get(name)() for name in ("mvar", "quest")}
        self.recorders = [RequestRecorder(PAGE, held, max(lengths) - n) for n in lengths]
        self.cached, self.step = max(lengths), None
        self.calls = 0

    def __call__(self, call: AttentionCall) -> None:
        self.calls += 1
        for row, recorder in enumerate(self.recorders):
            recorder.see(call, row, self.cached, self.step)


@torch.inference_mode()
def decode(
    model: PreTrainedModel, batch: Sequence[Sequence[int]], cache: Any, recording: Recording | None = None
) -> Tensor:
    """Return the logits `[1 + STEPS, batch, vocabulary]` of the last token of every forward call."""
    longest = max(map(len, batch))
    tokens = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in batch])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch])
    padded = bool((mask == 0).any())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    held = {cache_argument(model): cache}
    logits = []
    with observed_attention(model, recording) if recording else nullcontext():
        for step in range(-1, STEPS):
            if step >= 0:
                tokens = logits[-1].argmax(-1, keepdim=True)
                mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)
                positions = mask.sum(1, keepdim=True) - 1
                if recording:
                    recording.cached, recording.step = recording.cached + 1, step
            given = {"attention_mask": mask, "position_ids": positions} if padded else {}
            logits.append(model(tokens, use_cache=True, **given, **held).logits[:, -1])
    return torch.stack(logits)


def dynamic(model: PreTrainedModel) -> Any:
    return DynamicCache(config=model.config)


def static(model: PreTrainedModel) -> Any:
    return StaticCache(config=model.config, max_cache_len=80)


def state(model: PreTrainedModel) -> list[Any]:
    """Return all that observing may have touched."""
    implementations = [
        module.config._attn_implementation
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return [json.loads(model.config.to_json_string(use_diff=False)), implementations, attributes]


BATCHES = [
    pytest.param((41,), id="alone"),
    pytest.param((41, 17), id="two"),
    pytest.param((5, 41, 30), id="three"),
]


class TestGoldenLogits:
    @pytest.mark.parametrize("lengths", BATCHES)
    def test_dynamic_cache(self, zoo: Any, family: str, lengths: tuple[int, ...]):
        self.check(zoo.loaded(family).model, lengths, dynamic)

    @pytest.mark.parametrize("lengths", BATCHES)
    @pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
    def test_static_cache(self, zoo: Any, family: str, lengths: tuple[int, ...]):
        self.check(zoo.loaded(family).model, lengths, static)

    @staticmethod
    def check(
        model: PreTrainedModel, lengths: Sequence[int], cache: Callable[[PreTrainedModel], Any]
    ) -> None:
        batch, before = prompts(lengths), state(model)
        plain = decode(model, batch, cache(model))
        recording = Recording(lengths)
        recorded = decode(model, batch, cache(model), recording)
        assert recording.calls == (1 + STEPS) * model.config.num_hidden_layers
        torch.testing.assert_close(recorded, plain, atol=1e-5, rtol=0)
        assert state(model) == before
        assert plain.std() > 0.1

    def test_static_cache_records_the_same_masses(self, zoo: Any):
        model, lengths = zoo.loaded("llama").model, (41, 17)
        masses = []
        for cache in (dynamic(model), static(model)):
            recording = Recording(lengths)
            decode(model, prompts(lengths), cache, recording)
            masses.append([recorder.take() for recorder in recording.recorders])
        torch.testing.assert_close(masses[1], masses[0], atol=1e-4, rtol=0)


class TestObserving:
    def test_sdpa_keeps_its_fast_path(self, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        """No mask is made where none was, every call is SDPA, and its keys are not repeated by us."""
        model = zoo.loaded("llama").model
        seen: list[list[Any]] = []
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def spy(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
            seen[-1].append((query.shape, key.shape, attn_mask is None, sorted(options.items())))
            return sdpa(query, key, value, attn_mask=attn_mask, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        for recording in (None, Recording([41])):
            seen.append([])
            decode(model, prompts([41]), dynamic(model), recording)
        assert seen[0] == seen[1]
        assert len(seen[1]) == (1 + STEPS) * model.config.num_hidden_layers
        assert all(maskless for _, _, maskless, _ in seen[1])

    def test_calls_tell_the_attention(self, zoo: Any, family: str):
        model = zoo.loaded(family).model
        calls: list[AttentionCall] = []
        with observed_attention(model, calls.append), torch.inference_mode():
            model(torch.tensor(prompts([30])))
        config = model.config
        assert [call.layer for call in calls] == [0, 1, 2, 3]
        for call in calls:
            assert call.query.shape == (1, 6, 30, 16)
            assert call.key.shape == call.value.shape == (1, 2, 30, 16)
            assert call.scaling == pytest.approx(getattr(config, "query_pre_attn_scalar", 16) ** -0.5)
            assert call.softcap == (8.0 if family == "gemma2" else None)
            assert (call.sinks is not None) == (family == "gpt_oss")
            assert call.output.shape == (1, 30, 6, 16)
        windows = [call.window for call in calls]
        alternating = [zoo.window, None] * 2
        expected = {
            "mistral": [zoo.window] * 4,
            **dict.fromkeys(("gemma2", "gemma3", "gpt_oss"), alternating),
        }
        assert windows == expected.get(family, [None] * 4)

    def test_restores_after_an_exception(self, zoo: Any, family: str):
        model = zoo.loaded(family).model
        before = state(model)

        def fail(call: AttentionCall) -> None:
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"), observed_attention(model, fail):
            model(torch.tensor([[5]]))
        assert state(model) == before
        model(torch.tensor([[5]]))

    def test_sees_nothing_after_it_ends(self, zoo: Any):
        model, calls = zoo.loaded("llama").model, []
        for _ in range(2):
            with observed_attention(model, calls.append):
                model(torch.tensor([[5]]))
        count = len(calls)
        model(torch.tensor([[5]]))
        assert len(calls) == count == 2 * model.config.num_hidden_layers

    def test_refuses_to_nest(self, zoo: Any):
        model, other = zoo.loaded("llama").model, zoo.loaded("qwen3").model
        before, calls = state(model), []
        with observed_attention(model, calls.append):
            with pytest.raises(CoverageLabError, match="observed already"), observed_attention(other, print):
                pass
            model(torch.tensor([[5]]))
        assert len(calls) == model.config.num_hidden_layers
        assert state(model) == before

    def test_refuses_attention_without_a_mask_function(self, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        model = zoo.build("llama")
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "maskless")
        attention.AttentionInterface.register("maskless", lambda *args, **options: None)
        with (
            pytest.raises(CoverageLabError, match="'maskless' has no mask function"),
            observed_attention(model, print),
        ):
            pass

    def test_a_failed_start_leaves_no_observer(self, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        model = zoo.build("llama")

        def refuse(name: str) -> None:
            if name != "sdpa":
                raise ValueError(name)

        monkeypatch.setattr(model, "set_attn_implementation", refuse)
        with pytest.raises(ValueError, match="coverage_lab_sdpa"), observed_attention(model, print):
            pass
        with observed_attention(zoo.loaded("llama").model, print):
            pass
