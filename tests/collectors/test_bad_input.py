"""What `coverage-lab collect` says to bad input: one line, exit code 2, nothing written."""

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coverage_lab.cli import main
from coverage_lab.collectors import models
from coverage_lab.collectors.collect import CollectOptions, collect
from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

SPARK = "~"  # the one character whose token has a NaN embedding in `spoilt`


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Run `coverage-lab` in this process and return its exit code and what it wrote to stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["coverage-lab", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        assert said.out == ""
        return int(ended.value.code or 0), said.err

    terminate = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def refused(zoo: Any, tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Collect with a few options changed and return the line that it is refused with."""
    held = zoo.loaded("llama")
    monkeypatch.setattr(
        "coverage_lab.collectors.collect.load_model",
        lambda name, *options: held if name == "llama" else models.load_model(name, *options),
    )

    def run(**changes: object) -> str:
        options = {
            "model": "llama",
            "dataset": "jsonl",
            "data_dir": rows,
            "steps": 4,
            "output": output,
        } | changes
        given = [
            (f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None
        ]
        code, said = command("collect", *(part for option in given for part in option if part != ""))
        assert code == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert not output.exists()
        return said.removeprefix("error: ").rstrip("\n")

    rows, output = zoo.prompts(tmp_path / "rows.jsonl", (20, 30)), tmp_path / "trace"
    return run


class TestOptions:
    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"dataset": "longbnch"}, "unknown dataset 'longbnch'; did you mean 'longbench'?"),
            (
                {"dataset": "zzz"},
                "unknown dataset 'zzz'; known: aime, docs, jsonl, longbench, longbench-v2, ruler, text",
            ),
            ({"estimators": "mvar,qest"}, "unknown estimator 'qest'; did you mean 'quest'?"),
            ({"tasks": "rows,colums"}, "unknown task 'colums'; known: rows"),
            ({"tasks": "row"}, "unknown task 'row'; did you mean 'rows'?"),
            ({"model": "smollm3"}, "unknown model 'smollm3'; did you mean 'smollm2'?"),
            ({"decode": "greed"}, "unknown --decode 'greed'; did you mean 'greedy'?"),
            ({"record": "tensor"}, "unknown --record 'tensor'; did you mean 'tensors'?"),
            ({"dtype": "bf16"}, "unknown --dtype 'bf16'; did you mean 'bfloat16'?"),
            ({"share_dtype": "float8"}, "unknown --share-dtype 'float8'; did you mean 'float32'?"),
            ({"page_size": 48}, "page size 48 is not a power of two from 1 to 1024; try 64"),
            ({"page_size": 2048}, "page size 2048 is not a power of two from 1 to 1024; try 64"),
            ({"page_size": 0}, "page size 0 is not a power of two from 1 to 1024; try 64"),
            ({"gammas": "0.9,0"}, "gamma 0.0 is not in (0, 1]; try --gammas 0.9,0.95,0.98,0.99"),
            ({"gammas": "1.01"}, "gamma 1.01 is not in (0, 1]; try --gammas 0.9,0.95,0.98,0.99"),
            ({"gammas": "nan"}, "gamma nan is not in (0, 1]; try --gammas 0.9,0.95,0.98,0.99"),
            ({"gammas": "0.9,much"}, "--gammas '0.9,much' is no comma-separated list of numbers"),
            ({"limit": 0}, "--limit 0 is less than 1"),
            ({"steps": -3}, "--steps -3 is less than 1"),
            ({"batch_size": 0}, "--batch-size 0 is less than 1"),
            ({"max_prompt_tokens": 0}, "--max-prompt-tokens 0 is less than 1"),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_one_line_names_it(self, refused: Any, changes: dict[str, object], line: str):
        assert refused(**changes) == line

    @pytest.mark.parametrize("steps", ["first", "0,x"])
    def test_tensor_steps_are_numbers(self, refused: Any, steps: str):
        line = f"--tensor-steps {steps!r} is no comma-separated list of numbers"
        assert refused(record="tensors", tensor_steps=steps) == line

    @pytest.mark.parametrize("step", [-1, 4, 1.5, float("nan"), float("inf")])
    def test_tensor_steps_are_steps(self, refused: Any, step: float, tmp_path: Path):
        line = f"--tensor-steps {step:g} is no step; there are steps 0 to 3"
        with pytest.raises(CoverageLabError) as caught:
            CollectOptions(model="llama", dataset="docs", output=tmp_path, steps=4, tensor_steps=(0, step))
        assert str(caught.value) == line
        assert refused(record="tensors", tensor_steps=step) == line

    def test_estimators_without_shares(self, refused: Any):
        assert "--record counts stores no shares" in refused(record="counts", estimators="exact,quest")

    def test_chat_without_a_template(self, refused: Any):
        assert refused(chat="") == "the tokenizer has no chat template; leave out --chat"

    def test_the_library_says_the_same(self, tmp_path: Path):
        with pytest.raises(CoverageLabError, match="page size 3 is not a power of two"):
            CollectOptions(model="llama", dataset="docs", output=tmp_path, page_size=3)


class TestData:
    def test_missing(self, refused: Any, tmp_path: Path):
        assert refused(data_dir=tmp_path / "none") == f"{tmp_path}/none: no such file or directory"
        assert refused(data_dir=None).startswith("no data given; name a file or a directory of *.jsonl")
        (tmp_path / "empty").mkdir()
        assert refused(data_dir=tmp_path / "empty") == f"{tmp_path}/empty: no *.jsonl in this directory"
        assert (
            refused(dataset="longbench", data_dir=tmp_path / "none") == f"{tmp_path}/none: no such directory"
        )
        assert "no LongBench file" in refused(dataset="longbench", data_dir=tmp_path)

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ('{"prompt": "half', "not valid JSON (Unterminated string starting at, column 12)"),
            ('["prompt"]', "an array where an object is expected; one JSON object a line"),
            ('{"prompt": 7}', "field 'prompt' holds a number where text is expected"),
            ('{"text": "a"}', "no field 'prompt', and no 'context' with a 'question'"),
            ('{"prompt": "  "}', "the prompt is empty"),
        ],
    )
    def test_broken_line(self, refused: Any, tmp_path: Path, line: str, fault: str):
        data = tmp_path / "broken.jsonl"
        data.write_text(f'{{"prompt": "a fine one"}}\n\n{line}\n')
        assert refused(data_dir=data) == f"{data}:3: {fault}"

    def test_reference_is_missing(self, refused: Any, tmp_path: Path):
        assert refused(decode="forced") == (
            f"{tmp_path}/rows.jsonl:1: neither an answer nor more text to feed after the prompt; "
            "use --decode greedy"
        )

    def test_beyond_the_window(self, refused: Any, zoo: Any, tmp_path: Path):
        data = zoo.prompts(tmp_path / "long.jsonl", (100, 509))
        assert refused(data_dir=data) == (
            f"{data}:2: the prompt has 509 tokens; with 4 steps at most 508 fit in the model's window: "
            "give --max-prompt-tokens 508"
        )
        assert "at most 508 prompt tokens do" in refused(max_prompt_tokens=509)
        assert "--steps 512 leave no room in the model's window of 512 tokens" in refused(steps=512)

    def test_beyond_the_vocabulary(self, refused: Any, zoo: Any, tmp_path: Path):
        """A tokenizer of another model would end in an index error, on a GPU in a dead context."""
        model = zoo.build("llama")
        model.resize_token_embeddings(100)
        assert refused(model=zoo.save(model, "shrunk")) == (
            f"{tmp_path}/rows.jsonl:1: the prompt has tokens beyond the model's vocabulary of 100; "
            "its tokenizer belongs to another model"
        )

    def test_page_beyond_the_sliding_window(self, refused: Any, zoo: Any):
        assert refused(model=zoo.directory("mistral"), page_size=32) == (
            "page size 32 is larger than the sliding window of layer 0 (22 tokens); "
            "give a smaller --page-size"
        )


class TestOutput:
    def test_of_something_else(self, refused: Any, command: Callable[..., Any], zoo: Any, tmp_path: Path):
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "precious.txt").write_text("precious")
        arguments = ["collect", "--dataset", "docs", "--model", "no-model-is-loaded-for-this"]
        assert command(*arguments, "-o", tmp_path / "notes") == (
            2,
            f"error: {tmp_path}/notes is not empty and no trace; give another directory with -o\n",
        )
        assert [path.name for path in (tmp_path / "notes").iterdir()] == ["precious.txt"]
        file = tmp_path / "notes" / "precious.txt"
        assert command(*arguments, "-o", file) == (2, f"error: {file} is a file; give a directory with -o\n")
        assert file.read_text() == "precious"


def collect_arguments(model: Path, data: Path, output: Path, **more: object) -> list[object]:
    options = {
        "model": model,
        "dataset": "jsonl",
        "data-dir": data,
        "page-size": 8,
        "steps": 6,
        "output": output,
    }
    given = (options | more).items()
    return ["collect", "--device", "cpu", "--ignore-eos", *(p for k, v in given for p in (f"--{k}", v))]


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


class TestFullDisk:
    @pytest.fixture
    def arguments(self, zoo: Any, tmp_path: Path) -> Callable[[Path], list[object]]:
        data = zoo.prompts(tmp_path / "rows.jsonl", (20, 30, 25, 40))
        return lambda output: collect_arguments(zoo.directory("llama"), data, output)

    def check(
        self, command: Callable[..., Any], arguments: Any, output: Path, free: Callable[[], None]
    ) -> None:
        code, said = command(*arguments(output))
        assert code == 2
        assert said.splitlines()[-1] == (
            f"error: the disk is full at {output}; free some space and run the same command again: "
            "finished requests are kept"
        )
        assert "Traceback" not in said
        assert (output / "journal" / "rows-00000.json").exists()
        free()
        code, said = command(*arguments(output))
        assert code == 0
        assert "were done before" in said

    def test_simulated(
        self, command: Callable[..., Any], arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        write_bytes, room = Path.write_bytes, 0

        def limited(path: Path, data: bytes) -> int:
            nonlocal room
            room -= len(data)
            if room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_bytes(path, data)

        assert command(*arguments(tmp_path / "wanted"))[0] == 0
        room = sum(map(len, files(tmp_path / "wanted").values())) // 2
        monkeypatch.setattr(Path, "write_bytes", limited)
        self.check(
            command,
            arguments,
            tmp_path / "trace",
            lambda: monkeypatch.setattr(Path, "write_bytes", write_bytes),
        )
        assert files(tmp_path / "trace") == files(tmp_path / "wanted")

    def test_real(self, command: Callable[..., Any], arguments: Any, tmp_path: Path):
        disk, ballast = tmp_path / "disk", tmp_path / "disk" / "ballast"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("needs the right to mount")
        try:
            ballast.write_bytes(bytes((1 << 20) - 49_152))
            assert command(*arguments(tmp_path / "wanted"))[0] == 0
            self.check(command, arguments, disk / "trace", ballast.unlink)
            assert files(disk / "trace") == files(tmp_path / "wanted")
        finally:
            subprocess.run(["umount", str(disk)], check=True)


class TestNotANumber:
    """A model that answers one rare token with NaN."""

    @pytest.fixture(scope="class")
    def spoilt(self, zoo: Any) -> Path:
        model = zoo.build("llama")
        (token,) = zoo.tokenizer(SPARK, add_special_tokens=False).input_ids
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = torch.nan
        return zoo.save(model, "spoilt")

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_in_the_prompt(
        self, command: Callable[..., Any], zoo: Any, spoilt: Path, tmp_path: Path, batch_size: int
    ):
        data = zoo.prompts(tmp_path / "rows.jsonl", (20, 30, 25))
        good = files_of_rows(
            command, collect_arguments(spoilt, data, tmp_path / "good", **{"batch-size": batch_size})
        )
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        lines[1]["prompt"] = lines[1]["prompt"][:-1] + SPARK
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))

        output = tmp_path / "trace"
        arguments = collect_arguments(spoilt, data, output, **{"batch-size": batch_size})
        code, said = command(*arguments)
        assert code == 1
        assert "1 request failed:" in said
        assert "rows-00001: NaN in the model's logits after the prompt" in said
        assert "Traceback" not in said
        trace = Trace(output)
        assert trace.requests["status"].to_list() == ["ok", "failed", "ok"]
        assert trace.requests["error"].to_list() == [None, "NaN in the model's logits after the prompt", None]
        assert trace.requests["steps"].to_list() == [6, 0, 6]
        assert trace.requests["stop"].to_list() == ["length", "error", "length"]
        # The neighbours have the same rows as among sound ones.
        assert [shard.request_id for shard in trace.shards] == ["rows-00000", "rows-00002"]
        for shard in trace.shards:
            assert shard.path.read_bytes() == good[shard.request_id]
        wanted = files(output)
        assert command(*arguments)[0] == 1
        assert files(output) == wanted

        class Interrupting:
            """Stops a run once the failed request is written."""

            def begin(self, total: int, done: int, plan: str) -> None: ...

            def request(self, request: dict[str, Any], seconds: float) -> None:
                if request["error"]:
                    raise KeyboardInterrupt

        shutil.rmtree(output)
        options = CollectOptions(
            model=str(spoilt),
            dataset="jsonl",
            data_dir=data,
            output=output,
            page_size=8,
            steps=6,
            batch_size=batch_size,
            device="cpu",
            ignore_eos=True,
        )
        with pytest.raises(KeyboardInterrupt):
            collect(options, Interrupting())
        assert (output / "journal" / "rows-00001.json").exists()
        assert command(*arguments)[0] == 1
        assert files(output) == wanted

    @pytest.mark.parametrize("batch_size", [1, 2])
    @pytest.mark.parametrize(("at", "steps"), [(0, 6), (2, 6), (5, 6)])
    def test_at_a_step(
        self,
        command: Callable[..., Any],
        zoo: Any,
        spoilt: Path,
        tmp_path: Path,
        batch_size: int,
        at: int,
        steps: int,
    ):
        """The spark is fed as token `at`: what comes after that step is NaN."""
        rows = [
            {"prompt": zoo.text(20), "answer": "x" * 9},
            {"prompt": zoo.text(23), "answer": "x" * at + SPARK + "yz" * 9},
        ]
        ids = zoo.tokenizer(rows[1]["answer"], add_special_tokens=False).input_ids
        place = ids.index(zoo.tokenizer(SPARK, add_special_tokens=False).input_ids[0])
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = {"batch-size": batch_size, "decode": "forced", "steps": steps}
        assert command(*collect_arguments(spoilt, data, tmp_path / "trace", **more))[0] == 1
        good, bad = Trace(tmp_path / "trace").requests.iter_rows(named=True)
        assert (good["status"], good["steps"]) == ("ok", steps)
        assert (bad["status"], bad["error"]) == ("failed", f"NaN in the model's logits after step {place}")
        assert bad["decoded_ids"] == ids[: place + 1]

    def test_all_fail(self, command: Callable[..., Any], zoo: Any, spoilt: Path, tmp_path: Path):
        data = tmp_path / "rows.jsonl"
        data.write_text(json.dumps({"prompt": SPARK}) + "\n")
        code, said = command(*collect_arguments(spoilt, data, tmp_path / "trace"))
        assert code == 1
        assert "0 requests, 0 steps in all, 0 rows" in said
        with pytest.raises(CoverageLabError, match="no request was recorded"):
            Trace(tmp_path / "trace").scan()


def files_of_rows(command: Callable[..., Any], arguments: list[object]) -> dict[str, bytes]:
    assert command(*arguments)[0] == 0
    output = arguments[arguments.index("--output") + 1]
    return {path.stem: path.read_bytes() for path in (Path(str(output)) / "rows").iterdir()}
