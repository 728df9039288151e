"""Rendering, tokenizing and cutting of prompts, on small tokenizers made here."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from coverage_lab.collectors.datasets import Example
from coverage_lab.collectors.prompts import Prompt, PromptBuilder
from coverage_lab.errors import CoverageLabError

BOS, EOS, START = 0, 1, 2
SPECIALS = ["<s>", "</s>", "<|start|>"]

# The template writes BOS itself, once.
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STRIPPING = WITH_BOS.replace("m['content']", "m['content'] | trim")
DOUBLED = "{{ bos_token }}" + WITH_BOS
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")

TEXT = "the cat and the hat sat on the mat; then the dog and the frog ran off with that. " * 3


@cache
def core() -> Tokenizer:
    """Return a byte-level BPE whose merges span words' ends, so that cutting text changes tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@cache
def make(
    template: str | None = None, adds: str = "<s> $A", bos: str | None = "<s>"
) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(core().to_str())
    special = [(token, SPECIALS.index(token)) for token in SPECIALS]
    backend.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    options = {} if bos is None else {"bos_token": bos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **options)
    tokenizer.chat_template = template
    return tokenizer


def tokens(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def example(context: str = TEXT, **changes: Any) -> Example:
    return Example(**{"task": "t", "index": 0, "context": context, "source": "rows.jsonl:7"} | changes)


def build(
    tokenizer: Any,
    prompt: Example,
    limit: int | None = None,
    steps: int = 5,
    forced: bool = False,
    chat: bool | None = None,
) -> Prompt:
    return PromptBuilder(tokenizer, chat).build(prompt, limit, steps, forced)


def chat_text(tokenizer: Any, text: str) -> str:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )


class TestWhole:
    def test_plain_prompt_has_the_special_tokens(self):
        prompt = build(make(), example("the cat", before="see: ", after="?"), limit=100)
        assert prompt == Prompt(
            ids=tokens(make(), "see: the cat?", special=True), dropped=0, reference_ids=[], chat=False
        )
        assert prompt.ids[0] == BOS

    def test_chat_prompt_is_the_template_in_one_piece(self):
        tokenizer = make(WITH_BOS)
        prompt = build(tokenizer, example("the cat", before="see: ", after="?"))
        assert prompt.chat
        assert prompt.ids == tokens(tokenizer, chat_text(tokenizer, "see: the cat?"))

    def test_older_transformers_return_a_list(self):
        class Older(PreTrainedTokenizerFast):
            def apply_chat_template(self, *args: Any, **options: Any) -> Any:
                return super().apply_chat_template(*args, return_dict=False, **options)

        newer = make(WITH_BOS)
        older = Older(tokenizer_object=newer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
        older.chat_template = WITH_BOS
        assert build(older, example()).ids == build(newer, example()).ids

    @pytest.mark.parametrize("cut", ["middle", "end", "never"])
    @pytest.mark.parametrize("template", [None, WITH_BOS])
    def test_exact_fit_is_not_cut(self, cut: str, template: str | None):
        tokenizer = make(template)
        whole = build(tokenizer, example(cut=cut))
        assert build(tokenizer, example(cut=cut), limit=len(whole.ids)) == whole

    @pytest.mark.parametrize("cut", ["middle", "end"])
    def test_parts_that_fit_are_joined_before_tokenizing(self, cut: str):
        split = example("e cat and th", before="th", after="e hat", cut=cut)
        ids = build(make(), split, limit=30).ids
        assert ids == tokens(make(), "the cat and the hat", special=True)
        assert len(ids) < 1 + sum(len(tokens(make(), part)) for part in ("th", "e cat and th", "e hat"))

    def test_parts_that_fit_only_apart_are_left_apart(self):
        letters = {token: i for i, token in enumerate(["a", "b", "c", "d", "bc", "ab", "cd"])}
        merges = [("b", "c"), ("a", "b"), ("c", "d")]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, merges)))
        split = example("cd", before="ab")
        assert build(tokenizer, split).ids == tokens(tokenizer, "abcd") == [0, 4, 3]
        prompt = build(tokenizer, split, limit=2)
        assert (prompt.ids, prompt.dropped) == ([5, 6], 0)

    @pytest.mark.parametrize(
        ("template", "option", "meant", "used"),
        [
            (WITH_BOS, None, True, True),
            (WITH_BOS, None, False, False),
            (WITH_BOS, True, False, True),
            (WITH_BOS, False, True, False),
            (None, None, True, False),
            (None, False, True, False),
        ],
    )
    def test_when_the_template_is_used(
        self, template: str | None, option: bool | None, meant: bool, used: bool
    ):
        assert build(make(template), example(chat=meant), chat=option).chat is used

    def test_forced_template_must_be_there(self):
        with pytest.raises(CoverageLabError, match="no chat template"):
            PromptBuilder(make(), chat=True)


