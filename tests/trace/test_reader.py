"""Reading a trace: padded blocks, and the one line that says what is wrong with one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import synthetic

from coverage_lab.errors import CoverageLabError
from coverage_lab.trace import Trace, schema
from coverage_lab.trace.writer import TraceWriter

LAYERS, KV_HEADS = 3, 2
STEPS = {"a": 4, "b": 1, "d": 3}  # c failed
RUN = {"page_size": 8, "gammas": [0.9, 0.95], "record": "shares", "estimators": ["exact", "mvar"]}
FACTS = {"geometry": {"layers": [{}] * LAYERS, "kv_heads": KV_HEADS}}


def rows(name: str) -> pl.DataFrame:
    """Return rows whose shares tell where they are from, with one to four pages."""
    lines = [
        {
            "request_id": name,
            "layer": layer,
            "kv_head": head,
            "step": step,
            "position": 8 * (layer + (layer + step) % 4) + 4 + step,
            "n_pages": 1 + (layer + step) % 4,
            "first_page": layer,
            "oracle_pages_0.9": 1,
            "log_total": layer + 0.5,
            "share": [layer + head / 8 + step / 64 + page / 512 for page in range(1 + (layer + step) % 4)],
        }
        for layer in range(LAYERS)
        for head in range(KV_HEADS)
        for step in range(STEPS[name])
    ]
    frame = pl.DataFrame(lines, schema_overrides={"share": pl.List(pl.Float32)})
    return frame.with_columns(share_mvar=pl.col("share").list.reverse())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    names = ["a", "b", "c", "d"]
    with TraceWriter(tmp_path / "trace", RUN) as writer:
        for name in names:
            line = {"request_id": name, "status": "failed" if name == "c" else "ok"}
            writer.write(line, None if name == "c" else rows(name))
        writer.finish(names, FACTS)
    return tmp_path / "trace"


def complaint(action: Callable[[], Any]) -> str:
    with pytest.raises(CoverageLabError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestBlocks:
    @pytest.mark.parametrize("elements", [1, 30, 1 << 20])
    def test_hold_all_rows_in_order(self, path: Path, elements: int):
        """Blocks of one layer, of some and of all hold the same rows."""
        blocks = list(Trace(path).blocks(["share", "share_mvar", "log_total"], elements))
        if elements == 1:
            assert [block.layers for block in blocks] == [1] * (3 * LAYERS)
        for request, name in enumerate(["a", "b", "d"]):
            mine = [block for block in blocks if block.request == request]
            assert sum(block.layers for block in mine) == LAYERS
            expected = rows(name)
            for column in ("layer", "kv_head", "step", "position", "n_pages", "first_page"):
                held = np.concatenate([block.columns[column] for block in mine])
                assert held.dtype == np.int64
                assert held.tolist() == expected[column].to_list()
            assert [x for block in mine for x in block.columns["log_total"]] == expected[
                "log_total"
            ].to_list()
            for column in ("share", "share_mvar"):
                lists = iter(expected[column].to_list())
                for block in mine:
                    assert (block.kv_heads, block.steps) == (KV_HEADS, STEPS[name])
                    matrix = block.columns[column]
                    assert matrix.dtype == np.float32
                    assert matrix.shape[1] == block.columns["n_pages"].max()
                    for row in matrix:
                        shares = next(lists)
                        np.testing.assert_array_equal(row[: len(shares)], np.float32(shares))
                        assert not row[len(shares) :].any()

    def test_scalars_alone(self, path: Path):
        (block, *_) = Trace(path).blocks(["oracle_pages_0.9"])
        assert set(block.columns) == {
            *("layer", "kv_head", "step", "position", "n_pages", "first_page", "oracle_pages_0.9")
        }

    def test_facts(self, path: Path):
        trace = Trace(path)
        assert (trace.page_size, trace.gammas, trace.estimators) == (8, [0.9, 0.95], ["exact", "mvar"])
        assert trace.geometry == FACTS["geometry"]
        assert trace.max_pages == 4
        assert [shard.request_id for shard in trace.shards] == ["a", "b", "d"]
        assert trace.requests["request_id"].to_list() == ["a", "b", "c", "d"]
        assert trace.scan().collect().equals(pl.concat([rows(name) for name in ("a", "b", "d")]))

    @pytest.mark.parametrize(
        ("column", "option"),
        [
            ("oracle_pages_0.5", "--gammas 0.5"),
            ("share_quest", "--estimators exact,mvar,quest"),
            ("share_q0", "--record query-heads"),
            ("share_mvar_q1", "--record query-heads"),
        ],
    )
    def test_missing_column(self, path: Path, column: str, option: str):
        assert complaint(lambda: next(Trace(path).blocks([column]))) == (
            f"{path} has no column {column!r}; collect it with {option}"
        )


class TestFaults:
    def test_no_directory(self, tmp_path: Path):
        assert complaint(lambda: Trace(tmp_path / "none")).startswith(
            f"no trace at {tmp_path}/none: no such directory"
        )
        (tmp_path / "file").write_text("")
        assert "it is a file" in complaint(lambda: Trace(tmp_path / "file"))

    def test_no_trace(self, tmp_path: Path):
        assert complaint(lambda: Trace(tmp_path)) == f"{tmp_path} is no trace: it has no manifest.json"
        (tmp_path / "rows").mkdir()
        assert complaint(lambda: Trace(tmp_path)) == (
            f"{tmp_path} is no trace: it has no manifest.json; restore it, or collect into another directory"
        )

    def test_unfinished(self, tmp_path: Path):
        with TraceWriter(tmp_path / "trace", RUN) as writer:
            writer.write({"request_id": "a", "status": "ok"}, rows("a"))
        assert complaint(lambda: Trace(tmp_path / "trace")) == (
            f"the trace {tmp_path}/trace is unfinished (requests done: 1); "
            "run the collect command it was begun with again"
        )

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00\x01", b'{"schema": "coverage-lab trace"'])
    def test_manifest_is_not_json(self, path: Path, content: bytes):
        (path / "manifest.json").write_bytes(content)
        assert complaint(lambda: Trace(path)).startswith(f"{path}/manifest.json is no valid JSON (")

    @pytest.mark.parametrize("content", ["[]", "7", "{}", '{"schema": "a web app", "files": []}'])
    def test_manifest_of_something_else(self, path: Path, content: str):
        (path / "manifest.json").write_text(content)
        assert complaint(lambda: Trace(path)) == f"{path} is no coverage-lab trace"

    @pytest.mark.parametrize("part", ["run", "geometry", "files"])
    def test_manifest_without_a_part(self, path: Path, part: str):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest[part]
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert complaint(lambda: Trace(path)) == f"{path}/manifest.json has no {part!r}; restore it"

    @pytest.mark.parametrize("version", [2, "1", None])
    def test_newer_schema(self, path: Path, version: Any):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": version}))
        assert complaint(lambda: Trace(path)) == (
            f"{path} has trace schema {version}; this coverage-lab reads up to 1: upgrade it"
        )

    @pytest.mark.parametrize("name", ["rows/b.parquet", "requests.parquet"])
    def test_missing_and_truncated_files(self, path: Path, name: str):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-1])
        assert complaint(lambda: Trace(path)) == (
            f"{path / name} has {len(data) - 1} bytes, not {len(data)}; "
            "restore it, or run the same collect command again"
        )
        (path / name).unlink()
        assert complaint(lambda: Trace(path)) == (
            f"{path / name} is missing; restore it, or run the same collect command again"
        )

    def test_altered_files_are_found_when_read(self, path: Path):
        for name in ("rows/b.parquet", "requests.parquet"):
            data = bytearray((path / name).read_bytes())
            data[len(data) // 2] ^= 1
            (path / name).write_bytes(data)
        altered = (
            f"{path}/rows/b.parquet was altered (its sha256 differs); "
            "restore it, or run the same collect command again"
        )
        assert complaint(Trace(path).scan) == altered
        assert "requests.parquet was altered" in complaint(lambda: Trace(path).requests)
        assert "requests.parquet was altered" in complaint(Trace(path).verify)
        read: list[int] = []

        def blocks() -> Iterator[None]:
            for block in Trace(path).blocks(["share"]):
                read.append(block.request)
                yield

        assert complaint(lambda: list(blocks())) == altered
        assert set(read) == {0}

    def test_no_rows(self, tmp_path: Path):
        with TraceWriter(tmp_path / "trace", RUN) as writer:
            writer.write({"request_id": "a", "status": "failed"})
            writer.finish(["a"], FACTS)
        trace = Trace(tmp_path / "trace")
        assert "no request was recorded" in complaint(lambda: trace.shards)
        assert len(trace.requests) == 1

    def test_gammas_that_look_alike_have_columns_of_their_own(self):
        gammas = (0.9, 0.99, 0.999999, 0.9999999, 1.0)
        assert len({schema.oracle_column(gamma) for gamma in gammas}) == len(gammas)
        assert schema.oracle_column(0.95) == "oracle_pages_0.95"
        assert schema.oracle_column(1.0) == "oracle_pages_1"


def test_some_requests_alone(tmp_path: Path) -> None:
    trace = Trace(synthetic.write(tmp_path / "t", synthetic.Shape(requests=4, pages=(3, 40), seed=2)))
    names = [shard.request_id for shard in trace.shards]
    part = trace.only({names[3], names[1]})
    assert [shard.request_id for shard in part.shards] == [names[1], names[3]]
    assert part.requests["request_id"].to_list() == [names[1], names[3]]
    assert set(part.scan().select("request_id").collect()["request_id"]) == {names[1], names[3]}
    assert part.max_pages == max(shard.max_pages for shard in (trace.shards[1], trace.shards[3]))
    assert [span.request for span in part.spans(["share"])] == [0, 1]
    assert len(trace.shards) == len(trace.requests) == 4


def test_the_first_steps_alone(tmp_path: Path) -> None:
    trace = Trace(synthetic.write(tmp_path / "t", synthetic.Shape(requests=2, steps=5, seed=2)))
    part = trace.only([shard.request_id for shard in trace.shards], steps=2)
    wanted = trace.scan().filter(pl.col("step") < 2).collect()
    assert part.scan().collect().equals(wanted)
    assert pl.concat(part.frames(["layer", "share"])).equals(wanted.select("layer", "share"))
    for elements in (1, 1 << 18):  # a layer at a time, and all of them
        blocks = list(part.blocks(["share"], elements))
        assert {block.steps for block in blocks} == {2}
        steps = np.concatenate([block.columns["step"] for block in blocks])
        assert steps.tolist() == wanted["step"].to_list()
    assert {block.steps for block in part.only([trace.shards[0].request_id]).blocks(["share"])} == {2}
    more = trace.only([shard.request_id for shard in trace.shards], steps=9)
    assert {block.steps for block in more.blocks(["share"])} == {5}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (8, "says pages of 8 tokens, and the rows have others"),
        ("x", "says 'x' for 'page_size'"),
        (None, "None"),
        (0, "says 0 for 'page_size'"),
    ],
)
def test_a_page_size_that_is_not_that_of_the_rows(tmp_path: Path, size: Any, message: str) -> None:
    path = synthetic.write(tmp_path / "t", synthetic.Shape(requests=1))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["run"]["page_size"] not in (size, 8)
    manifest["run"]["page_size"] = size
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CoverageLabError, match=message):
        Trace(path)
