"""Lengths of page lists: drawn ones by what they promise, those of a trace by plain NumPy."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from coverage_lab.bench import lengths
from coverage_lab.errors import CoverageLabError
from coverage_lab.policies.policy import parse_policy
from coverage_lab.trace import Trace
from coverage_lab.trace.schema import share_column

GAMMA = 0.9


def spread(counts: np.ndarray) -> float:
    return float(counts.std() / counts.mean())


class TestDrawn:
    # A call takes a tenth of a second.
    @settings(max_examples=40)
    @given(
        rows=st.integers(1, 80),
        pages=st.integers(1, 300),
        kept=st.floats(0.001, 1),
        cv=st.floats(0, 2.5),
        seed=st.integers(0, 5),
    )
    def test_they_are_what_was_asked_for_or_there_are_none(
        self, rows: int, pages: int, kept: float, cv: float, seed: int
    ):
        least = min(2, pages)
        try:
            found = lengths.drawn(rows, pages, kept, cv, seed)
        except lengths.NoSuchLists:
            assert cv > 0.01  # even lists can always be had
            return
        assert found.shape == (rows,)
        assert found.dtype == np.int64
        assert found.min() >= least
        assert found.max() <= pages
        # The total is that of the fraction, unless no list can be so short, whatever the spread.
        assert found.sum() == max(round(kept * rows * pages), rows * least)
        assert spread(found) == pytest.approx(cv, abs=0.01 + 0.5 / found.mean())

    @pytest.mark.parametrize("cv", [0, 0.25, 0.5, 0.75, 1.0, 1.2])
    @pytest.mark.parametrize("pages", [128, 2048])
    def test_the_spreads_of_the_paper_can_be_had(self, pages: int, cv: float):
        found = lengths.drawn(64, pages, 0.22, cv, 0)
        assert found.sum() == round(0.22 * 64 * pages)
        assert spread(found) == pytest.approx(cv, abs=0.02)

    def test_at_no_spread_lists_differ_by_a_page_at_most(self):
        found = lengths.drawn(40, 100, 0.223, 0, 0)
        assert set(found.tolist()) == {22, 23}
        assert found.sum() == 892

    def test_the_seed_decides_the_order_and_nothing_else(self):
        one, again, other = (lengths.drawn(64, 128, 0.22, 0.75, seed) for seed in (3, 3, 4))
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)
        assert np.array_equal(np.sort(one), np.sort(other))
        assert not np.array_equal(one, np.sort(one))

    def test_every_page_kept_leaves_no_choice(self):
        assert lengths.drawn(5, 7, 1.0, 0, 0).tolist() == [7] * 5
        assert lengths.drawn(5, 1, 0.1, 0, 0).tolist() == [1] * 5
        assert lengths.drawn(5, 100, 0.001, 0, 0).tolist() == [2] * 5

    @pytest.mark.parametrize(
        ("kept", "cv", "reached"),
        # Full lists can't differ, nor can a single one; 22% of the pages in some full lists and many of two.
        [(1.0, 0.5, "0.00"), (0.22, 2.5, r"1\.\d\d")],
    )
    def test_a_spread_that_cannot_be_is_refused_with_the_one_that_can(
        self, kept: float, cv: float, reached: str
    ):
        with pytest.raises(lengths.NoSuchLists, match=f"64 lists of 2 to 512 pages .* reach {reached}"):
            lengths.drawn(64, 512, kept, cv, 0)
        with pytest.raises(lengths.NoSuchLists):
            lengths.drawn(1, 512, 0.5, 0.5, 0)

    @pytest.mark.parametrize(
        ("kept", "cv", "message"),
        [
            (0, 0.5, "kept fraction 0 is not in"),
            (-0.1, 0.5, "kept fraction"),
            (2, 0.5, "kept fraction 2 is not in"),
            (float("nan"), 0.5, "kept fraction nan"),
            (0.5, -0.1, "CV -0.1 is not a number"),
            (0.5, float("nan"), "CV nan is not a number"),
        ],
    )
    def test_numbers_that_mean_nothing(self, kept: float, cv: float, message: str):
        with pytest.raises(CoverageLabError, match=message) as error:
            lengths.drawn(8, 100, kept, cv, 0)
        # `bench attend` skips a spread that can't be, and must not skip a slip of the pen.
        assert not isinstance(error.value, lengths.NoSuchLists)


SHAPE = synthetic.Shape(
    requests=3, layers=3, kv_heads=2, steps=(5, 1, 7), pages=(3, 20), share_dtype="float32", seed=6
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(synthetic.write(tmp_path_factory.mktemp("lengths") / "t", SHAPE))


def coverage_count(shares: np.ndarray, gamma: float) -> int:
    """Return the pages that the coverage rule keeps: sink and current page, then the largest."""
    forced = {0, len(shares) - 1}
    need, have, kept = gamma * shares.sum(), sum(shares[page] for page in forced), len(forced)
    others = sorted((share for page, share in enumerate(shares) if page not in forced), reverse=True)
    for share in others:
        if have >= need:
            break
        have, kept = have + share, kept + 1
    return kept


def by_numpy(trace: Trace, estimator: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for every request pages kept and pages, `[layers, KV heads, steps]`, from its Parquet file."""
    found = []
    for shard in trace.shards:
        frame = pl.read_parquet(shard.path)
        size = [frame[name].max() + 1 for name in ("layer", "kv_head", "step")]
        kept, pages = np.zeros(size, int), np.zeros(size, int)
        for line in frame.iter_rows(named=True):
            place = line["layer"], line["kv_head"], line["step"]
            shares = np.array(line[share_column(estimator)])
            kept[place], pages[place] = coverage_count(shares, GAMMA), len(shares)
        found.append((kept, pages))
    return found


