"""A small random llama on disk, and traces of it on prompts of random words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.trace import Trace

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS * GROUP,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_model(directory: Path, seed: int = 0, peaked: float = 2.0, **changes: Any) -> Path:
    """Save a model whose queries are `peaked` times as long, and a tokenizer of the words w0 to w63."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | changes))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weights.mul_(peaked)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return directory


def write_prompts(directory: Path, tasks: Mapping[str, Sequence[int]]) -> Path:
    """Write prompts of so many random words, a file a task."""
    generator = np.random.default_rng(1)
    directory.mkdir()
    for task, lengths in tasks.items():
        prompts = [" ".join(f"w{word}" for word in generator.integers(64, size=n)) for n in lengths]
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (directory / f"{task}.jsonl").write_text("".join(lines))
    return directory


def record_trace(output: Path, model: Path, prompts: Path, **options: Any) -> Trace:
    """Record greedy answers in float32 on a CPU."""
    common: dict[str, Any] = {"ignore_eos": True, "device": "cpu", "dtype": "float32"}
    common |= {"estimators": ("exact", "mvar", "mean"), "model": str(model), "dataset": "jsonl"}
    collect(CollectOptions(output=output, data_dir=prompts, **common | options))
    return Trace(output)
