"""Tiny random models of every supported family, a tokenizer for them, and prompts of exact lengths."""

import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from coverage_lab.collectors.models import LoadedModel, load_model

SPECIALS = ["<s>", "</s>"]
BOS, EOS = 0, 1
WINDOW = 22  # no multiple of a page, so that a window begins within one
TEXT = (
    "The heron stood in the shallow water and waited; nothing moved but the reeds. "
    "By noon it had caught 3 fish, lost 1, and flown off (low, slow) over the mill. "
) * 12

# Six query heads on two KV heads: G = 3.
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # ten times the usual, so that attention is not flat
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, **ALTERNATING, head_dim=16, attn_logit_softcapping=8.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **ALTERNATING, head_dim=16, query_pre_attn_scalar=8),
    "phi3": lambda: Phi3Config(**SHAPE | {"hidden_size": 96}),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE,
        **ALTERNATING,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
SLIDING = {"mistral", "gemma2", "gemma3", "gpt_oss"}


class Zoo:
    """Models by family, each built from one seed and saved once."""

    sliding = SLIDING
    window = WINDOW

    def __init__(self, root: Path) -> None:
        self._root = root
        self.directory = cache(self._directory)
        self.loaded = cache(self._loaded)

    def build(self, family: str, **changes: Any) -> PreTrainedModel:
        """Return a new model in eval mode, some fields of its configuration changed."""
        torch.manual_seed(7)
        config = CONFIGS[family]()
        for name, value in changes.items():
            setattr(config, name, value)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.add_(1.0)
                elif name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.mul_(1.5)
        return model.eval()

    def save(self, model: PreTrainedModel, name: str) -> Path:
        """Save a model with the tokenizer in a directory of its own."""
        directory = self._root / name
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        return directory

    def _directory(self, family: str) -> Path:
        return self.save(self.build(family), family)

    def _loaded(self, family: str) -> LoadedModel:
        return load_model(str(self.directory(family)), device="cpu")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level BPE that puts one BOS before a text."""
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SHAPE["vocab_size"],
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator([TEXT], trainer)
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")

    def text(self, tokens: int, start: int = 0) -> str:
        """Return text of exactly so many tokens, BOS included."""
        ends = range(start + tokens, len(TEXT))
        return next(
            TEXT[start:end] for end in ends if len(self.tokenizer(TEXT[start:end]).input_ids) == tokens
        )

    def prompts(self, path: Path, lengths: Sequence[int], **fields: Any) -> Path:
        """Write a JSON Lines file with a prompt of each length in tokens, each beginning elsewhere."""
        rows = [{"prompt": self.text(n, 17 * i), **fields} for i, n in enumerate(lengths)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param