class TestCut:
    @pytest.mark.parametrize("limit", range(8, 40))
    @pytest.mark.parametrize("template", [None, WITH_BOS])
    def test_middle_keeps_both_ends(self, limit: int, template: str | None):
        tokenizer = make(template)
        ends = example(before="see: ", after=" what?", cut="middle")
        opening, closing = chat_text(tokenizer, "#").split("#") if template else ("<s>", "")
        head, tail = tokens(tokenizer, opening + "see: "), tokens(tokenizer, " what?" + closing)
        room = limit - len(head) - len(tail)
        if room < 1:
            with pytest.raises(CoverageLabError, match=r"rows\.jsonl:7: .* --max-prompt-tokens"):
                build(tokenizer, ends, limit)
            return
        body = tokens(tokenizer, TEXT)
        prompt = build(tokenizer, ends, limit)
        assert prompt.ids == head + body[: room // 2] + body[len(body) - (room - room // 2) :] + tail
        assert prompt.dropped == len(body) - room

    def test_end_keeps_the_start(self):
        body = tokens(make(), TEXT)
        prompt = build(make(), example(cut="end", after=" what?"), limit=20)
        tail = tokens(make(), " what?")
        assert prompt.ids == [BOS, *body[: 19 - len(tail)], *tail]

    def test_never_is_an_error_that_names_the_way_out(self):
        whole = len(build(make(), example()).ids)
        with pytest.raises(CoverageLabError) as caught:
            build(make(), example(cut="never"), limit=whole - 1)
        message = str(caught.value)
        assert message.startswith("rows.jsonl:7: ")
        assert str(whole) in message
        assert "--max-prompt-tokens" in message

    def test_tokens_after_the_text_stay_last(self):
        prompt = build(make(adds="<s> $A </s>"), example(), limit=9)
        assert (prompt.ids[0], prompt.ids[-1], len(prompt.ids)) == (BOS, EOS, 9)

    @pytest.mark.parametrize(
        "pieces", [("  a ", TEXT, " b  "), ("", f"  a{TEXT}b ", ""), ("  ", f"a{TEXT}b", "\n")]
    )
    def test_cut_prompts_are_stripped_where_the_template_strips(self, pieces: tuple[str, str, str]):
        tokenizer = make(STRIPPING)
        before, context, after = pieces
        ids = build(tokenizer, example(context, before=before, after=after), limit=40).ids
        assert len(ids) == 40
        text = tokenizer.decode(ids)
        assert text.startswith("<s><|start|>user\na")
        assert text.endswith("b</s>\n<|start|>assistant\n")

    def test_template_must_hold_the_message_once(self):
        twice = WITHOUT_BOS.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}")
        with pytest.raises(CoverageLabError, match="chat template"):
            build(make(twice), example(), limit=20)

    @given(
        before=st.text(max_size=8),
        context=st.text(max_size=60),
        after=st.text(max_size=8),
        cut=st.sampled_from(["middle", "end"]),
        limit=st.integers(1, 90),
        template=st.sampled_from([None, WITH_BOS, STRIPPING, WITHOUT_BOS, DOUBLED]),
        adds=st.sampled_from(["$A", "<s> $A", "<s> $A </s>"]),
    )
    def test_length_and_parts(
        self, before: str, context: str, after: str, cut: Any, limit: int, template: str | None, adds: str
    ):
        tokenizer = make(template, adds)
        prompt_text = example(context, before=before, after=after, cut=cut)
        try:
            whole = build(tokenizer, prompt_text)
            prompt = build(tokenizer, prompt_text, limit)
        except CoverageLabError:  # empty, or no room for the context
            return
        assert len(prompt.ids) <= limit
        if prompt.dropped:
            assert len(prompt.ids) == limit
            assert prompt.dropped <= len(tokens(tokenizer, context))
        elif len(whole.ids) <= limit:
            assert prompt == whole
        if template not in (None, WITHOUT_BOS) or (template is None and adds != "$A"):
            assert prompt.ids[:2] != [BOS, BOS]


