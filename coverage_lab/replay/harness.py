"""lm-evaluation-harness tasks under a policy.

The tasks and their scores are lm_eval's; the model is `Decoder`, so that contexts are read dense and every
token after them is decoded under the policy::

    python -m coverage_lab.replay.harness --model coverage_lab \\
        --model_args pretrained=smollm2,policy=mvar/coverage:0.98 --tasks longbench_hotpotqa

takes what `lm_eval` takes. Releases of lm_eval after 0.4.13 find the model by its entry point, and then
`lm_eval --model coverage_lab` is the same. In Python, import this module and call
`lm_eval.simple_evaluate(model="coverage_lab", model_args=...)`.

lm_eval splits `--model_args` at commas. A comma within a policy is written as a semicolon, or the arguments
are given as JSON::

    --model_args "pretrained=smollm2,policy=mvar/coverage:0.98;dense_layers=0-1"
    --model_args '{"pretrained": "smollm2", "policy": "mvar/coverage:0.98,dense_layers=0-1"}'
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm

from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import Policy
from coverage_lab.replay.decoder import Decoder

try:
    import lm_eval.models  # noqa: F401  # lm_eval looks for its own models only while it knows of none
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    message = f"this needs lm_eval 0.4.10 or newer ({error}); pip install 'coverage-lab[eval]'"
    if __name__ == "__main__":
        sys.exit(f"error: {message}")
    raise CoverageLabError(message) from None

NAME = "coverage_lab"
# What lm_eval's command line passes where none is named, whether there is a GPU or not.
_DEFAULT_DEVICE = "cuda:0"
# Below lm_eval's logger, which is the one that its command line shows.
_log = logging.getLogger(f"lm_eval.{NAME}")
_ARGUMENTS = ("pretrained", "policy", "page_size", "backend", "dtype", "device", "max_length", "max_gen_toks")


class CoverageLM(TemplateLM):
    """A model of lm_eval that reads contexts dense and decodes under a policy, one request at a time.

    Parameters
    ----------
    pretrained : str or LoadedModel
        `smollm2` (packaged), a directory, a `.gguf` file, or an id on the Hugging Face hub.
    policy : str, optional
        Text form of a policy, with `;` for `,` where needed; dense attention by default.
    page_size : int
        Tokens a page, where the policy does not say.
    backend : {"reference", "triton"}, optional
        Plain torch, or the kernels; by default the kernels where they can.
    dtype : {"float32", "bfloat16", "float16"}, optional
    device : str, optional
    max_length : int, optional
        Most tokens of a context and what follows it; longer contexts lose their beginning. The model's window
        by default.
    max_gen_toks : int
        Most tokens of an answer, where the task does not say.
    batch_size, max_batch_size, trust_remote_code
        lm_eval passes them; they are not used.

    Notes
    -----
    The first token of an answer or continuation comes from the context's own logits, which are dense: a task
    whose continuations are one token long says nothing about the policy, and a warning tells so. Decoding is
    greedy; a task that samples is refused.

    lm_eval keys answers that `--use_cache` keeps by the request alone: give every policy its own cache.

    Raises
    ------
    CoverageLabError
        For what can't be run, with the reason.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel | None = None,
        policy: str | None = None,
        page_size: int = 64,
        backend: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if others:
            raise CoverageLabError(
                f"unknown model argument {next(iter(others))!r}; known: {', '.join(_ARGUMENTS)}; "
                "a comma within a policy is written as ;"
            )
        if pretrained is None:
            raise CoverageLabError("no model is named; try --model_args pretrained=smollm2")
        if batch_size not in (None, 1, "1"):
            _log.warning("requests are decoded one at a time; batch size %s is not used", batch_size)
        chosen = Policy.parse(str(policy).replace(";", ",")) if policy else None
        page_size, self.max_gen_toks = _whole("page_size", page_size), _whole("max_gen_toks", max_gen_toks)
        loaded = pretrained
        if not isinstance(loaded, LoadedModel):
            if device == _DEFAULT_DEVICE and not torch.cuda.is_available():
                device = None
            loaded = load_model(str(loaded), dtype, device)
        window = loaded.max_tokens
        if max_length is not None and _whole("max_length", max_length) > (window or max_length):
            raise CoverageLabError(f"max_length {max_length} is more than the model's window of {window}")
        self.max_length = max_length or window
        self.decoder = Decoder(loaded, chosen, page_size, backend=backend)
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        self._kept = self._pages = self._steps = self._uncounted = self._cut = 0
        _log.info("%s", ", ".join(f"{key}: {value}" for key, value in self._settings().items()))

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> CoverageLM:
        """Return the model of some arguments, which go before those that lm_eval adds."""
        return cls(**(additional_config or {}) | arg_dict)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context: BOS, or else EOS."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise CoverageLabError("the tokenizer has neither BOS nor EOS to stand for an empty context")

    @property
    def tokenizer_name(self) -> str:
        """Part of the key under which lm_eval keeps prompts that went through the chat template."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation; without a generation prompt its last message goes on."""
        if not self.tokenizer.chat_template:
            raise CoverageLabError("the tokenizer has no chat template; leave out --apply_chat_template")
        options: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:  # some templates know no system message; lm_eval's own model leaves it out too
            _log.warning("the chat template takes no system message; it is left out")
            rest = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(rest, **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, after the BOS that the tokenizer puts before a text; never two."""
        ids = list(self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"])
        opening = [] if add_special_tokens is False else self._opening
        return ids if ids[: len(opening)] == opening else [*opening, *ids]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Refuse: no policy would take part."""
        raise CoverageLabError(
            "a task of output_type loglikelihood_rolling reads whole texts at once, without a policy; "
            "choose tasks of generate_until, loglikelihood or multiple_choice"
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy answers, each up to the first of its stop strings."""
        wanted = [(context, given, *self._limits(given)) for context, given in (r.args for r in requests)]
        answers, before = list[str](), self._steps
        previous: Any = None
        for context, given, until, most in tqdm(
            wanted, desc="Running generate_until requests", disable=disable_tqdm
        ):
            if previous == (context, until, most):  # a repeat, and greedy answers are alike
                answers.append(answers[-1])
            else:
                answers.append(self._answer(self.tok_encode(context), until, most))
            previous = context, until, most
            self.cache_hook.add_partial("generate_until", (context, given), answers[-1])
        self._tell(before)
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        answers, before = list[tuple[float, bool]](), self._steps
        read, stepped = list[int](), False
        for texts, context, continuation in tqdm(
            requests, desc="Running loglikelihood requests", disable=disable_tqdm
        ):
            if not continuation:
                raise CoverageLabError(f"the continuation {texts[1]!r} has no token of its own")
            context = self._fitted(context, len(continuation) - 1)
            steps = len(continuation) > 1
            # The choices of a question share a context; steps write behind it, so each needs a fresh one.
            if context != read or (steps and stepped):
                first, read, stepped = self.decoder.prefill([context]), context, False
            answers.append(self._score(first, continuation))
            stepped |= steps
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        self._tell(before)
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval adds to the `config` of its results, after the run.

        `reads` are the pages kept over the pages seen, summed over requests, layers, KV heads and decode
        steps; None where no step was decoded. Contexts and what estimates read besides are not in it.
        """
        return self._settings() | {
            "reads": self._reads(),
            "pages_kept": self._kept,
            "pages_seen": self._pages,
            "decode_steps": self._steps,
            "contexts_cut": self._cut,
            "model_device": str(self.loaded.model.device),
            "model_dtype": str(self.loaded.model.dtype),
            "model_revision": self.loaded.identity.get("revision"),
            "model_weights": self.loaded.identity.get("weights"),
        }

    def _settings(self) -> dict[str, Any]:
        policy, backend = self.decoder.policy, self.decoder.backend
        own_size = policy.page_size if policy else None
        page_size = own_size or self.decoder.page_size
        return {"policy": str(policy or "dense"), "page_size": page_size, "backend": backend}

    def _reads(self) -> float | None:
        if self.decoder.policy is None:
            return 1.0 if self._steps else None
        return self._kept / self._pages if self._pages else None

    def _tell(self, before: int) -> None:
        """Log what was read so far, and what a reader of the scores must know; `before`: steps until now."""
        policy, reads = self.decoder.policy or "dense attention", self._reads()
        if reads is not None:
            _log.info("%s read %.1f%% of the pages in %d decode steps", policy, 100 * reads, self._steps)
        if self.decoder.policy is not None and self._steps == before:
            _log.warning("all answers are of one token, which dense logits give: %s took no part", policy)
        if self._cut:
            _log.warning("%d contexts were cut from the left to fit in %d tokens", self._cut, self.max_length)

    def _limits(self, given: dict[str, Any]) -> tuple[list[str], int]:
        """Return the stop strings and the most tokens of a request, or refuse it."""
        options = normalize_gen_kwargs(given, self.max_gen_toks)
        if options["do_sample"] or options.get("num_beams", 1) != 1:
            raise CoverageLabError(
                f"the task samples or searches ({given}), and decoding under a policy is greedy; "
                "--gen_kwargs do_sample=False,num_beams=1 makes it so"
            )
        most = _whole("max_gen_toks", options["max_gen_toks"])
        if self.max_length is not None and most >= self.max_length:
            raise CoverageLabError(
                f"max_gen_toks {most} leaves no room for a context in {self.max_length} tokens; "
                "set a lower one with --gen_kwargs max_gen_toks=..."
            )
        return [text for text in options["until"] if text], most

    def _fitted(self, context: list[int], after: int) -> list[int]:
        """Return the end of a context that leaves room for so many tokens after it."""
        context = context or [self.prefix_token_id]
        room = len(context) if self.max_length is None else self.max_length - after
        if room < 1:
            raise CoverageLabError(
                f"a continuation of {after + 1} tokens leaves no room for a context: "
                f"max_length is {self.max_length}"
            )
        self._cut += len(context) > room
        return context[-room:]

    def _answer(self, context: list[int], until: Sequence[str], most: int) -> str:
        logits, ids, text = self.decoder.prefill([self._fitted(context, most)]), list[int](), ""
        while (token := int(logits[0].argmax())) not in self._stop_ids:
            ids.append(token)
            # A stop string may begin within one token and end within another, and may be a special token.
            text = str(self.tokenizer.decode(ids))
            ends = [place for stop in until if (place := text.find(stop)) >= 0]
            text = text[: min(ends, default=None)]
            if ends or len(ids) == most:
                break
            logits = self._step(token)
        self._count()
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text

    def _score(self, first: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
        """Return the log likelihood of a continuation in nats, and whether it is the greedy one."""
        logits, scores, greedy = first, list[Tensor](), list[Tensor]()
        for place, token in enumerate(continuation):
            if place:
                logits = self._step(continuation[place - 1])
            scores.append(logits[0].float().log_softmax(-1)[token])
            greedy.append(logits[0].argmax() == token)
        self._count()
        return float(sum(scores)), all(map(bool, greedy))

    def _step(self, token: int) -> Tensor:
        self._uncounted += 1
        return self.decoder.step([token])

    def _count(self) -> None:
        """Add the steps of a request, and what they read."""
        if self._uncounted:
            kept, pages = self.decoder.reads
            self._kept, self._pages = self._kept + kept, self._pages + pages
            self._steps, self._uncounted = self._steps + self._uncounted, 0

    @cached_property
    def _opening(self) -> list[int]:
        """What the tokenizer puts before a text."""
        inner, outer = (
            self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
        )
        return list(outer[: list(outer).index(inner[0])])

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        held = getattr(self.loaded.model.generation_config, "eos_token_id", None)
        ids = set(held) if isinstance(held, list) else {held}
        return frozenset(token for token in ids | {self.eot_token_id} if token is not None)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise CoverageLabError(
        f"{name}={value} is no whole number from 1 on; a comma within a policy is written as ;"
    )


def main() -> None:
    """Run lm_eval's command line; errors of the user are one line and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except CoverageLabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # of a tokenizer or of data that a task loads for itself
        said = " ".join(str(error).split())[:300].rstrip(".")
        hint = "; tasks that load the tokenizer for themselves need pretrained=DIRECTORY"
        print(f"error: {said}{hint if 'huggingface' in said else ''}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    # Not the class of this copy of the module: the one that others import is registered.
    from coverage_lab.replay.harness import main

    main()
elif NAME not in model_registry:  # an entry point is there already where lm_eval looks for them
    register_model(NAME)(CoverageLM)
