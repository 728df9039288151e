"""What recording costs: the time of a decode step, and the peak memory of a whole run.

    python benchmarks/recording.py [--tokens 4096] [--steps 24]

Steps of the plain model, of the recorded one (exact and mvar) and of eager attention with
`output_attentions`, which is what people use without this library, take turns on caches of equal
length, so that the ratios come from one run.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import peak_memory_mib, save
from transformers import DynamicCache

from coverage_lab.collectors.attention import cache_argument, observed_attention
from coverage_lab.collectors.models import load_model
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.policies.estimators import estimators

GENERATE = """
import sys, torch
from coverage_lab.collectors.datasets import datasets
from coverage_lab.collectors.models import load_model
from coverage_lab.collectors.prompts import PromptBuilder
tokens, steps = int(sys.argv[1]), int(sys.argv[2])
loaded = load_model("smollm2")
example = next(datasets.get("docs")(limit=1).examples(tokens, steps))
ids = torch.tensor([PromptBuilder(loaded.tokenizer).build(example, tokens, steps, False).ids])
loaded.model.generate(ids, max_new_tokens=steps, do_sample=False)
"""

COLLECT = """
import sys
from pathlib import Path
from coverage_lab.collectors.collect import CollectOptions, collect
collect(CollectOptions(model="smollm2", dataset="docs", limit=1, output=Path(sys.argv[3]) / "trace",
                       max_prompt_tokens=int(sys.argv[1]), steps=int(sys.argv[2])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(options.tokens), str(options.steps), folder]
        generate, collect = peak_memory_mib(GENERATE, *arguments), peak_memory_mib(COLLECT, *arguments)
        files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    seconds = step_seconds(options.tokens, options.steps)
    save(
        "recording",
        {
            "model": "smollm2",
            "prompt_tokens": options.tokens,
            "steps": options.steps,
            "step_ms": {name: round(1000 * value, 2) for name, value in seconds.items()},
            "recorded_over_plain": round(seconds["recorded"] / seconds["plain"], 3),
            "output_attentions_over_plain": round(seconds["output_attentions"] / seconds["plain"], 3),
            "peak_memory_mib": {"generate": round(generate), "collect": round(collect)},
            "memory_over_generate": round(collect / generate, 3),
            "trace_bytes": files,
        },
    )


def step_seconds(tokens: int, steps: int) -> dict[str, float]:
    """Return the median seconds of a decode step: plain, recorded, with `output_attentions`."""
    loaded = load_model("smollm2")
    model = loaded.model
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    recorder = RequestRecorder(64, {"mvar": estimators.get("mvar")()})

    def forward(cache: DynamicCache, new: torch.Tensor, **more: object) -> torch.Tensor:
        output = model(new, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache}, **more)
        return output.logits[:, -1].argmax(-1)[:, None]

    def recorded(cache: DynamicCache, new: torch.Tensor) -> torch.Tensor:
        cached = cache.get_seq_length() + new.shape[1]
        step = None if new.shape[1] > 1 else cached - tokens - 1
        with observed_attention(model, lambda call: recorder.see(call, 0, cached, step)):
            return forward(cache, new)

    def eager(cache: DynamicCache, new: torch.Tensor) -> torch.Tensor:
        model.set_attn_implementation("eager")
        try:
            return forward(cache, new, output_attentions=new.shape[1] == 1)
        finally:
            model.set_attn_implementation("sdpa")

    ways: dict[str, Callable[[DynamicCache, torch.Tensor], torch.Tensor]]
    ways = {"plain": forward, "recorded": recorded, "output_attentions": eager}
    caches = {name: DynamicCache(config=model.config) for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        # Eager attention would need tokens^2 memory for the prompt, so that cache is filled by SDPA too.
        latest = {name: (recorded if name == "recorded" else forward)(caches[name], ids) for name in ways}
        for _ in range(steps):
            for name, way in ways.items():
                start = time.perf_counter()
                latest[name] = way(caches[name], latest[name])
                times[name].append(time.perf_counter() - start)
    assert torch.equal(latest["plain"], latest["recorded"]), "recording changed a token"
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
