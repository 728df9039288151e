"""AIME, LongBench v2 and the scoring of LongBench v1: rows, prompts and scores."""

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real import shared

from coverage_lab.collectors import reading
from coverage_lab.collectors.datasets import Example, datasets
from coverage_lab.collectors.datasets._longbench_scoring import (
    ANSWER_TOKENS,
    CLASSIFICATION,
    METRICS,
)
from coverage_lab.collectors.datasets.aime import QUESTION
from coverage_lab.collectors.datasets.longbench import TASKS
from coverage_lab.collectors.datasets.longbench_v2 import DOMAINS, WORDING
from coverage_lab.collectors.reading import json_array
from coverage_lab.errors import CoverageLabError


def take(name: str, **options: Any) -> list[Example]:
    return list(datasets.get(name)(**options).examples(100, 4))


def fails(name: str, **options: Any) -> str:
    with pytest.raises(CoverageLabError) as caught:
        take(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestAime:
    def test_rows(self, tmp_path: Path):
        file = write(
            tmp_path / "aime 2099.jsonl",
            {"problem": " Find it. ", "answer": "080"},
            {"question": "And this.", "answer": 7, "problem_idx": 3},
            {"problem": "Two.", "answer": "080 or 081 (both were accepted)"},
        )
        examples = take("aime", path=tmp_path)
        assert [e.answers for e in examples] == [("80",), ("7",), ("80", "81")]
        assert [e.context for e in examples] == ["Find it.", "And this.", "Two."]
        assert {(e.task, e.after, e.cut, e.chat) for e in examples} == {
            ("aime-2099", QUESTION, "never", True)
        }
        assert examples[1].source == f"{file}:2"
        assert len(take("aime", path=file, limit=2)) == 2

    def test_scores(self, tmp_path: Path):
        write(tmp_path / "a.jsonl", {"problem": "p", "answer": "080 or 081"})
        dataset = datasets.get("aime")(path=tmp_path)
        (example,) = dataset.examples(0, 1)
        assert dataset.score(example, r"... \boxed{081}. That is 5.") == 1
        assert dataset.score(example, "So it is 80.") == 1
        assert dataset.score(example, "So it is 80 or 82.") == 0
        assert dataset.score(example, "") == 0

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"answer": "1"}, "no field 'problem'"),
            ({"problem": " ", "answer": "1"}, "the problem is empty"),
            ({"problem": "p"}, "no field 'answer'"),
            ({"problem": "p", "answer": "1000"}, "'1000' is no integer from 0 to 999"),
            ({"problem": "p", "answer": "-1"}, "is no integer from 0 to 999"),
            ({"problem": "p", "answer": 3.5}, "field 'answer' holds a number"),
            ({"problem": "p", "answer": True}, "field 'answer' holds a boolean"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, row: dict[str, Any], reason: str):
        file = write(tmp_path / "a.jsonl", {"problem": "p", "answer": "1"}, row)
        message = fails("aime", path=tmp_path)
        assert message.startswith(f"{file}:2: ")
        assert reason in message

    def test_missing_files(self, tmp_path: Path):
        assert "--data-dir" in fails("aime")
        assert "no rows" in fails("aime", path=write(tmp_path / "a.jsonl"))
        assert "unknown task 'aime2024'" in fails("aime", path=tmp_path, tasks=("aime2024",))

    def test_real_rows(self):
        examples = take("aime", path=shared("aime"))
        assert len(examples) == 119
        assert [e.answers for e in examples if len(e.answers) > 1] == [("80", "81")]
        dataset = datasets.get("aime")()
        assert all(dataset.score(e, rf"so \boxed{{{e.answers[0]}}}") == 1 for e in examples)


V2_ROW = {
    "_id": "1",
    "domain": "Long In-context Learning",
    "context": " the text with $Q$ ",
    "question": "which $C_A$?",
    **{f"choice_{letter}": f"choice {letter}" for letter in "ABCD"},
    "answer": "C",
}