class TestPrefix:
    """What the answer begins with comes last, behind the template."""

    def test_plain(self):
        prompt = build(make(), example("the cat", after="?", prefix=" It is"), limit=100)
        assert prompt.ids == tokens(make(), "the cat? It is", special=True)

    def test_chat(self):
        tokenizer = make(WITH_BOS)
        prompt = build(tokenizer, example("the cat", prefix=" It is"))
        assert prompt.ids == tokens(tokenizer, chat_text(tokenizer, "the cat") + " It is")
        assert tokenizer.decode(prompt.ids).endswith("assistant\n It is")

    @pytest.mark.parametrize("template", [None, WITH_BOS, STRIPPING])
    @pytest.mark.parametrize("cut", ["middle", "end"])
    def test_is_never_cut(self, template: str | None, cut: str):
        tokenizer = make(template)
        prompt = build(tokenizer, example(after=" what?", prefix=" It is", cut=cut), limit=40)
        assert len(prompt.ids) == 40
        assert tokenizer.decode(prompt.ids).endswith(("assistant\n" if template else "what?") + " It is")

    @pytest.mark.parametrize("template", [None, WITH_BOS])
    def test_count(self, template: str | None):
        builder = PromptBuilder(make(template))
        for changes in ({}, {"prefix": " It is"}, {"prefix": " It is", "chat": False}):
            prompt = example(**changes)
            assert builder.count(prompt) == len(builder.build(prompt, None, 5, False).ids)

    def test_text_that_goes_on_does_not_follow_it(self):
        with pytest.raises(CoverageLabError, match="--decode greedy"):
            build(make(), example(cut="end", prefix=" It is"), limit=20, forced=True)
        forced = build(make(), example(prefix=" It is", answers=("hat",)), forced=True)
        assert forced.reference_ids == tokens(make(), "hat")


class TestBos:
    @pytest.mark.parametrize("limit", [None, 20])
    @pytest.mark.parametrize("template", [None, WITH_BOS, DOUBLED])
    @pytest.mark.parametrize("written", ["", "<s>", "<s><s>"])
    def test_one_at_the_start_whoever_writes_it(self, limit: int | None, template: str | None, written: str):
        prompt = build(make(template), example(written + TEXT), limit)
        assert prompt.ids[0] == BOS
        assert prompt.ids[1] != BOS
        assert limit is None or len(prompt.ids) == limit

    def test_later_ones_are_the_users(self):
        assert build(make(), example("the <s><s> cat")).ids.count(BOS) == 3
        assert build(make(WITH_BOS), example("<s><s> cat")).ids.count(BOS) == 3

    def test_none_where_the_tokenizer_uses_none(self):
        assert BOS not in build(make(adds="$A"), example()).ids
        for bos in (None, "<s>"):
            assert build(make(adds="$A", bos=bos), example("<s><s>the")).ids[:2] == [BOS, BOS]

    @pytest.mark.parametrize("limit", [None, 20])
    def test_a_turn_marker_that_is_also_bos_stays(self, limit: int | None):
        tokenizer = make(WITHOUT_BOS, adds="$A", bos="<|start|>")
        prompt = build(tokenizer, example(), limit)
        assert prompt.ids[0] == START
        assert prompt.ids.count(START) == 2


class TestForced:
    def test_feeds_the_first_answer(self):
        prompt = build(make(), example(answers=("the dog and the frog", "no")), steps=3, forced=True)
        assert prompt.reference_ids == tokens(make(), "the dog and the frog")[:3]
        assert build(make(), example(answers=("hat",)), steps=99, forced=True).reference_ids == tokens(
            make(), "hat"
        )

    @given(limit=st.integers(2, 60), steps=st.integers(1, 60))
    def test_feeds_the_text_that_goes_on(self, limit: int, steps: int):
        body = tokens(make(), TEXT)
        prompt = build(make(), example(cut="end"), limit, steps, forced=True)
        assert (prompt.ids + prompt.reference_ids) == [BOS, *body[: limit - 1 + steps]]

    @pytest.mark.parametrize(
        ("changes", "limit"),
        [
            ({}, 20),
            ({"answers": ("",)}, None),
            ({"cut": "end"}, None),
            ({"cut": "end"}, 10_000),
            ({"cut": "end", "after": " what?"}, 20),
        ],
    )
    def test_nothing_to_feed_is_an_error(self, changes: dict[str, Any], limit: int | None):
        with pytest.raises(CoverageLabError, match=r"rows\.jsonl:7: .*--decode greedy"):
            build(make(), example(**changes), limit, forced=True)

    def test_other_modes_need_none(self):
        assert build(make(), example(answers=("hat",))).reference_ids == []


@pytest.mark.parametrize(("template", "limit"), itertools.product([None, WITH_BOS], [None, 50]))
@pytest.mark.parametrize("text", ["", " \n\t\u3000"])
def test_empty_prompts_are_errors(template: str | None, limit: int | None, text: str):
    for cut in ("middle", "end"):
        with pytest.raises(CoverageLabError, match=r"rows\.jsonl:7: the prompt is empty"):
            build(make(template), replace(example(text), cut=cut), limit)


def test_text_that_gives_no_tokens_is_an_error():
    few = Tokenizer(models.BPE(vocab={"<s>": 0, "b": 1}, merges=[]))
    few.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=few, bos_token="<s>")
    assert build(tokenizer, example("xbx")).ids == [0, 1]
    with pytest.raises(CoverageLabError, match=r"rows\.jsonl:7: the tokenizer makes no tokens"):
        build(tokenizer, example("x"))
    with pytest.raises(CoverageLabError, match=r"t/0: the tokenizer makes no tokens"):
        build(tokenizer, example("x", source=""))
