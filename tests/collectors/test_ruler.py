"""RULER: lengths, hidden answers, what decides a prompt, where essays and questions come from."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st
from real import shared

from coverage_lab.collectors.datasets import Example, datasets
from coverage_lab.collectors.prompts import PromptBuilder
from coverage_lab.collectors.ruler.corpus import read_corpus
from coverage_lab.collectors.ruler.essays import DEPTHS, Essay
from coverage_lab.collectors.ruler.fitting import fit
from coverage_lab.collectors.ruler.needles import NOISE
from coverage_lab.collectors.ruler.sources import Sources
from coverage_lab.collectors.ruler.tasks import TASKS
from coverage_lab.collectors.ruler.words import word_lists
from coverage_lab.errors import CoverageLabError

MADE = [name for name in TASKS if not name.startswith("qa")]
PIECES = re.compile(r"\w{1,4}|[^\w ]")


def pieces(example: Example) -> int:
    """Count tokens of a made-up tokenizer: runs of up to four letters or digits, and signs."""
    text = example.before + example.context + example.after + example.prefix
    return len(PIECES.findall(text))


def prose(rng: Random, words: int) -> str:
    return " ".join(rng.choice(word_lists().nouns) for _ in range(words)).capitalize() + "."


@cache
def squad() -> dict[str, Any]:
    """Return articles in SQuAD's layout; every third question has no answer."""
    rng = Random(0)
    articles = []
    for article in range(30):
        paragraphs = []
        for number in range(8):
            text = f"Place {article}-{number} was founded in {rng.randrange(1000, 2000)}. "
            text += prose(rng, rng.randrange(20, 120))
            answers = [{"text": text.split()[5].rstrip("."), "answer_start": 25}]
            asked = {"question": f"When was place {article}-{number} founded?", "answers": answers}
            asked |= {"is_impossible": True, "answers": []} if number % 3 == 2 else {}
            paragraphs.append({"context": text, "qas": [asked]})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    return {"data": articles}


@cache
def hotpot() -> list[dict[str, Any]]:
    rng = Random(1)
    rows = []
    for number in range(40):
        context = [[f"Title {number}-{i}", [prose(rng, 9), f" It has {number}{i} steps."]] for i in range(10)]
        answer = "yes" if number % 8 == 7 else f"{number}3 steps"
        rows.append({"question": f"What about {number}-3?", "answer": answer, "context": context})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ruler")
    (root / "squad.json").write_text(json.dumps(squad()))
    (root / "hotpotqa.json").write_text(json.dumps(hotpot()))
    return root


def take(prompt_tokens: int, count: Callable[[Example], int] = pieces, **options: Any) -> list[Example]:
    dataset = datasets.get("ruler")(**{"limit": 1} | options).with_counter(count)
    return list(dataset.examples(prompt_tokens, 64))


