"""The data sets that come with the package: what they yield and what they refuse."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real import shared

from coverage_lab.collectors.datasets import Dataset, Example, datasets
from coverage_lab.collectors.datasets.longbench import PLAIN_TASKS, TASKS, WORDING, render
from coverage_lab.collectors.reading import Row, task_name
from coverage_lab.errors import CoverageLabError

OFFICIAL = json.dumps({task: f"official {task}: {{context}} | {{input}}" for task in TASKS})


def take(name: str, prompt_tokens: int = 100, steps: int = 4, **options: Any) -> list[Example]:
    return list(datasets.get(name)(**options).examples(prompt_tokens, steps))


def fails(name: str, **options: Any) -> str:
    """Return the message with which a data set fails; it must be one line."""
    with pytest.raises(CoverageLabError) as caught:
        take(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def line(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False) + "\n"


def longbench_line(number: int = 0, **changes: Any) -> str:
    return line(
        **{"context": f"text {number}", "input": f"ask {number}", "answers": [f"say {number}"]} | changes
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


BROKEN_ROWS = {
    "json": ('{"context": "half a', "not valid JSON"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "list": ('["no", "object"]', "an array where an object"),
    "number": ("7", "a number where an object"),
}


def test_names_and_titles():
    assert {"docs", "jsonl", "longbench", "text"} <= set(datasets.names())
    assert all(datasets.get(name).title for name in datasets.names())


def test_data_sets_load_no_heavy_module():
    code = (
        "import sys; from coverage_lab.collectors.datasets import datasets; datasets.names();"
        "from coverage_lab.collectors import prompts;"
        "sys.exit(str([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules] or ''))"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip() == ""


@given(st.text())
def test_task_names_are_safe(stem: str):
    assert re.fullmatch(r"[A-Za-z0-9_-]+", task_name(stem))


class TestLongBench:
    def test_has_a_wording_for_each_of_the_21_tasks(self):
        assert len(TASKS) == 21
        assert set(TASKS) > PLAIN_TASKS
        without_input = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
        for task, template in WORDING.items():
            assert template.count("{context}") == 1
            assert template.count("{input}") == (task not in without_input)

    @pytest.mark.parametrize("folder", [".", "data", "v1"])
    @pytest.mark.parametrize("prompts", [None, ".", "config", "rows", ".."])
    def test_finds_rows_and_prompts(self, tmp_path: Path, folder: str, prompts: str | None):
        root = tmp_path / "longbench"
        write(root / folder / "hotpotqa.jsonl", longbench_line(3))
        if prompts is not None:
            write(root / (folder if prompts == "rows" else prompts) / "dataset2prompt.json", OFFICIAL)
        dataset = datasets.get("longbench")(path=root)
        (example,) = dataset.examples(100, 4)
        digest = hashlib.sha256(OFFICIAL.encode()).hexdigest()
        if prompts is None:
            assert example.context == WORDING["hotpotqa"].format(context="text 3", input="ask 3")
            assert dataset.describe()["prompts"] == "coverage-lab wording"
        else:
            assert example.context == "official hotpotqa: text 3 | ask 3"
            assert dataset.describe()["prompts"] == f"official dataset2prompt.json (sha256 {digest})"
        assert list(dataset.describe()["files"]) == ["hotpotqa.jsonl"]
        assert (example.before, example.after, example.cut) == ("", "", "middle")
        assert example.answers == ("say 3",)

    @given(context=st.text(), question=st.text())
    def test_braces_survive(self, context: str, question: str):
        row = Row("here", {"context": context, "input": question, "length": 1})
        rendered = render("a {input} b {context} c {length} {} {{x}}", row)
        assert rendered == "a " + question + " b " + context + " c {length} {} {{x}}"

    @pytest.mark.parametrize("text", ["{input}", "{context} {0} {", "}}{{", "\\g<1> \\1"])
    def test_data_are_not_templates(self, text: str):
        assert render("{context}|{input}", Row("here", {"context": text, "input": text})) == f"{text}|{text}"

    def test_few_shot_and_code_go_without_the_chat_template(self, tmp_path: Path):
        for task in TASKS:
            write(tmp_path / f"{task}.jsonl", longbench_line())
        plain = {example.task for example in take("longbench", path=tmp_path) if not example.chat}
        assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}

    def test_order_limit_and_sources(self, tmp_path: Path):
        for task in ("lcc", "qasper", "hotpotqa"):
            # The line after the limit is never read.
            write(tmp_path / f"{task}.jsonl", longbench_line(0) + "\n" + longbench_line(1) + "broken\n")
        examples = take("longbench", path=tmp_path, limit=2)
        assert [(e.task, e.index) for e in examples] == list(
            itertools.product(["qasper", "hotpotqa", "lcc"], [0, 1])
        )
        assert examples[1].source == f"{tmp_path / 'qasper.jsonl'}:3"
        asked = take("longbench", path=tmp_path, limit=1, tasks=("lcc", "qasper", "lcc"))
        assert [e.task for e in asked] == ["lcc", "qasper"]

    def test_reads_line_by_line(self, tmp_path: Path):
        write(tmp_path / "lcc.jsonl", longbench_line() + "broken\n")
        stream = datasets.get("longbench")(path=tmp_path).examples(100, 4)
        assert next(stream).index == 0
        with pytest.raises(CoverageLabError):
            next(stream)

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            *BROKEN_ROWS.values(),
            (line(input="", answers=[]), "no field 'context'"),
            (line(context="", answers=[]), "no field 'input'"),
            (line(context="", input=""), "no field 'answers'"),
            (longbench_line(context=5), "'context' holds a number"),
            (longbench_line(input=None), "'input' holds null"),
            (longbench_line(answers=["a", 1]), "'answers' holds a number"),
            (longbench_line().replace("text 0", "\\ud800"), "half a surrogate pair"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, row: str, reason: str):
        file = write(tmp_path / "lcc.jsonl", longbench_line() + "\n" + row)
        message = fails("longbench", path=tmp_path)
        assert message.startswith(f"{file}:3: ")
        assert reason in message

    def test_missing_files_are_named_before_any_row_is_read(self, tmp_path: Path):
        with pytest.raises(CoverageLabError, match=r"no LongBench file, such as hotpotqa\.jsonl"):
            datasets.get("longbench")(path=tmp_path).examples(100, 4)
        write(tmp_path / "lcc.jsonl", longbench_line())
        with pytest.raises(CoverageLabError, match=r"no qasper\.jsonl"):
            datasets.get("longbench")(path=tmp_path, tasks=("lcc", "qasper")).examples(100, 4)
        assert "did you mean 'hotpotqa'?" in fails("longbench", path=tmp_path, tasks=("hotpot_qa",))
        assert "no such directory" in fails("longbench", path=tmp_path / "absent")

    @pytest.mark.parametrize(
        ("prompts", "reason"), [("{", "not valid JSON"), ("[]", "task 'lcc'"), ('{"lcc": 1}', "task 'lcc'")]
    )
    def test_bad_prompt_files_are_named(self, tmp_path: Path, prompts: str, reason: str):
        write(tmp_path / "lcc.jsonl", longbench_line())
        file = write(tmp_path / "dataset2prompt.json", prompts)
        message = fails("longbench", path=tmp_path)
        assert message.startswith(f"{file}: ")
        assert reason in message

    def test_reads_the_hub_archive_in_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        archive = tmp_path / "data.zip"
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("data/lcc.jsonl", longbench_line(1) + longbench_line(2))
            opened.writestr("data/lcc_e.jsonl", longbench_line(3))

        def download(repo_id: str, filename: str, repo_type: str) -> str:
            assert (repo_id, filename, repo_type) == ("THUDM/LongBench", "data.zip", "dataset")
            return str(archive)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        examples = take("longbench")
        assert [(e.task, e.index, e.answers) for e in examples] == [
            ("lcc", 0, ("say 1",)),
            ("lcc", 1, ("say 2",)),
        ]
        assert examples[1].source == f"{archive}/data/lcc.jsonl:2"
        assert datasets.get("longbench")().describe() == {
            "prompts": "coverage-lab wording",
            "files": {"data.zip": hashlib.sha256(archive.read_bytes()).hexdigest()},
        }
        assert "no qasper.jsonl" in fails("longbench", tasks=("qasper",))
        archive.write_bytes(b"no zip")
        assert "not a zip file" in fails("longbench")

    def test_unreachable_hub_points_to_a_local_copy(self, monkeypatch: pytest.MonkeyPatch):
        def download(*args: Any, **options: Any) -> str:
            raise ConnectionError("no route\nto host")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert "--data-dir" in fails("longbench")

    def test_official_prompts_of_real_rows(self):
        root = shared("longbench")
        templates = json.loads(shared("longbench/dataset2prompt.json").read_text(encoding="utf-8"))
        assert set(templates) == set(TASKS)
        examples = take("longbench", path=root)
        assert len({example.task for example in examples}) >= 16
        for example in examples:
            file, number = example.source.rsplit(":", 1)
            row = json.loads(Path(file).read_text(encoding="utf-8").split("\n")[int(number) - 1])
            assert example.context == templates[example.task].format(**row)
            assert list(example.answers) == row["answers"]

    def test_own_wording_copies_no_official_sentence(self):
        templates = json.loads(shared("longbench/dataset2prompt.json").read_text(encoding="utf-8"))
        for task in TASKS:
            theirs = {s.strip() for s in re.split(r"[.。，\n]|\{\w+\}", templates[task])}
            ours = {s.strip() for s in re.split(r"[.。，\n]|\{\w+\}", WORDING[task])}
            assert ours & theirs <= {"", "Question:"}


class TestDocs:
    def test_documents_differ_and_repeat_under_a_seed(self):
        examples = take("docs")
        assert [(e.task, e.index) for e in examples] == [("topics", i) for i in range(8)]
        assert len({e.context for e in examples}) == 8
        assert examples == take("docs")
        assert [e.context for e in examples] != [e.context for e in take("docs", seed=1)]

    @given(seed=st.integers(0, 10_000), limit=st.integers(1, 60))
    def test_as_many_documents_as_asked_each_from_a_topic_of_its_own(self, seed: int, limit: int):
        examples = take("docs", prompt_tokens=20, seed=seed, limit=limit)
        assert len({e.source for e in examples}) == limit
        for example in examples:
            assert example.context.startswith(f"# {example.source.split(':')[1]}\n")

    @given(tokens=st.integers(1, 100_000), seed=st.integers(0, 100))
    def test_the_question_is_about_the_first_half(self, tokens: int, seed: int):
        (example,) = take("docs", prompt_tokens=tokens, seed=seed, limit=1)
        assert len(example.context) == 8 * tokens
        assert example.cut == "end"
        assert example.after.startswith("\n\nQuestion: ")
        topic = example.after.split('"')[1]
        place = 0 if example.context.startswith(f"# {topic}\n"[: 8 * tokens]) else None
        if place is None:
            place = example.context.index(f"\n# {topic}\n")
        assert place <= 1.5 * tokens

    def test_refusals(self):
        assert "lower --max-prompt-tokens" in fails("docs", prompt_tokens=1_000_000)
        assert "not 1000" in fails("docs", limit=1000)
        assert "--data-dir" in fails("docs", path=Path("here"))
        assert "unknown task 'topic'" in fails("docs", tasks=("topic",))

    def test_describes_the_corpus(self):
        described = datasets.get("docs")().describe()
        assert described["python"] == ".".join(map(str, sys.version_info[:3]))
        assert re.fullmatch("[0-9a-f]{64}", described["corpus_sha256"])


class TestJsonLines:
    def test_row_shapes(self, tmp_path: Path):
        file = write(
            tmp_path / "my prompts.jsonl",
            "\ufeff"
            + line(prompt="all", answer="one", context="ignored")
            + "\n  \r\n"
            + line(context="long", question="what?", answers=["a", "b"])
            + line(context="long", input="who?", answers="c")
            + line(context="long", question="", answers=None),
        )
        examples = take("jsonl", path=file)
        assert {e.task for e in examples} == {"my-prompts"}
        assert [e.index for e in examples] == [0, 1, 2, 3]
        assert [(e.context, e.after) for e in examples] == [
            ("all", ""),
            ("long", "\n\nwhat?"),
            ("long", "\n\nwho?"),
            ("long", ""),
        ]
        assert [e.answers for e in examples] == [("one",), ("a", "b"), ("c",), ()]
        assert [e.source for e in examples] == [f"{file}:{n}" for n in (1, 4, 5, 6)]
        assert {(e.before, e.cut, e.chat) for e in examples} == {("", "middle", True)}

    def test_directory_gives_a_task_a_file(self, tmp_path: Path):
        for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "c.json"):
            write(tmp_path / name, line(prompt=name) * 3)
        assert [(e.task, e.index) for e in take("jsonl", path=tmp_path, limit=2)] == [
            ("a", 0),
            ("a", 1),
            ("b", 0),
            ("b", 1),
        ]
        assert {e.task for e in take("jsonl", path=tmp_path, tasks=("b",))} == {"b"}
        assert "unknown task 'z'" in fails("jsonl", path=tmp_path, tasks=("z",))
        assert list(datasets.get("jsonl")(path=tmp_path).describe()["files"]) == ["a.jsonl", "b.jsonl"]

    def test_paths_without_rows(self, tmp_path: Path):
        assert "--data-dir" in fails("jsonl")
        assert "no *.jsonl" in fails("jsonl", path=tmp_path)
        assert "no such file" in fails("jsonl", path=tmp_path / "absent.jsonl")
        assert "no rows" in fails("jsonl", path=write(tmp_path / "empty.jsonl", "\n \n"))

    def test_names_that_fall_together_are_refused(self, tmp_path: Path):
        for name in ("a b.jsonl", "a+b.jsonl"):
            write(tmp_path / name, line(prompt="x"))
        assert "both give the task 'a-b'" in fails("jsonl", path=tmp_path)

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            *BROKEN_ROWS.values(),
            (line(question="what?"), "no field 'prompt'"),
            (line(context="long"), "no field 'question'"),
            (line(prompt=" \n\t"), "prompt is empty"),
            (line(context="", question="  "), "prompt is empty"),
            (line(prompt=["a"]), "'prompt' holds an array"),
            (line(prompt="p", answer=4), "'answer' holds a number"),
            (line(prompt="p", answers=[None]), "'answers' holds null"),
            (line(prompt="p", answers={"a": 1}), "'answers' holds an object"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, row: str, reason: str):
        file = write(tmp_path / "rows.jsonl", line(prompt="good") + row)
        message = fails("jsonl", path=tmp_path)
        assert message.startswith(f"{file}:2: ")
        assert reason in message

    def test_bytes_that_are_no_utf8_are_named(self, tmp_path: Path):
        file = tmp_path / "rows.jsonl"
        file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
        assert fails("jsonl", path=file) == f"{file}:2: not UTF-8"


class TestPlainText:
    def test_windows_are_evenly_spaced(self, tmp_path: Path):
        text = "".join(f"{n:03}\n" for n in range(250))
        file = write(tmp_path / "book.txt", text)
        examples = take("text", path=file, limit=4, prompt_tokens=10, steps=5)
        assert [e.context for e in examples] == [text[s : s + 120] for s in (0, 249, 499, 749)]
        assert [e.index for e in examples] == [0, 1, 2, 3]
        assert {(e.task, e.cut, e.chat, e.answers) for e in examples} == {("book", "end", False, ())}
        assert examples[2].source == f"{file}:125"
        assert [e.context for e in take("text", path=file, prompt_tokens=10, steps=5)] == [text[:120]]

    @given(text=st.text(st.sampled_from("ab \n"), max_size=30), limit=st.integers(1, 40))
    def test_no_window_is_blank_or_twice_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
    ):
        file = write(tmp_path_factory.mktemp("text") / "a.md", text)
        if not text.strip():
            assert "no text" in fails("text", path=file, limit=limit)
            return
        examples = take("text", path=file, limit=limit)
        assert examples[0].context == text.rstrip()
        assert all(e.context.strip() for e in examples)
        assert len({len(e.context) for e in examples}) == len(examples) <= limit

    def test_directory(self, tmp_path: Path):
        for name in ("b.md", "a.txt", "c.rst"):
            write(tmp_path / name, name)
        assert [(e.task, e.context) for e in take("text", path=tmp_path)] == [("a", "a.txt"), ("b", "b.md")]
        assert [e.task for e in take("text", path=tmp_path, tasks=("b", "a"))] == ["b", "a"]
        write(tmp_path / "a.md", "again")
        assert "both give the task 'a'" in fails("text", path=tmp_path)

    def test_refusals(self, tmp_path: Path):
        assert "no *.txt or *.md" in fails("text", path=tmp_path)
        file = tmp_path / "latin.txt"
        file.write_bytes("one\ntwo\nthr\xe9e".encode("latin-1"))
        assert fails("text", path=tmp_path) == f"{file}:3: not UTF-8"


@pytest.mark.parametrize("name", ["docs", "text"])
def test_sources_that_only_a_limit_ends_have_one(name: str):
    dataset = datasets.get(name)()
    assert dataset.default_prompt_tokens(None) == dataset.default_prompt_tokens(100_000) == 4096
    assert dataset.default_prompt_tokens(300) == 300


def test_base_class_leaves_examples_to_its_heirs():
    with pytest.raises(NotImplementedError):
        Dataset().examples(1, 1)
