"""Writing a trace: what is on the disk at every moment, and what may be written where."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace, schema
from coverage_lab.trace.writer import TraceWriter, check_directory

RUN = {
    "page_size": 8,
    "gammas": [0.9],
    "record": "shares",
    "estimators": ["exact"],
    "model": {"dtype": "float32"},
}
FACTS = {"geometry": {"layers": [{}, {}], "kv_heads": 2}}
LAYERS, KV_HEADS, STEPS = 2, 2, 3
NAMES = ["a", "b", "c"]


def request(name: str, **changes: Any) -> dict[str, Any]:
    line = {"request_id": name, "dataset": "d", "task": "t", "status": "ok", "error": None, "stop": "length"}
    numbers = {"prompt_tokens": 5, "dropped_tokens": 0, "steps": STEPS, "decode_start": 5}
    return {**line, **numbers, "answers": ["é"], "prompt_ids": [1, 2], "decoded_ids": [3]} | changes


def rows(name: str) -> pl.DataFrame:
    count = LAYERS * KV_HEADS * STEPS
    place = range(count)
    return pl.DataFrame(
        {
            "request_id": [name] * count,
            "layer": [i // (KV_HEADS * STEPS) for i in place],
            "kv_head": [i // STEPS % KV_HEADS for i in place],
            "step": [i % STEPS for i in place],
            "position": [8 * (i % 2) + 5 + i % STEPS for i in place],
            "n_pages": [1 + i % 2 for i in place],
            "first_page": [0] * count,
            "share": [[1.0] if i % 2 == 0 else [0.25, 0.75] for i in place],
        }
    )


def write(writer: TraceWriter, name: str) -> None:
    writer.write(request(name), rows(name), b"tensors of " + name.encode())


def fill(path: Path, run: dict[str, Any] = RUN, names: list[str] = NAMES) -> None:
    with TraceWriter(path, run) as writer:
        if writer.finished:
            return
        for name in names:
            if not writer.done(name):
                write(writer, name)
        writer.finish(names, FACTS)


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def message(path: Path, run: dict[str, Any] = RUN) -> str:
    """Return what a writer is refused with; it must be one line and change nothing."""
    before = snapshot(path)
    with pytest.raises(CoverageLabError) as caught:
        TraceWriter(path, run)
    assert snapshot(path) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def footer(path: Path) -> dict[int, Any]:
    """Return a parquet file's FileMetaData, Thrift fields by their ids (compact protocol)."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    at = iter(data[-8 - length : -8])

    def varint() -> int:
        value = shift = 0
        while True:
            byte = next(at)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def value(kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return next(at)
        if kind in (4, 5, 6):
            number = varint()
            return number >> 1 ^ -(number & 1)
        if kind == 7:
            return bytes(next(at) for _ in range(8))
        if kind == 8:
            return bytes(next(at) for _ in range(varint()))
        if kind in (9, 10):
            head = next(at)
            size = head >> 4 if head >> 4 < 15 else varint()
            return [next(at) == 1 if head & 15 < 3 else value(head & 15) for _ in range(size)]
        assert kind == 12
        return struct()

    def struct() -> dict[int, Any]:
        fields, number = {}, 0
        while head := next(at):
            number = number + (head >> 4) if head >> 4 else value(4)
            fields[number] = value(head & 15)
        return fields

    return struct()


class TestFiles:
    def test_layout(self, tmp_path: Path):
        fill(tmp_path / "trace")
        assert list(snapshot(tmp_path / "trace")) == [
            "manifest.json",
            "requests.parquet",
            *(f"rows/{name}.parquet" for name in NAMES),
            *(f"tensors/{name}.safetensors" for name in NAMES),
        ]
        trace = Trace(tmp_path / "trace")
        trace.verify()
        assert trace.requests["request_id"].to_list() == NAMES
        assert trace.requests["answers"].to_list() == [["é"]] * 3
        assert trace.scan().collect().equals(pl.concat(map(rows, NAMES)))

    def test_small_layers_share_a_row_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        a_layer = KV_HEADS * STEPS * 2
        for most, layers in ((1, [1, 1]), (a_layer, [1, 1]), (2 * a_layer, [2]), (1 << 16, [2])):
            monkeypatch.setattr("coverage_lab.trace.writer.GROUP_SHARES", most)
            fill(tmp_path / str(most))
            groups = footer(tmp_path / str(most) / "rows" / "a.parquet")[4]
            assert [group[3] for group in groups] == [count * KV_HEADS * STEPS for count in layers]

    def test_a_row_group_a_layer_in_zstd(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("coverage_lab.trace.writer.GROUP_SHARES", 1)
        fill(tmp_path / "trace")
        groups = footer(tmp_path / "trace" / "rows" / "a.parquet")[4]
        assert [group[3] for group in groups] == [KV_HEADS * STEPS] * LAYERS
        columns = [column[3] for group in groups for column in group[1]]
        assert {column[4] for column in columns} == {6}  # ZSTD
        layers = [column[12] for column in columns if column[3] == [b"layer"]]
        bounds = [[int.from_bytes(statistics[field], "little") for field in (5, 6)] for statistics in layers]
        assert bounds == [[0, 0], [1, 1]]  # largest and smallest layer of each group

    def test_requests_without_rows(self, tmp_path: Path):
        with TraceWriter(tmp_path / "trace", RUN) as writer:
            writer.write(request("a", status="failed", error="NaN", steps=0))
            write(writer, "b")
            writer.write(request("c", steps=0), rows("c").clear())
            writer.finish(NAMES, FACTS)
        trace = Trace(tmp_path / "trace")
        assert [shard.request_id for shard in trace.shards] == ["b"]
        assert trace.requests["status"].to_list() == ["failed", "ok", "ok"]

    def test_order_of_writing_does_not_show(self, tmp_path: Path):
        fill(tmp_path / "one")
        with TraceWriter(tmp_path / "two", RUN) as writer:
            for name in reversed(NAMES):
                write(writer, name)
            write(writer, "b")
            writer.finish(NAMES, FACTS)
        assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


class TestResuming:
    @pytest.fixture
    def wanted(self, tmp_path: Path) -> dict[str, bytes]:
        fill(tmp_path / "wanted")
        return snapshot(tmp_path / "wanted")

    @pytest.fixture
    def begun(self, tmp_path: Path) -> Path:
        with TraceWriter(tmp_path / "begun", RUN) as writer:
            write(writer, "a")
            write(writer, "b")
        return tmp_path / "begun"

    def test_finished_requests_are_known(self, begun: Path, wanted: dict[str, bytes]):
        with TraceWriter(begun, RUN) as writer:
            assert [bool(writer.done(name)) for name in NAMES] == [True, True, False]
            assert not writer.finished
        fill(begun)
        assert snapshot(begun) == wanted

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda path: (path / "rows/a.parquet").write_bytes(b"PAR1"), id="altered shard"),
            pytest.param(lambda path: (path / "rows/a.parquet").unlink(), id="missing shard"),
            pytest.param(lambda path: (path / "tensors/a.safetensors").write_bytes(b""), id="empty tensors"),
            pytest.param(lambda path: (path / "journal/a.json").write_bytes(b"{"), id="torn journal"),
            pytest.param(lambda path: (path / "journal/a.json").write_bytes(b"[7]"), id="odd journal"),
            pytest.param(lambda path: (path / "journal/a.json").unlink(), id="missing journal"),
        ],
    )
    def test_what_was_damaged_is_redone(self, begun: Path, wanted: dict[str, bytes], damage: Any):
        damage(begun)
        with TraceWriter(begun, RUN) as writer:
            assert [bool(writer.done(name)) for name in NAMES] == [False, True, False]
        fill(begun)
        assert snapshot(begun) == wanted

    @pytest.mark.parametrize(
        ("damage", "kept"),
        [
            pytest.param(lambda path: (path / "rows/a.parquet").write_bytes(b"PAR1"), [1, 2], id="altered"),
            pytest.param(lambda path: (path / "rows/b.parquet").unlink(), [0, 2], id="missing"),
            pytest.param(lambda path: (path / "tensors/c.safetensors").write_bytes(b""), [0, 1], id="empty"),
            pytest.param(lambda path: (path / "requests.parquet").write_bytes(b"PAR1"), [], id="table"),
            pytest.param(lambda path: (path / "requests.parquet").unlink(), [], id="no table"),
        ],
    )
    def test_a_finished_trace_is_mended(
        self, tmp_path: Path, wanted: dict[str, bytes], damage: Any, kept: list[int]
    ):
        fill(tmp_path / "done")
        damage(tmp_path / "done")
        for _ in range(2):  # the second time it is an unfinished trace
            with TraceWriter(tmp_path / "done", RUN) as writer:
                assert not writer.finished
                assert [place for place, name in enumerate(NAMES) if writer.done(name)] == kept
        fill(tmp_path / "done")
        assert snapshot(tmp_path / "done") == wanted

    def test_half_written_files_are_removed(self, begun: Path, wanted: dict[str, bytes]):
        for folder in ("", "rows", "journal", "tensors"):
            (begun / folder / ".tmp-c.parquet").write_bytes(b"half")
        fill(begun)
        assert snapshot(begun) == wanted

    def test_a_run_that_never_wrote(self, tmp_path: Path, wanted: dict[str, bytes]):
        for name, file in (("empty", None), ("early", ".tmp-run.json")):
            (tmp_path / name).mkdir()
            if file:
                (tmp_path / name / file).write_bytes(b"{")
            fill(tmp_path / name)
            assert snapshot(tmp_path / name) == wanted

    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("stop", range(1, 13))
    def test_stopped_at_any_write(
        self,
        tmp_path: Path,
        wanted: dict[str, bytes],
        stop: int,
        after: bool,
        monkeypatch: pytest.MonkeyPatch,
    ):
        """There are twelve: the run, three files for each of three requests, the table, the manifest."""
        replace, moment = os.replace, 0

        def stopping(source: Any, target: Any) -> None:
            nonlocal moment
            moment += 1
            if moment == stop and not after:
                raise KeyboardInterrupt
            replace(source, target)
            if moment == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stopping)
            with pytest.raises(KeyboardInterrupt):
                fill(tmp_path / "trace")
        fill(tmp_path / "trace")
        assert snapshot(tmp_path / "trace") == wanted

    def test_killed_while_cleaning_up(self, tmp_path: Path, wanted: dict[str, bytes]):
        path = tmp_path / "wanted"
        (path / "journal").mkdir()
        (path / "journal" / "a.json").write_bytes(b"{}")
        (path / "run.json").write_bytes(schema.to_json(RUN))
        with TraceWriter(path, RUN) as writer:
            assert writer.finished
        assert snapshot(path) == wanted