def fails(prompt_tokens: int = 4096, **options: Any) -> str:
    with pytest.raises(CoverageLabError) as caught:
        take(prompt_tokens, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestPrompts:
    @settings(max_examples=8)
    @given(tokens=st.integers(4096, 20_000), seed=st.integers(0, 2**32))
    @case(tokens=4096, seed=0)
    def test_length_and_answers(self, files: Path, tokens: int, seed: int):
        dataset = datasets.get("ruler")(path=files)
        examples = take(tokens, path=files, seed=seed)
        assert [e.task for e in examples] == list(TASKS)
        for example in examples:
            length = pieces(example)
            assert tokens * 0.99 <= length <= tokens
            assert dataset.score(example, example.context) == 1
            assert dataset.check(example, tokens, length) is None
            assert example.cut == "never"
            assert example.answer_tokens == TASKS[example.task].answer_tokens

    @settings(max_examples=10)
    @given(tokens=st.integers(1, 4000), seed=st.integers(0, 99), task=st.sampled_from(list(TASKS)))
    def test_short_prompts_are_never_too_long(self, files: Path, tokens: int, seed: int, task: str):
        try:
            (example,) = take(tokens, path=files, seed=seed, tasks=(task,))
        except CoverageLabError as error:
            found = re.search(r"has (\d+) tokens; raise --max-prompt-tokens from", str(error))
            assert found
            assert int(found[1]) > tokens
            return
        assert pieces(example) <= tokens
        assert datasets.get("ruler")(path=files).score(example, example.context) == 1

    def test_as_the_models_tokenizer_counts_with_its_template(self, zoo: Any):
        tokenizer = zoo.tokenizer
        template = "{{ bos_token }}user: {{ messages[0]['content'] }}\nassistant: "
        for held in (None, template):
            tokenizer.chat_template = held
            builder = PromptBuilder(tokenizer)
            for example in take(6000, builder.count, tasks=("niah_single_1", "vt", "fwe")):
                prompt = builder.build(example, 6000, 64, forced=False)
                assert 5940 <= len(prompt.ids) == builder.count(example) <= 6000
                assert prompt.chat is bool(held)
                assert tokenizer.decode(prompt.ids).endswith(example.prefix)
        tokenizer.chat_template = None

    def test_a_prompt_depends_on_seed_task_and_index_alone(self, files: Path):
        all_of_them = take(4096, path=files, limit=3)
        assert all_of_them == take(4096, path=files, limit=3)
        assert take(4096, path=files) == [e for e in all_of_them if e.index == 0]
        for task in ("cwe", "qa_1", "niah_multikey_3"):
            assert take(4096, path=files, limit=2, tasks=(task,)) == [
                e for e in all_of_them if e.task == task and e.index < 2
            ]
        other = take(4096, path=files, limit=3, seed=1)
        texts = [e.before + e.context for e in all_of_them + other]
        assert len(set(texts)) == len(texts)

    def test_few_calls(self):
        """A prompt of 131,072 tokens takes a handful of calls, of which three or so are long."""
        for task in MADE:
            lengths: list[int] = []

            def count(example: Example, lengths: list[int] = lengths) -> int:
                lengths.append(pieces(example))
                return lengths[-1]

            take(131_072, count, tasks=(task,))
            assert sum(length > 50_000 for length in lengths) <= 5
            assert len(lengths) <= 20

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3", "vt", "qa_1", "qa_2"])
    def test_pieces_that_always_miss_are_cut(self, files: Path, task: str):
        """Where every letter is a token, a line is longer than 1%, and others are as long."""

        def letters(example: Example) -> int:
            return len(example.before + example.context + example.after + example.prefix)

        for tokens in (9000, 12_000):
            (example,) = take(tokens, letters, path=files, tasks=(task,))
            assert tokens * 0.99 <= letters(example) <= tokens
            assert datasets.get("ruler")().score(example, example.context) == 1

    def test_needs_a_tokenizer_and_a_length(self):
        dataset = datasets.get("ruler")()
        with pytest.raises(CoverageLabError, match="--model"):
            dataset.examples(4096, 64)
        assert "--max-prompt-tokens" in fails(0)
        assert dataset.default_prompt_tokens(None) == dataset.default_prompt_tokens(10**6) == 4096
        assert dataset.default_prompt_tokens(300) == 300

    def test_unknown_tasks_and_lengths_that_hold_no_needle(self):
        assert "did you mean 'niah_multikey_1'?" in fails(tasks=("niah_multikey1",))
        message = fails(60, tasks=("niah_multiquery",))
        assert re.fullmatch(
            r"ruler: the shortest prompt of niah_multiquery has \d+ tokens; "
            r"raise --max-prompt-tokens from 60",
            message,
        )


class TestPublishedForm:
    """What RULER's own files say: scripts/synthetic.yaml, and prompts that it generated."""

    def test_parameters(self):
        published: dict[str, dict[str, str]] = {}
        for line in shared("ruler/synthetic.yaml").read_text().splitlines():
            if line and line[0] not in "# ":
                published[line.rstrip(":")] = held = {}
            elif ":" in line and not line.startswith("#"):
                key, value = line.split(":")
                held[key.strip()] = value.strip()
        assert list(published) == list(TASKS)
        for name, held in published.items():
            task = TASKS[name]
            ours = vars(task)
            if held["task"] == "niah":
                assert (ours["haystack"], ours["keys"], ours["values"]) == (
                    held["type_haystack"],
                    held["type_needle_k"],
                    held["type_needle_v"],
                )
                assert [ours["num_keys"], ours["num_values"], ours["num_queries"]] == [
                    int(held[f"num_needle_{part}"]) for part in "kvq"
                ]
        assert (TASKS["vt"].chains, TASKS["vt"].hops) == (1, 4)
        assert (TASKS["cwe"].common, TASKS["cwe"].times, TASKS["cwe"].other_times) == (10, 30, 3)
        assert TASKS["fwe"].alpha == 2
        assert (TASKS["qa_1"].data, TASKS["qa_2"].data) == ("squad", "hotpotqa")

    def test_needles_read_like_rulers(self):
        def lines(text: str) -> set[str]:
            return set(re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text).split("\n"))

        rows = shared("ruler/niah_multikey_3_4096_ref.jsonl").read_text().splitlines()
        (ours,) = take(4096, tasks=("niah_multikey_3",))
        for row in map(json.loads, rows):
            assert lines(ours.before + ours.context + ours.after + ours.prefix) == lines(row["input"])
            assert len(row["outputs"]) == len(ours.answers) == 1
            needle = f"is: {row['outputs'][0]}."
            assert needle in row["input"]
        assert f"is: {ours.answers[0]}." in ours.context

    @pytest.mark.parametrize(
        ("task", "needles", "answers", "kinds"),
        [
            ("niah_single_1", 1, 1, "number"),
            ("niah_single_2", 1, 1, "number"),
            ("niah_single_3", 1, 1, "uuid"),
            ("niah_multikey_1", 4, 1, "number"),
            ("niah_multivalue", 4, 4, "numbers"),
            ("niah_multiquery", 4, 4, "numbers"),
        ],
    )
    def test_needles(self, task: str, needles: int, answers: int, kinds: str):
        (example,) = take(4096, tasks=(task,), seed=3)
        found = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", example.context)
        assert len(found) == needles
        assert len({value for _, _, value in found}) == needles
        asked = {key for _, key, value in found if value in example.answers}
        assert {value for _, key, value in found if key in asked} == set(example.answers)
        assert len(set(example.answers)) == answers
        assert all(key in example.after and key in example.prefix for key in asked)
        single = answers == 1
        assert example.before.startswith(f"{'A' if single else 'Some'} special magic {kinds} ")
        verb = "is" if single else "are all"
        assert example.after.startswith(f"\nWhat {verb} the special magic {kinds} for ")
        assert example.prefix.endswith(" is" if single else " are")
        if kinds.startswith("number"):
            assert all(re.fullmatch(r"\d{7}", value) for _, _, value in found)

    def test_needles_among_needles_are_all_different(self):
        for task in ("niah_multikey_2", "niah_multikey_3"):
            (example,) = take(8192, tasks=(task,))
            found = [line.removesuffix(".").split()[-3::2] for line in example.context.split("\n")]
            assert len(found) > 50
            assert len({key for key, _ in found}) == len({value for _, value in found}) == len(found)

    def test_chains(self):
        (example,) = take(4096, tasks=("vt",))
        lines = example.context.split("\n")
        statements = [line for line in lines if line != NOISE]
        value = re.search(r"assigned the value (\d{5}) in", example.after)
        assert value
        a, b, c, d, e = example.answers
        assert statements == [f"VAR {a} = {value[1]}"] + [
            f"VAR {y} = VAR {x} " for x, y in pairwise((a, b, c, d, e))
        ]
        assert example.prefix.endswith(f" 5 variables are assigned the value {value[1]}, they are: ")
        # The worked example has names of three letters and ends with them.
        shown = re.search(r"they are:  ((?:[A-Z]{3} ){4}[A-Z]{3})\n\nMemorize", example.before)
        assert shown
        assert all(f"VAR {name}" in example.before for name in shown[1].split())
        assert 400 < len(PIECES.findall(example.before[: shown.start()])) <= 500

    @pytest.mark.parametrize(("tokens", "times"), [(3000, (6, 1)), (3975, (6, 1)), (3976, (30, 3))])
    def test_common_words(self, tokens: int, times: tuple[int, int]):
        (example,) = take(tokens, tasks=("cwe",))
        listed = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", example.context)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        assert {word for word, count in counts.items() if count == times[0]} == set(example.answers)
        assert set(counts.values()) == set(times)
        assert len(example.answers) == 10

    def test_a_longer_list_than_wonderwords_has(self):
        (example,) = take(131_072, lambda e: len(e.context.split()), tasks=("cwe",))
        words = {word for word in example.context.split() if not word[0].isdigit()}
        assert len(words) > len({*word_lists().nouns, *word_lists().adjectives, *word_lists().verbs})
        assert any(word.count("-") for word in words)

    @given(tokens=st.integers(500, 6000), seed=st.integers(0, 1000))
    @settings(max_examples=10)
    def test_frequent_words(self, tokens: int, seed: int):
        (example,) = take(tokens, tasks=("fwe",), seed=seed)
        (noise, _), *ranked = Counter(example.context.split()).most_common()
        assert noise == "..."
        assert tuple(word for word, _ in ranked[:3]) == example.answers
        assert ranked[2][1] > (ranked[3][1] if len(ranked) > 3 else 0)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)

    def test_essays_come_from_docs_or_the_users_text(self, tmp_path: Path):
        book = " ".join(f"Sentence {n} of the book ends here." for n in range(40))
        (tmp_path / "essays").mkdir()
        (tmp_path / "essays" / "b.txt").write_text("never\n\nthe  start")
        (tmp_path / "essays" / "a.md").write_text(book)
        (mine,) = take(4096, tasks=("niah_single_2",), path=tmp_path)
        text = re.sub(r"One of the special magic .*? is: \d+\. ?", "", mine.context)
        repeated = f"{book} never the start {book}"
        assert text.startswith(repeated)
        (docs,) = take(4096, tasks=("niah_single_2",))
        assert "# assert" in docs.context
        (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "From the essays. " * 9}))
        (paul,) = take(4096, tasks=("niah_single_2",), path=tmp_path)
        assert "From the essays. From the essays." in paul.context
        assert "book" not in paul.context


