"""Turn examples into token ids of at most the wanted length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coverage_lab.collectors.datasets import Example
from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for the message when the chat template is split around it.
_PLACEHOLDER = "coverage-lab-message"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt ready for the model.

    Parameters
    ----------
    ids : list of int
        The token ids, with the chat template and special tokens.
    dropped : int
        Tokens of the example's context that were left out.
    reference_ids : list of int
        Tokens that forced decoding feeds, at most one a step; empty for other modes.
    chat : bool
        Whether the chat template was used.
    """

    ids: list[int]
    dropped: int
    reference_ids: list[int]
    chat: bool


@dataclass(frozen=True)
class _Frame:
    """What stands around the user's text.

    `before` and `after` are the chat template's text; `opening` and `closing` are those in tokens
    or, without a template, the tokenizer's special tokens.
    """

    opening: list[int]
    closing: list[int]
    before: str = ""
    after: str = ""
    strips: bool = False


class PromptBuilder:
    """Renders, tokenizes and cuts examples for one tokenizer.

    A prompt that fits is tokenized as a whole. A longer one is put together from its parts, so that
    only the context loses tokens and the template and the question stay whole.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Tokenizer of the model.
    chat : bool, optional
        True for the chat template on every example, False for none; by default examples that are
        meant for it get it, if the tokenizer has one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not self._has_template:
            raise CoverageLabError("the tokenizer has no chat template; leave out --chat")

    def count(self, example: Example) -> int:
        """Return how many tokens the prompt of an example has when nothing is cut."""
        text = example.before + example.context + example.after
        return len(self._whole(text, self._uses_template(example), example.prefix))

    def build(self, example: Example, limit: int | None, steps: int, forced: bool) -> Prompt:
        """Return the prompt of an example.

        Parameters
        ----------
        example : Example
            What to tokenize.
        limit : int, optional
            Most tokens that the prompt may have; a prompt that is cut has exactly so many.
        steps : int
            Decode steps that will follow.
        forced : bool
            Whether they are fed reference tokens.

        Raises
        ------
        CoverageLabError
            If the prompt is empty or cannot be cut to the limit, or has no reference to feed.
        """
        chat = self._uses_template(example)
        text = example.before + example.context + example.after
        if not text.strip():
            raise CoverageLabError(f"{_where(example)}: the prompt is empty")
        left_out: list[int] = []
        # A context that is cut at its end comes much longer than needed: not worth tokenizing twice.
        if limit is not None and example.cut == "end":
            ids, left_out = self._fit(example, chat, limit)
        else:
            ids = self._whole(text, chat, example.prefix)
            if limit is not None and len(ids) > limit:
                if example.cut == "never":
                    raise CoverageLabError(
                        f"{_where(example)}: the prompt has {len(ids)} tokens and must not be cut; "
                        f"raise --max-prompt-tokens from {limit}"
                    )
                ids, left_out = self._fit(example, chat, limit)
        frame = self._frame(chat)
        if ids == self._single_bos(frame.opening + frame.closing, chat):
            raise CoverageLabError(f"{_where(example)}: the tokenizer makes no tokens of the prompt")
        reference = self._reference(example, left_out)[:steps] if forced else []
        return Prompt(ids=ids, dropped=len(left_out), reference_ids=reference, chat=chat)

    def _uses_template(self, example: Example) -> bool:
        return self._has_template and example.chat if self._chat is None else self._chat

    def _whole(self, text: str, chat: bool, prefix: str) -> list[int]:
        """Tokenize a prompt in one piece, the beginning of the answer included."""
        if not chat:
            ids = self._encode(text + prefix, special=True)
        elif prefix:
            ids = self._encode(self._rendered(text) + prefix)
        else:
            # A BatchEncoding or a list, depending on the version of transformers.
            encoded: Any = self._tokenizer.apply_chat_template(
                _message(text), tokenize=True, add_generation_prompt=True
            )
            ids = list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)
        return self._single_bos(ids, chat)

    def _fit(self, example: Example, chat: bool, limit: int) -> tuple[list[int], list[int]]:
        """Tokenize a prompt part by part and cut its context; return the ids and those left out."""
        frame = self._frame(chat)
        before, context, after, prefix = example.before, example.context, example.after, example.prefix
        if frame.strips:
            before, after = before.lstrip(), after.rstrip()
            context = context if before else context.lstrip()
            context = context if after else context.rstrip()
        if chat:
            head, tail = self._encode(frame.before + before), self._encode(after + frame.after + prefix)
        else:
            head, tail = frame.opening + self._encode(before), self._encode(after + prefix) + frame.closing
        body = self._encode(context)
        head = self._single_bos(head, chat)
        if head == [self._tokenizer.bos_token_id]:
            body = self._single_bos(head + body, chat)[1:]

        room = limit - len(head) - len(tail)
        if len(body) <= room:
            whole = self._whole(before + context + after, chat, prefix)
            return (whole if len(whole) <= limit else head + body + tail), []
        if room < 1:
            raise CoverageLabError(
                f"{_where(example)}: {len(head) + len(tail)} tokens stand around the context, "
                f"which leaves it no room; raise --max-prompt-tokens from {limit}"
            )
        first = room if example.cut == "end" else room // 2
        resume = len(body) - (room - first)
        return head + body[:first] + body[resume:] + tail, body[first:resume]

    def _reference(self, example: Example, left_out: list[int]) -> list[int]:
        """Return the tokens that may follow the prompt in forced decoding."""
        if example.answers:
            reference = self._encode(example.answers[0])
        elif example.cut == "end" and not example.after + example.prefix:
            reference = left_out
        else:
            reference = []
        if not reference:
            raise CoverageLabError(
                f"{_where(example)}: neither an answer nor more text to feed after the prompt; "
                "use --decode greedy"
            )
        return reference

    def _encode(self, text: str, special: bool = False) -> list[int]:
        if not text and not special:
            return []
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _single_bos(self, ids: list[int], chat: bool) -> list[int]:
        """Drop all but the last BOS from a run of them at the start, where prompts begin with one."""
        bos = self._tokenizer.bos_token_id
        extra = 0
        if bos is not None and self._frame(chat).opening[:1] == [bos]:
            while ids[extra : extra + 2] == [bos, bos]:
                extra += 1
        return ids[extra:]

    def _frame(self, chat: bool) -> _Frame:
        return self._chat_frame if chat else self._plain_frame

    @cached_property
    def _plain_frame(self) -> _Frame:
        text = "a"
        inner, outer = self._encode(text), self._encode(text, special=True)
        added = len(outer) - len(inner)
        start = next(i for i in range(added, -1, -1) if outer[i : i + len(inner)] == inner)
        return _Frame(opening=outer[:start], closing=outer[start + len(inner) :])

    @cached_property
    def _chat_frame(self) -> _Frame:
        before, found, after = self._rendered(_PLACEHOLDER).partition(_PLACEHOLDER)
        if not found or _PLACEHOLDER in after:
            raise CoverageLabError("the chat template does not hold the message just once; use --no-chat")
        return _Frame(
            opening=self._encode(before),
            closing=self._encode(after),
            before=before,
            after=after,
            strips=self._rendered(f" {_PLACEHOLDER} ") == before + _PLACEHOLDER + after,
        )

    def _rendered(self, text: str) -> str:
        return str(
            self._tokenizer.apply_chat_template(_message(text), tokenize=False, add_generation_prompt=True)
        )


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _where(example: Example) -> str:
    return example.source or f"{example.task}/{example.index}"
