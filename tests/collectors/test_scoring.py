"""Scores of what was decoded, from the tokens to the requests table."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.collectors.datasets import Dataset, Example, datasets
from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.collectors.scoring import Scorer
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

TASKS = ("niah_single_1", "niah_multivalue", "fwe")
TOKENS = 1500


@pytest.fixture(scope="module")
def loaded(zoo: Any) -> LoadedModel:
    """A random Llama with a window of 2,048 tokens."""
    model = zoo.build("llama", max_position_embeddings=2048)
    return load_model(str(zoo.save(model, "long")), device="cpu")


@pytest.fixture
def options(tmp_path: Path) -> CollectOptions:
    return CollectOptions(
        model="long",
        dataset="ruler",
        output=tmp_path / "trace",
        tasks=TASKS,
        limit=1,
        max_prompt_tokens=TOKENS,
        steps=4,
        estimators=("exact",),
        ignore_eos=True,
    )


class Said(Dataset):
    """Remembers what it is asked to score."""

    texts: ClassVar[list[str]] = []

    def score(self, example: Example, text: str) -> float | None:
        self.texts.append(text)
        return 0.5


class TestScorer:
    def said(self, zoo: Any, ids: list[int], stop_ids: frozenset[int] = frozenset(), **changes: Any) -> str:
        scorer = Scorer(Said(), zoo.tokenizer, stop_ids)
        assert scorer(Example(task="t", index=0, context="", **changes), ids) == 0.5
        return Said.texts.pop()

    def test_takes_what_counts(self, zoo: Any):
        ids = zoo.tokenizer(" heron stood in water", add_special_tokens=False).input_ids
        assert self.said(zoo, ids) == " heron stood in water"
        assert self.said(zoo, ids, answer_tokens=2) == zoo.tokenizer.decode(ids[:2])
        assert self.said(zoo, []) == ""
        # What follows an end of sequence is no answer, whether or not the run went on.
        assert self.said(zoo, [*ids[:3], 1, *ids[3:]], frozenset({1})) == zoo.tokenizer.decode(ids[:3])
        assert self.said(zoo, [0, *ids, 1]) == " heron stood in water"  # special tokens are no text

    def test_data_sets_without_scoring(self, zoo: Any):
        scorer = Scorer(datasets.get("docs")(), zoo.tokenizer, frozenset())
        assert scorer(Example(task="t", index=0, context=""), [5, 6]) is None


class TestCollect:
    def test_scores_are_in_the_requests_table(self, loaded: LoadedModel, options: CollectOptions):
        collect(options, loaded=loaded)
        table = Trace(options.output).requests
        assert table["task"].to_list() == list(TASKS)
        assert [len(answers) for answers in table["answers"]] == [1, 4, 3]
        assert (table["prompt_tokens"] <= TOKENS).all()
        dataset = datasets.get("ruler")(tasks=TASKS, limit=1)
        for row in table.iter_rows(named=True):
            example = Example(task=row["task"], index=0, context="", answers=tuple(row["answers"]))
            assert row["score"] == dataset.score(example, loaded.tokenizer.decode(row["decoded_ids"]))

    def test_a_right_answer_scores(
        self, loaded: LoadedModel, options: CollectOptions, monkeypatch: pytest.MonkeyPatch
    ):
        """The model is made to say two of four values."""
        from coverage_lab.collectors import collect as module

        real, said = module.decode_batch, {}

        def decode(loaded: LoadedModel, prompts: Any, *arguments: Any) -> Any:
            decoded = real(loaded, prompts, *arguments)
            decoded[0].ids = loaded.tokenizer(said["text"], add_special_tokens=False).input_ids
            return decoded

        class Reporter:
            def begin(self, total: int, done: int, plan: str) -> None:
                assert plan.endswith("up to 4 steps each; scores take answers of up to 128 tokens")
                dataset = datasets.get("ruler")(tasks=TASKS, limit=1)
                from coverage_lab.collectors.prompts import PromptBuilder

                count = PromptBuilder(loaded.tokenizer).count
                example = list(dataset.with_counter(count).examples(TOKENS, 4))[1]
                said["text"] = f" {example.answers[0]} and {example.answers[2]}."

            def request(self, request: dict[str, Any], seconds: float) -> None:
                pass

        monkeypatch.setattr(module, "decode_batch", decode)
        collect(options, Reporter(), loaded)
        assert Trace(options.output).requests["score"].to_list() == [0, 0.5, 0]

    def test_resumed_runs_keep_scores(self, loaded: LoadedModel, options: CollectOptions):
        class Stop(Exception):
            pass

        class Stopper:
            def begin(self, total: int, done: int, plan: str) -> None:
                pass

            def request(self, request: dict[str, Any], seconds: float) -> None:
                raise Stop

        with pytest.raises(Stop):
            collect(options, Stopper(), loaded)
        collect(options, loaded=loaded)
        scores = Trace(options.output).requests["score"]
        assert scores.null_count() == 0
        assert len(scores) == 3

    def test_none_where_there_is_nothing_to_score(
        self, loaded: LoadedModel, options: CollectOptions, tmp_path: Path
    ):
        """Tokens of a reference are no answer, and the user's own prompts have no scoring."""
        forced = CollectOptions(**vars(options) | {"decode": "forced", "output": tmp_path / "forced"})
        collect(forced, loaded=loaded)
        assert Trace(forced.output).requests["score"].to_list() == [None] * 3
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "The heron", "answer": "stood"}))
        plain = {
            "dataset": "jsonl",
            "tasks": (),
            "data_dir": tmp_path / "rows.jsonl",
            "output": tmp_path / "own",
        }
        collect(CollectOptions(**vars(options) | plain), loaded=loaded)
        assert Trace(tmp_path / "own").requests["score"].to_list() == [None]

    def test_lengths_that_hold_no_needle_are_refused(self, loaded: LoadedModel, options: CollectOptions):
        with pytest.raises(CoverageLabError, match=r"shortest prompt of niah_single_1 has \d+ tokens"):
            collect(CollectOptions(**vars(options) | {"max_prompt_tokens": 50}), loaded=loaded)
        assert not options.output.exists()