class TestEssay:
    @given(
        words=st.integers(1, 400),
        depths=st.lists(st.sampled_from(DEPTHS), max_size=5, unique=True).map(sorted),
    )
    def test_sentences_are_hidden_between_sentences(self, words: int, depths: list[int]):
        text = ["Mr. Fox ran. He hid? “No!” He did (see Fig. 3). 12 hens saw it, e.g. Anna and J. Smith."]
        essay = Essay("\n".join(text * 3) + " And then")
        hidden = [f"<{n}>" for n in range(len(depths))]
        found = essay.hiding(hidden, depths, words)
        plain = essay.hiding([], [], words)
        assert [word for word in found.split() if word[0] != "<"] == plain.split()
        assert [word for word in found.split() if word[0] == "<"] == hidden
        assert len(plain.split()) == words
        turns = -(-words // len(essay.words))
        assert plain == " ".join((essay.words * turns)[:words])
        ends = {"ran.", "hid?", "“No!”", "3).", "Smith.", "then", plain.split()[-1]}
        for before, word in pairwise(found.split()):
            assert word[0] != "<" or before[0] == "<" or before in ends

    def test_depths_are_rulers(self):
        assert len(DEPTHS) == 40
        assert (DEPTHS[0], DEPTHS[1], DEPTHS[20], DEPTHS[39]) == (0, 3, 51, 100)

    def test_the_share_of_sentences_before(self):
        essay = Essay(" ".join(f"Line {n}." for n in range(100)))
        for depth in DEPTHS:
            assert essay.hiding(["here"], [depth], 200).split().index("here") == 2 * depth


class TestFit:
    @given(
        steps=st.lists(st.integers(1, 60), min_size=1, max_size=300),
        fixed=st.integers(0, 200),
        target=st.integers(1, 20_000),
        fewest=st.integers(1, 5),
    )
    def test_finds_the_largest_within_a_thousandth(
        self, steps: list[int], fixed: int, target: int, fewest: int
    ):
        calls = 0

        def tokens(units: int) -> int:
            nonlocal calls
            calls += 1
            turns, rest = divmod(units, len(steps))
            return fixed + turns * sum(steps) + sum(steps[:rest])

        for most in (None, 40):
            calls = 0
            units, held = fit(tokens, target, fewest, most)
            assert calls <= 30
            assert held == tokens(units)
            if held > target:
                assert units == fewest
            else:
                assert units == most or tokens(units + 1) > target or target - held <= target // 1000

    def test_lengths_that_do_not_rise_evenly_end_too(self):
        for curve in (lambda n: n * n, lambda n: int(n**0.5), lambda n: n + 7 * (n % 3)):
            units, held = fit(curve, 5000, 1)
            assert held == curve(units) <= 5000
            assert curve(units + 1) > 5000 or 5000 - held <= 5


class TestQuestions:
    def test_documents_and_the_order_of_questions(self, files: Path):
        first, second = take(4096, path=files, tasks=("qa_1",), limit=2)
        assert first.after.endswith("Question: When was place 0-0 founded?")
        assert second.after.endswith("Question: When was place 0-1 founded?")
        documents = re.split(r"(?:^|\n\n)Document \d+:\n", first.context)[1:]
        numbers = re.findall(r"(?:^|\n\n)Document (\d+):\n", first.context)
        assert list(map(int, numbers)) == list(range(1, len(documents) + 1))
        assert len(documents) == len(set(documents))
        # All paragraphs of the same article are there before those of others.
        assert sum(text.startswith("Place 0-") for text in documents) == 8
        assert len(documents) > 8

    def test_documents_come_again_when_there_are_no_more(self, files: Path):
        (example,) = take(60_000, path=files, tasks=("qa_1",))
        documents = re.split(r"(?:^|\n\n)Document \d+:\n", example.context)[1:]
        assert len(set(documents)) == 240 < len(documents)

    def test_the_other_layout_and_what_is_left_out(self, files: Path):
        corpus = read_corpus(files / "hotpotqa.json")
        assert len(corpus.questions) == 35  # without those that are answered yes
        assert len(corpus.questions[0].own) == 10
        assert len(corpus.documents) == 400
        assert "Title 0-3\n" in corpus.documents[corpus.questions[0].own[3]]
        assert len(take(4096, path=files, tasks=("qa_2",), limit=50)) == 35
        assert len(read_corpus(files / "squad.json").questions) == 180
        assert len(read_corpus(files / "squad.json").documents) == 240

    def test_where_files_are_looked_for(self, files: Path, tmp_path: Path):
        assert {e.task for e in take(4096, path=files / "squad.json")} == {*MADE, "qa_1"}
        assert {e.task for e in take(4096)} == set(MADE)
        (tmp_path / "qa").mkdir()
        (tmp_path / "qa" / "xquad.json").write_text(json.dumps(squad()))
        assert Sources(tmp_path).has_questions("squad")
        (tmp_path / "qa" / "other.json").write_text("{}")
        assert not Sources(tmp_path).has_questions("squad")
        (tmp_path / "qa" / "qa_2.json").write_text(json.dumps(squad()))
        assert {e.task for e in take(4096, path=tmp_path, tasks=("qa_2",))} == {"qa_2"}

    def test_described_files(self, files: Path, tmp_path: Path):
        described = datasets.get("ruler")(path=files).describe()
        assert set(described["files"]) == {"squad.json", "hotpotqa.json"}
        assert set(described["essays"]) == {"python", "corpus_sha256"}
        (tmp_path / "book.txt").write_text("Some words.")
        described = datasets.get("ruler")(path=tmp_path).describe()
        assert list(described["files"]) == ["book.txt"]
        assert "essays" not in described
        assert re.fullmatch(r"[\d.]+", described["wonderwords"])

    def test_real_questions(self):
        examples = take(8192, path=shared("ruler"), tasks=("qa_1",), limit=3)
        dataset = datasets.get("ruler")()
        assert [dataset.check(e, 8192, pieces(e)) for e in examples] == [None] * 3

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "not valid JSON"),
            ("3", "neither SQuAD's layout"),
            ('{"data": 3}', "neither SQuAD's layout"),
            ('{"data": []}', "no question has an answer"),
            ("[]", "no question has an answer"),
            ('{"data": [3]}', "data[0]: a number where an object is expected"),
            ('{"data": [{}]}', "data[0]: no field 'paragraphs'"),
            ('{"data": [{"paragraphs": [{"context": 1, "qas": []}]}]}', "data[0].paragraphs[0].context: a n"),
            (
                '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b"}]}]}]}',
                "no field 'answers'",
            ),
            (
                '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": []}]}]}]}',
                "no question has an answer",
            ),
            (
                '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": '
                '[{"text": "other"}]}]}]}]}',
                "no question has an answer",
            ),
            ('{"data": [{"paragraphs": [{"context": "\\ud800", "qas": []}]}]}', "half a surrogate pair"),
            ('[{"context": [["t"]]}]', "where a title with its sentences is expected"),
            ('[{"context": [["t", ["s"]]], "answer": 3}]', "[0].answer: a number where text"),
        ],
    )
    def test_bad_files_are_named(self, tmp_path: Path, text: str, reason: str):
        file = tmp_path / "squad.json"
        file.write_text(text)
        message = fails(path=tmp_path)
        assert message.startswith(str(file))
        assert reason in message

    def test_missing_files_are_named(self, tmp_path: Path):
        assert "qa_2 needs a file of questions: name hotpotqa.json" in fails(tasks=("qa_2",))
        assert "no such file or directory" in fails(path=tmp_path / "absent")
        assert "no essays" in fails(path=tmp_path)
        (tmp_path / "blank.txt").write_text(" \n")
        assert fails(path=tmp_path, tasks=("niah_single_2",)) == f"{tmp_path}/blank.txt: no text"
        (tmp_path / "PaulGrahamEssays.json").write_text("[]")
        assert "no field 'text'" in fails(path=tmp_path, tasks=("niah_single_2",))