class TestLongBenchV2:
    def test_own_wording(self, tmp_path: Path):
        file = write(tmp_path / "rows.jsonl", V2_ROW)
        dataset = datasets.get("longbench-v2")(path=file)
        (example,) = dataset.examples(100, 4)
        # Marks within the data stay as they are.
        expected = WORDING.replace("$DOC$", "the text with #Q#").replace("$Q$", "which #C_A#?")
        for letter in "ABCD":
            expected = expected.replace(f"$C_{letter}$", f"choice {letter}")
        assert example.context == re.sub("#(Q|C_A)#", r"$\1$", expected)
        assert (example.task, example.index, example.cut) == ("long-in-context-learning", 0, "middle")
        assert (example.answers, example.choices) == (("C",), tuple("ABCD"))
        assert dataset.describe()["prompts"] == "coverage-lab wording"
        assert dataset.score(example, "The correct answer is (C)") == 1
        assert dataset.score(example, "The correct answer is (A)") == dataset.score(example, "C") == 0

    def test_wording_copies_no_official_sentence(self):
        official = shared("longbench/v2/prompts/0shot.txt").read_text()
        theirs, ours = (
            {part.strip() for part in re.split(r"[.\n]|\$\w+\$", text)} for text in (official, WORDING)
        )
        assert ours & theirs <= {"", "(A)", "(B)", "(C)", "(D)"}

    @pytest.mark.parametrize("place", [".", "prompts", "../prompts", ".."])
    def test_official_wording_beside_the_data(self, tmp_path: Path, place: str):
        root = tmp_path / "v2"
        write(root / "rows.jsonl", V2_ROW)
        prompt = root / place / "0shot.txt"
        prompt.parent.mkdir(exist_ok=True)
        prompt.write_text("Read $DOC$ and say $Q$ $C_A$ $C_B$ $C_C$ $C_D$")
        dataset = datasets.get("longbench-v2")(path=root)
        (example,) = dataset.examples(100, 4)
        assert example.context.startswith("Read the text with $Q$ and say which $C_A$? choice A choice B")
        assert dataset.describe()["prompts"].startswith("official 0shot.txt (sha256 ")
        prompt.write_text("Read $DOC$")
        assert f"{prompt.resolve()}: no $Q$ in this prompt" in fails("longbench-v2", path=root).replace(
            str(prompt), str(prompt.resolve())
        )

    def test_tasks_are_domains_and_limits_count_within_them(self, tmp_path: Path):
        rows = [V2_ROW | {"domain": domain} for domain in DOMAINS for _ in range(3)]
        rows = rows[::2] + rows[1::2]
        write(tmp_path / "a.jsonl", *rows)
        write(tmp_path / "b.jsonl", *rows)
        examples = take("longbench-v2", path=tmp_path, limit=4)
        assert len(examples) == 24
        for task in {e.task for e in examples}:
            assert [e.index for e in examples if e.task == task] == [0, 1, 2, 3]
        asked = take("longbench-v2", path=tmp_path, tasks=("multi-document-qa",))
        assert [e.index for e in asked] == list(range(6))
        # What comes after the last row that is wanted is not read.
        (tmp_path / "b.jsonl").write_text("broken")
        assert len(take("longbench-v2", path=tmp_path, limit=3)) == 18
        assert "not valid JSON" in fails("longbench-v2", path=tmp_path, limit=4)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"domain": "Multi Document QA"}, None),
            ({"domain": "Poetry"}, "unknown domain 'Poetry'"),
            ({"answer": "E"}, "answer 'E' is none of A, B, C and D"),
            ({"answer": 2}, "field 'answer' holds a number"),
            ({"choice_D": None}, "field 'choice_D' holds null"),
            ({"question": " "}, "field 'question' is empty"),
            ({"context": ""}, "field 'context' is empty"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, changes: dict[str, Any], reason: str | None):
        file = write(tmp_path / "a.jsonl", V2_ROW, V2_ROW | changes)
        if reason is None:
            assert take("longbench-v2", path=tmp_path)[1].task == "multi-document-qa"
            return
        message = fails("longbench-v2", path=tmp_path)
        assert message.startswith(f"{file}:2: ")
        assert reason in message

    def test_paths(self, tmp_path: Path):
        assert "no data.json and no *.jsonl" in fails("longbench-v2", path=tmp_path)
        assert "no such file" in fails("longbench-v2", path=tmp_path / "absent")
        write(tmp_path / "a.jsonl", V2_ROW)
        message = fails("longbench-v2", path=tmp_path, tasks=("single-document-qa",))
        assert "no row of the domain 'Single-Document QA'" in message
        assert "did you mean 'multi-document-qa'" in fails(
            "longbench-v2", path=tmp_path, tasks=("multi-doc-qa",)
        )
        (tmp_path / "data.json").write_text(json.dumps([V2_ROW, V2_ROW]))
        (first, second) = take("longbench-v2", path=tmp_path)
        assert second.source == f"{tmp_path / 'data.json'}:row 2"
        assert first.context == second.context
        assert "no rows" in fails("longbench-v2", path=write(tmp_path / "empty.jsonl"))

    def test_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "data.json").write_text(json.dumps([V2_ROW]))

        def download(repo_id: str, filename: str, repo_type: str) -> str:
            assert (repo_id, filename, repo_type) == ("THUDM/LongBench-v2", "data.json", "dataset")
            return str(tmp_path / filename)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert len(take("longbench-v2")) == 1

        def unreachable(*args: Any, **options: Any) -> str:
            raise ConnectionError("no route\nto host")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
        assert "--data-dir" in fails("longbench-v2")

    def test_real_rows(self):
        template = shared("longbench/v2/prompts/0shot.txt").read_text()
        file = shared("longbench/v2/longbench_v2_sample.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for example, row in zip(take("longbench-v2", path=file.parent), rows, strict=True):
            expected = template.replace("$DOC$", row["context"].strip()).replace(
                "$Q$", row["question"].strip()
            )
            for letter in "ABCD":
                expected = expected.replace(f"$C_{letter}$", row[f"choice_{letter}"].strip())
            assert example.context == expected
            assert example.answers == (row["answer"],)


class TestJsonArray:
    @pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
    @settings(max_examples=25)
    @given(
        rows=st.lists(
            st.dictionaries(st.text(max_size=3), st.text() | st.integers() | st.lists(st.none())), max_size=6
        ),
        indent=st.sampled_from([None, 1]),
    )
    def test_like_json_loads(
        self, tmp_path_factory: pytest.TempPathFactory, chunk: int, rows: Any, indent: Any
    ):
        file = tmp_path_factory.mktemp("array") / "a.json"
        file.write_text(" \n" + json.dumps(rows, indent=indent, ensure_ascii=True) + "\n ")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_CHUNK", chunk)
            found = list(json_array(file))
        assert [row.fields for row in found] == rows
        assert [row.where for row in found] == [f"{file}:row {n + 1}" for n in range(len(rows))]

    def test_one_row_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(reading, "_CHUNK", 16)
        (tmp_path / "a.json").write_text('[{"a": 1}, {"b": 2}, broken')
        rows = json_array(tmp_path / "a.json")
        assert next(rows).fields == {"a": 1}
        assert next(rows).fields == {"b": 2}
        with pytest.raises(CoverageLabError, match=r"a\.json: not a valid JSON array \(at row 3\)"):
            next(rows)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "at row 1"),
            ("{}", "at row 1"),
            ("[", "at row 1"),
            ('[{"a": 1}', "at row 1"),
            ('[{"a": 1},]', "at row 2"),
            ('[{"a": 1} {}]', "at row 2"),
            ('[{"a": 1}] 2', "at row 2"),
            ("[3]", "row 1: a number where an object is expected"),
            ("[" * 100_000, "at row 1"),
        ],
    )
    def test_faults(self, tmp_path: Path, text: str, reason: str):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(CoverageLabError) as caught:
            list(json_array(tmp_path / "a.json"))
        assert reason in str(caught.value)
        (tmp_path / "a.json").write_bytes(b'[{"a": "\xff"}]')
        with pytest.raises(CoverageLabError, match="not UTF-8"):
            list(json_array(tmp_path / "a.json"))


