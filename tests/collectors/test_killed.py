"""Runs that are killed, and what the same command makes of what they left.

The processes are real and so are the signals. They are forked from one process that has imported
everything and loaded the model once, since that takes far longer than what is tested.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace

SERVER = """
import gc, json, os, signal, sys, traceback
import coverage_lab.cli.progress
from coverage_lab.cli import main
from coverage_lab.collectors.collect import load_model

load_model(sys.argv[1], device="cpu")
gc.freeze()  # children share the memory of what is never collected
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
for line in sys.stdin:
    job = json.loads(line)
    if isinstance(job, int):
        answer = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    else:
        answer = os.fork()
        if answer == 0:
            errors = os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            sys.argv, code = ["coverage-lab", *job["arguments"]], 1
            try:
                main()
            except SystemExit as end:
                code = end.code
            except KeyboardInterrupt:  # before main could see to it
                code = 130
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)  # the usual way takes seconds, for all that was imported
    print(answer, flush=True)
"""
LENGTHS = (20, 31, 15, 28, 23)
STEPS = 12
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
SIGNALS = [pytest.param(number, id=number.name) for number in CODES]
DEADLINE = 60.0
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Run:
    """A process that collects."""

    pid: int
    output: Path
    errors: Path
    server: "Server"

    def stop(self, number: signal.Signals) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code."""
        return self.server.ask(self.pid)

    def reach(self, requests: int) -> None:
        """Wait until so many requests are finished."""
        end = time.monotonic() + DEADLINE
        while len(list((self.output / "journal").glob("*.json"))) < requests:
            assert time.monotonic() < end, self.errors.read_text()
            time.sleep(0.001)


class Server:
    """Forks `coverage-lab` processes."""

    def __init__(self, root: Path, model: str) -> None:
        self._root, self._count = root, 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=ENVIRONMENT,
        )

    def ask(self, job: Any) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, output: Path, arguments: Sequence[str]) -> Run:
        self._count += 1
        errors = self._root / f"errors{self._count}.txt"
        return Run(self.ask({"arguments": arguments, "stderr": str(errors)}), output, errors, self)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)