class TestRefusals:
    @pytest.mark.parametrize("finished", [True, False])
    def test_another_run_is_named(self, tmp_path: Path, finished: bool):
        path = tmp_path / "trace"
        if finished:
            fill(path)
        else:
            TraceWriter(path, RUN).__exit__(None, None, None)
        what = "a finished trace" if finished else "an unfinished trace"
        assert message(path, RUN | {"page_size": 16}) == (
            f"{path} holds {what} made with page_size = 8, not 16; "
            "repeat the command it was begun with, or give another directory with -o"
        )
        assert "made with model.dtype = float32, not float16" in message(
            path, RUN | {"model": {"dtype": "float16"}}
        )
        assert "made with seed = None, not 1" in message(path, RUN | {"seed": 1})

    @pytest.mark.parametrize("name", ["notes.txt", "manifest.json.bak", ".tmp-mine", ".hidden"])
    def test_a_directory_with_other_files(self, tmp_path: Path, name: str):
        (tmp_path / name).write_text("precious")
        assert message(tmp_path) == f"{tmp_path} is not empty and no trace; give another directory with -o"

    @pytest.mark.parametrize("manifest", ['{"name": "a web app"}', '{"schema": "another"}'])
    def test_a_manifest_of_something_else(self, tmp_path: Path, manifest: str):
        (tmp_path / "manifest.json").write_text(manifest)
        assert "is not empty and no trace" in message(tmp_path)

    @pytest.mark.parametrize("file", ["manifest.json", "run.json"])
    @pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]", b""])
    def test_damaged(self, tmp_path: Path, file: str, content: bytes):
        (tmp_path / file).write_bytes(content)
        assert (
            message(tmp_path)
            == f"{tmp_path / file} is damaged; restore it, or give another directory with -o"
        )

    def test_another_schema(self, tmp_path: Path):
        fill(tmp_path)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 2}))
        assert f"{tmp_path} holds a trace of schema 2, not 1" in message(tmp_path)

    def test_a_file(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(CoverageLabError, match="is a file; give a directory with -o"):
            TraceWriter(tmp_path / "file", RUN)
        with pytest.raises(CoverageLabError, match=r"can't write to .*: Not a directory"):
            TraceWriter(tmp_path / "file" / "trace", RUN)

    def test_two_writers(self, tmp_path: Path):
        with TraceWriter(tmp_path / "trace", RUN):
            assert "another process is writing to" in message(tmp_path / "trace")
        fill(tmp_path / "trace")

    def test_a_refused_writer_leaves_the_directory_free(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        path = tmp_path / "trace"
        fill(path, names=["a"])
        message(path, RUN | {"page_size": 16})
        with TraceWriter(path, RUN) as writer:
            assert writer.finished

        def fail(*args: Any) -> None:
            raise OSError(errno.EIO, "input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(schema, "write_atomic", fail)
            with pytest.raises(CoverageLabError, match=r"can't write to .*: input/output"):
                TraceWriter(tmp_path / "new", RUN)
        fill(tmp_path / "new")

    def test_nothing_is_made_by_looking(self, tmp_path: Path):
        check_directory(tmp_path / "new" / "trace")
        check_directory(tmp_path)
        assert not list(tmp_path.iterdir())


class TestFullDisk:
    def test_finished_requests_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        write_bytes = Path.write_bytes

        def half(path: Path, data: bytes) -> int:
            write_bytes(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        fill(tmp_path / "wanted")
        path = tmp_path / "trace"
        for name in NAMES:  # the disk is full at the second file of every run
            with TraceWriter(path, RUN) as writer:
                write(writer, name)
                monkeypatch.setattr(Path, "write_bytes", half)
                with pytest.raises(CoverageLabError) as caught:
                    write(writer, "c")
                monkeypatch.undo()
            assert str(caught.value) == (
                f"the disk is full at {path}; free some space and run the same command again: "
                "finished requests are kept"
            )
            assert not list(path.rglob(".tmp-*"))
            assert json.loads((path / "journal" / f"{name}.json").read_text())
        fill(path)
        assert snapshot(path) == snapshot(tmp_path / "wanted")

    @pytest.mark.parametrize("name", ["run.json", "requests.parquet", "manifest.json"])
    def test_at_the_beginning_and_the_end(self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
        write_bytes = Path.write_bytes

        def full(path: Path, data: bytes) -> int:
            if path.name.endswith(name):
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return write_bytes(path, data)

        fill(tmp_path / "wanted")
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(CoverageLabError, match="the disk is full"):
            fill(tmp_path / "trace")
        monkeypatch.undo()
        fill(tmp_path / "trace")
        assert snapshot(tmp_path / "trace") == snapshot(tmp_path / "wanted")