class TestScore:
    """string_match_all and string_match_part, by hand."""

    def score(self, task: str, text: str, *answers: str) -> float | None:
        return datasets.get("ruler")().score(Example(task=task, index=0, context="", answers=answers), text)

    def test_all(self):
        assert self.score("niah_multivalue", "They are 11, 22\tand 33.", "11", "22", "33", "44") == 0.75
        assert self.score("vt", "abc ABD", "ABC", "abd") == 1
        assert self.score("cwe", "", "a") == 0
        assert self.score("fwe", "xa\x00b", "a\nb") == 1  # control characters are line ends

    def test_any(self):
        assert self.score("qa_1", "In Paris.", "paris", "Paris, France") == 1
        assert self.score("qa_2", "In Rome.", "Paris", "London") == 0


def combinations() -> Iterator[tuple[str, int]]:
    yield from product(("niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe"), (4096, 131_072))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "tokens"), combinations())
def test_lengths_on_a_real_tokenizer(task: str, tokens: int):
    from coverage_lab.collectors.tokenizers import load_tokenizer

    builder = PromptBuilder(load_tokenizer(str(shared("stories260K/hf"))))
    (example,) = take(tokens, builder.count, tasks=(task,))
    assert tokens * 0.99 <= builder.count(example) <= tokens