class Runner:
    """Starts runs that differ in their directory and in named options only."""

    def __init__(self, server: Server, options: dict[str, str], root: Path) -> None:
        self._server, self._options, self._root = server, options, root
        self._wanted: dict[str, dict[str, bytes]] = {}

    def arguments(self, output: Path, **changes: str) -> list[str]:
        options = self._options | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return [
            "collect",
            *(part for option in options.items() for part in option if part),
            "-o",
            str(output),
        ]

    def start(self, output: Path, **changes: str) -> Run:
        return self._server.start(output, self.arguments(output, **changes))

    def finish(self, output: Path, **changes: str) -> dict[str, bytes]:
        """Run to the end and return the files of the trace."""
        run = self.start(output, **changes)
        assert run.wait() == 0, run.errors.read_text()
        return files(output)

    def refused(self, output: Path, **changes: str) -> str:
        """Return the one line with which a run is refused; it must change nothing."""
        before = files(output)
        run = self.start(output, **changes)
        assert run.wait() == 2
        assert files(output) == before
        line = run.errors.read_text()
        assert line.count("\n") == 1
        return line

    def wanted(self, **changes: str) -> dict[str, bytes]:
        """Return the files of a run that nothing interrupted."""
        key = json.dumps(changes)
        if key not in self._wanted:
            self._wanted[key] = self.finish(self._root / f"wanted{len(self._wanted)}", **changes)
        return self._wanted[key]


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def runner(zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("runs")
    options = {
        "--model": str(zoo.directory("llama")),
        "--dataset": "jsonl",
        "--data-dir": str(zoo.prompts(root / "rows.jsonl", LENGTHS, answer="fish on the mill")),
        "--steps": str(STEPS),
        "--page-size": "8",
        "--record": "tensors",
        "--device": "cpu",
        "--ignore-eos": "",
    }
    server = Server(root, options["--model"])
    yield Runner(server, options, root)
    server.close()


class TestKilled:
    @pytest.mark.parametrize("batch_size", ["1", "2"])
    @pytest.mark.parametrize("number", SIGNALS)
    def test_between_requests(self, runner: Runner, tmp_path: Path, number: signal.Signals, batch_size: str):
        """Killed once after one finished request and once after three."""
        output = tmp_path / "trace"
        for done in (1, 3):
            run = runner.start(output, batch_size=batch_size)
            run.reach(done)
            assert run.stop(number) == CODES[number]
            said = run.errors.read_text()
            assert "Traceback" not in said
            assert not (output / "manifest.json").exists()
            with pytest.raises(CoverageLabError, match="is unfinished"):
                Trace(output)
        kept = {
            name: data
            for name, data in files(output).items()
            if name.startswith("rows/") and ".tmp" not in name
        }
        assert len(kept) >= 3
        final = runner.finish(output, batch_size=batch_size)
        assert final == runner.wanted(batch_size=batch_size)

    @pytest.mark.parametrize("number", SIGNALS)
    def test_at_any_moment(self, runner: Runner, tmp_path: Path, number: signal.Signals):
        """Killed again and again, a little later each time, until it ends before the signal."""
        output, delay, kills = tmp_path / "trace", 0.03, 0
        wanted = runner.wanted(batch_size="2")
        while True:
            run = runner.start(output, batch_size="2")
            time.sleep(delay)
            code = run.stop(number)
            if code == 0:
                break
            assert code in (CODES[number], -number)  # the latter before Python could set its handlers
            assert "Traceback" not in run.errors.read_text()
            kills, delay = kills + 1, 1.6 * delay
        assert kills > 2
        assert files(output) == wanted
        assert runner.finish(output, batch_size="2") == wanted

    def test_an_altered_shard_is_redone(self, runner: Runner, tmp_path: Path):
        output = tmp_path / "trace"
        run = runner.start(output)
        run.reach(2)
        run.stop(signal.SIGKILL)
        shard = output / "rows" / "rows-00000.parquet"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        (output / "tensors" / "rows-00001.safetensors").unlink()
        assert runner.finish(output) == runner.wanted()

    def test_finished_requests_are_not_redone(self, runner: Runner, tmp_path: Path):
        output = tmp_path / "trace"
        run = runner.start(output)
        run.reach(3)
        run.stop(signal.SIGTERM)
        shard = output / "rows" / "rows-00000.parquet"
        before = shard.stat()
        run = runner.start(output)
        assert run.wait() == 0
        assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert " of 5 requests were done before" in run.errors.read_text()


class TestRefused:
    CHANGES = (
        ("batch_size", "3", "batch_size = 1, not 3"),
        ("gammas", "0.5", "gammas = [0.9, 0.95, 0.98, 0.99], not [0.5]"),
        ("estimators", "exact,quest", "estimators = ['exact', 'mvar'], not ['exact', 'quest']"),
        ("record", "counts", "estimators = ['exact', 'mvar'], not ['exact']"),
        ("steps", "9", f"steps = {STEPS}, not 9"),
        ("dtype", "bfloat16", "model.dtype = float32, not bfloat16"),
        ("decode", "forced", "decode = greedy, not forced"),
    )

    @pytest.mark.parametrize("finished", [False, True])
    def test_changed_options_are_named(self, runner: Runner, tmp_path: Path, finished: bool):
        output = tmp_path / "trace"
        run = runner.start(output)
        if finished:
            assert run.wait() == 0
        else:
            run.reach(1)
            run.stop(signal.SIGKILL)
        what = "a finished trace" if finished else "an unfinished trace"
        for name, value, difference in self.CHANGES[:: 3 if finished else 1]:
            assert runner.refused(output, **{name: value}) == (
                f"error: {output} holds {what} made with {difference}; "
                "repeat the command it was begun with, or give another directory with -o\n"
            )
        assert runner.finish(output) == runner.wanted()

    def test_the_option_is_named_before_its_files(self, runner: Runner, zoo: Any, tmp_path: Path):
        output, rows = tmp_path / "trace", tmp_path / "data"
        rows.mkdir()
        zoo.prompts(rows / "one.jsonl", (30,))
        zoo.prompts(rows / "two.jsonl", (20,))
        runner.finish(output, data_dir=str(rows), tasks="one,two")
        assert "made with tasks = ['one', 'two'], not ['one']" in runner.refused(
            output, data_dir=str(rows), tasks="one"
        )
        for name in ("one", "two"):
            (rows / f"{name}.jsonl").rename(rows / f"{name}.txt")
        assert "made with dataset.name = jsonl, not text" in runner.refused(
            output, dataset="text", data_dir=str(rows), tasks="one,two"
        )

    def test_the_data_may_move(self, runner: Runner, zoo: Any, tmp_path: Path):
        output = tmp_path / "trace"
        zoo.prompts(tmp_path / "rows.jsonl", (30, 20))
        done = runner.finish(output, data_dir=str(tmp_path / "rows.jsonl"))
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere" / "rows.jsonl")
        assert runner.finish(output, data_dir=str(tmp_path / "elsewhere")) == done

    def test_changed_data_are_named(self, runner: Runner, zoo: Any, tmp_path: Path):
        output, rows = tmp_path / "trace", tmp_path / "rows.jsonl"
        zoo.prompts(rows, (30, 20))
        runner.finish(output, data_dir=str(rows))
        rows.write_text(rows.read_text() + "\n")
        assert "made with dataset.files.rows.jsonl = " in runner.refused(output, data_dir=str(rows))

    def test_a_second_process(self, runner: Runner, tmp_path: Path):
        output = tmp_path / "trace"
        run = runner.start(output)
        run.reach(1)
        os.kill(run.pid, signal.SIGSTOP)
        try:
            assert runner.refused(output) == (
                f"error: another process is writing to {output}; wait for it or give another -o\n"
            )
        finally:
            os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 0
        assert files(output) == runner.wanted()


def test_console_script(runner: Runner, tmp_path: Path):
    """The command as users have it, interrupted while it decodes."""
    script = Path(sys.executable).with_name("coverage-lab")
    assert script.exists(), f"{script} is missing: install the project"
    output = tmp_path / "trace"
    run = subprocess.Popen(
        [script, *runner.arguments(output, steps="200")],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=hear_interrupts,
    )
    end = time.monotonic() + DEADLINE
    while not list(output.glob("journal/*.json")):
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=DEADLINE)[1]
    assert run.returncode == 130
    assert "".join(said.splitlines()[-2:]).endswith(
        f"stopped; the same command goes on from what is in {output}"
    )
    assert "Traceback" not in said


def hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
