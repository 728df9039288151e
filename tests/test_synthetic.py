"""Synthetic traces are traces: the tests and benchmarks that read them rest on it."""

from pathlib import Path

import plain
import polars as pl
import pytest
import synthetic
import torch

from coverage_lab.collectors.rows import RowFormat, layer_rows
from coverage_lab.trace import Trace

SHAPE = synthetic.Shape(
    requests=3, layers=2, kv_heads=2, group=3, steps=(4, 7), pages=(1, 6), page_size=8, windows={1: 20}
)


def shape(**changes: object) -> synthetic.Shape:
    return synthetic.Shape(**{**vars(SHAPE), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("record", ["shares", "counts", "query-heads"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_have_the_columns_of_recorded_ones(record: str, dtype: str) -> None:
    _, _, rows = synthetic.draw_request(shape(record=record, share_dtype=dtype), 0)
    form = RowFormat(8, SHAPE.estimators, SHAPE.gammas, record, dtype)  # type: ignore[arg-type]
    recorded = layer_rows(form, "r", 0, [torch.zeros(2, 2, 3, 3)] * 2, 20, 0, None)
    assert dict(rows.schema) == dict(recorded.schema)


def test_it_is_read_as_a_trace(tmp_path: Path) -> None:
    trace = Trace(synthetic.write(tmp_path / "t", SHAPE))
    trace.verify()
    assert trace.requests["steps"].to_list() == [4, 7, 4]
    rows = plain.rows_of(trace)
    assert len(rows) == (4 + 7 + 4) * 4
    for row in rows:
        start = 0 if row.layer == 0 else max(0, row.position - 19) // 8
        assert (row.first_page, row.n_pages) == (start, row.position // 8 + 1 - start)
        assert len(row.shares["share"]) == len(row.shares["share_mvar"]) == row.n_pages
        assert sum(row.shares["share"]) == pytest.approx(1, abs=2e-3)
    order = [(row.request, row.layer, row.kv_head, row.step) for row in rows]
    assert order == sorted(order)


def test_counts_are_those_of_the_oracle(tmp_path: Path) -> None:
    trace = Trace(synthetic.write(tmp_path / "t", shape(share_dtype="float32")))
    for row in plain.rows_of(trace):
        for gamma in SHAPE.gammas:
            best = plain.oracle(row.shares["share"], gamma)
            assert row.recorded[f"oracle_pages_{gamma:g}"] == len(best)


def test_estimates_know_the_sink_and_the_current_page(tmp_path: Path) -> None:
    _, _, rows = synthetic.draw_request(shape(layers=1, windows={}), 1)
    ratio = rows.filter(pl.col("n_pages") > 3).select(
        first=pl.col("share_mvar").list.first() / pl.col("share").list.first(),
        last=pl.col("share_mvar").list.last() / pl.col("share").list.last(),
    )
    # Exact log masses, the same normalisation: both pages are off by one factor.
    assert ratio["first"].to_numpy() == pytest.approx(ratio["last"].to_numpy(), rel=0.02)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = [
        {file["path"]: file["sha256"] for file in Trace(path).manifest["files"]}
        for path in (
            synthetic.write(tmp_path / "a", SHAPE),
            synthetic.write(tmp_path / "b", SHAPE),
            synthetic.write(tmp_path / "c", shape(seed=1)),
        )
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--rows 100 --pages 9 --layers 2 --kv-heads 2 --steps 5 --estimators quest,exact --page-size 16"
    synthetic.main([str(tmp_path / "t"), *options.split()])
    trace = Trace(tmp_path / "t")
    assert sum(shard.rows for shard in trace.shards) == 100
    assert trace.estimators == ["exact", "quest"]
    assert {row.n_pages for row in plain.rows_of(trace)} == {9}
    assert "100 rows" in capsys.readouterr().out