class TestLongBenchScores:
    def test_every_task_has_a_metric_and_a_length(self):
        assert set(METRICS) | CLASSIFICATION == set(ANSWER_TOKENS) == set(TASKS)
        assert not set(METRICS) & CLASSIFICATION
        assert json.loads(shared("longbench/dataset2maxlen.json").read_text()) == ANSWER_TOKENS

    @pytest.mark.parametrize(
        ("task", "text", "answers", "classes", "score"),
        [
            ("qasper", "It is blue", ["red", "the blue"], [], 0.5),  # it, is, blue; blue
            ("triviaqa", "\n\nParis\nPassage: London", ["Paris"], [], 1),
            ("hotpotqa", "Paris\nPassage: London", ["Paris"], [], 0.5),
            ("samsum", "Ann left\nDialogue: x", ["Ann left"], [], 1),
            ("gov_report", "Ann left\nDialogue: x", ["Ann left"], [], 2 / 3),
            ("trec", "City\nState", ["City"], ["City", "State"], 1),
            ("lsht", "体育和军事", ["体育"], ["体育", "军事"], 0.5),
            ("passage_count", "12", ["12"], [], 1),
            ("passage_retrieval_zh", "段落3", ["段落3"], [], 1),
            ("lcc", "x = 1\ny", ["x = 1"], [], 1),
            ("multifieldqa_zh", "还款", ["还钱"], [], 0.5),
            ("vcsum", "还款", ["还钱"], [], 0.5),
        ],
    )
    def test_by_hand(
        self, tmp_path: Path, task: str, text: str, answers: list[str], classes: list[str], score: float
    ):
        row = {"context": "c", "input": "i", "answers": answers, "all_classes": classes or None}
        write(tmp_path / f"{task}.jsonl", row)
        dataset = datasets.get("longbench")(path=tmp_path)
        (example,) = dataset.examples(100, 4)
        assert dataset.score(example, text) == pytest.approx(score, abs=1e-7)
        assert dataset.check(example, 100, None) is None
        assert example.answer_tokens == ANSWER_TOKENS[task]

    @pytest.mark.parametrize(
        ("task", "row", "fault"),
        [
            ("qasper", {"answers": []}, "no answers"),
            ("trec", {"answers": ["City"]}, "no labels in 'all_classes'"),
            ("trec", {"answers": ["Town"], "all_classes": ["City"]}, "'Town' is no answer"),
            ("passage_count", {"answers": ["many"]}, "'many' is no answer"),
            ("passage_retrieval_en", {"answers": ["7"]}, "'7' is no answer"),
        ],
    )
    def test_rows_that_no_answer_could_satisfy(self, tmp_path: Path, task: str, row: Any, fault: str):
        write(tmp_path / f"{task}.jsonl", {"context": "c", "input": "i"} | row)
        dataset = datasets.get("longbench")(path=tmp_path)
        (example,) = dataset.examples(100, 4)
        assert fault in str(dataset.check(example, 100, None))
        if not row["answers"]:
            assert dataset.score(example, "x") is None

    def test_references_of_real_rows_score_in_full(self):
        dataset = datasets.get("longbench")(path=shared("longbench"))
        for example in dataset.examples(100, 4):
            if example.task in ("lcc", "dureader"):
                continue  # lines that look like comments, and answers of signs alone
            assert dataset.score(example, example.answers[0]) == pytest.approx(1, abs=1e-6)