@pytest.mark.parametrize("estimator", ["exact", "mvar"])
class TestOfTrace:
    @pytest.mark.parametrize("elements", [1 << 18, 1])  # a block of all layers, a block a layer
    def test_kept_fractions(
        self, monkeypatch: pytest.MonkeyPatch, trace: Trace, estimator: str, elements: int
    ):
        blocks_of(monkeypatch, elements)
        found = lengths.kept_fractions(trace, parse_policy(f"{estimator}/coverage:{GAMMA}"))
        wanted = by_numpy(trace, estimator)
        assert [part.shape for part in found] == [(3, 2, 5), (3, 2, 1), (3, 2, 7)]
        for part, (kept, pages) in zip(found, wanted, strict=True):
            assert part == pytest.approx(kept / pages)

    def test_lists_of_another_context(self, trace: Trace, estimator: str):
        policy = parse_policy(f"{estimator}/coverage:{GAMMA}")
        found = lengths.of_trace(trace, policy, batch=20, kv_heads=2, pages=500, seed=1)
        assert found.shape == (20, 2)
        assert found.dtype == np.int64
        # Each request of the batch has the fractions of all heads of one (request, layer, step).
        pairs = {
            tuple(np.rint(500 * kept[layer, :, step] / pages[layer, :, step]).astype(int))
            for kept, pages in by_numpy(trace, estimator)
            for layer in range(3)
            for step in range(kept.shape[2])
        }
        drawn = {tuple(row) for row in found.tolist()}
        assert drawn <= pairs
        # 39 are there; 20 draws of 3 requests x 3 layers alone would give 9 at most.
        assert len(drawn) > 9

    def test_further_heads_come_from_the_following_layers(self, trace: Trace, estimator: str):
        policy = parse_policy(f"{estimator}/coverage:{GAMMA}")
        found = lengths.of_trace(trace, policy, batch=20, kv_heads=5, pages=500, seed=1)
        rows = {
            tuple(np.rint(500 * np.roll(share[..., step], -layer, 0).ravel()[:5]).astype(int))
            for share in (kept / pages for kept, pages in by_numpy(trace, estimator))
            for layer in range(3)
            for step in range(share.shape[2])
        }
        assert {tuple(row) for row in found.tolist()} <= rows

    def test_the_seed_decides(self, trace: Trace, estimator: str):
        policy = parse_policy(f"{estimator}/coverage:{GAMMA}")
        one, again, other = (lengths.of_trace(trace, policy, 8, 2, 100, seed) for seed in (0, 0, 1))
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)

    def test_no_list_is_shorter_than_sink_and_current_page(self, trace: Trace, estimator: str):
        policy = parse_policy(f"{estimator}/coverage:0.1")
        assert lengths.of_trace(trace, policy, 30, 2, 3, 0).min() == 2
        assert (lengths.of_trace(trace, policy, 30, 2, 1, 0) == 1).all()


def blocks_of(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Have a trace read in blocks of at most this size."""
    spans = Trace.spans
    monkeypatch.setattr(Trace, "spans", lambda self, columns: spans(self, columns, elements))


def test_shares_that_were_not_recorded_are_named(tmp_path: Path) -> None:
    counts = Trace(synthetic.write(tmp_path / "t", synthetic.Shape(requests=1, record="counts")))
    with pytest.raises(CoverageLabError, match="--record shares"):
        lengths.kept_fractions(counts, parse_policy("mvar/coverage:0.9"))
