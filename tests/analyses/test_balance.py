"""How kernels divide page lists: what every scheme must hold, plain loops, and by hand."""

import math
from collections.abc import Iterator
from fractions import Fraction

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from coverage_lab.analyses import balance
from coverage_lab.analyses.balance import SCHEMES, Blocks, Gpu

mpl.use("Agg")

COUNTS = st.lists(st.integers(1, 600), min_size=1, max_size=60).map(np.array)
GPUS = st.builds(
    Gpu,
    multiprocessors=st.integers(1, 150),
    resident=st.integers(1, 3),
    page_size=st.sampled_from([16, 32, 64, 128]),
)
# What these read is what is selected.
EXACT = ("fa3", "flashinfer", "self-planning", "even")


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def blocks_of_rows(blocks: Blocks) -> dict[int, list[int]]:
    """Return the pages, selected or not, of every part of each row."""
    found: dict[int, list[int]] = {}
    for row, pages in zip(blocks.row.tolist(), (blocks.selected + blocks.padding).tolist(), strict=True):
        found.setdefault(row, []).append(pages)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@given(counts=COUNTS, gpu=GPUS)
def test_every_page_is_read_once(scheme: str, counts: np.ndarray, gpu: Gpu) -> None:
    blocks = SCHEMES[scheme].divide(counts, gpu)
    assert np.bincount(blocks.row, blocks.selected, len(counts)).tolist() == counts.tolist()
    assert (blocks.selected >= 0).all()
    assert (blocks.padding >= 0).all()
    assert not (scheme in EXACT and blocks.padding.any())
    assert (blocks.selected + blocks.padding > 0).all()
    # Blocks are numbered as they start, none left out.
    steps = np.diff(blocks.block)
    assert blocks.block[0] == 0
    assert set(steps.tolist()) <= ({0, 1} if scheme == "even" else {1})
    work = blocks.work()
    assert len(work) == blocks.block[-1] + 1
    assert work.sum() == blocks.selected.sum() + blocks.padding.sum()


class TestChunked:
    def test_the_example_of_the_paper(self) -> None:
        """J = 4 blocks a list, C = 2 pages a block at least: lists of 8, 3, 5 and 2 pages."""
        counts = np.array([8, 3, 5, 2])
        blocks = balance.chunked(counts, np.array([max(2, math.ceil(n / 4)) for n in counts]))
        assert blocks_of_rows(blocks) == {0: [2, 2, 2, 2], 1: [2, 1], 2: [2, 2, 1], 3: [2]}
        assert np.bincount(blocks.row).tolist() == [4, 2, 3, 1]

    def test_what_is_read_beyond_the_list_is_padding(self) -> None:
        blocks = balance.chunked(np.array([5, 2]), np.array([4, 3]), np.array([9, 3]))
        assert blocks.row.tolist() == [0, 0, 0, 1]
        assert blocks.selected.tolist() == [4, 1, 0, 2]
        assert blocks.padding.tolist() == [0, 3, 1, 1]


@given(
    read=st.lists(st.integers(1, 300), min_size=1, max_size=20).map(np.array),
    blocks=st.integers(1, 100),
    least=st.integers(1, 10),
)
def test_the_fitting_chunk_is_the_least(read: np.ndarray, blocks: int, least: int) -> None:
    def needed(chunk: int) -> int:
        return sum(math.ceil(pages / chunk) for pages in read.tolist())

    fitting = [chunk for chunk in range(least, max(least, read.max()) + 1) if needed(chunk) <= blocks]
    found = balance.fitting_chunk(read, blocks, least)
    assert set(found.tolist()) == {fitting[0] if fitting else max(least, read.max())}


class TestSchemes:
    @given(counts=COUNTS, gpu=GPUS)
    def test_the_rectangle_is_as_wide_as_the_longest(self, counts: np.ndarray, gpu: Gpu) -> None:
        rows = blocks_of_rows(balance.rectangular(counts, gpu))
        assert {sum(parts) for parts in rows.values()} == {counts.max()}
        assert len({tuple(parts) for parts in rows.values()}) == 1

    @given(counts=COUNTS, gpu=GPUS)
    def test_buckets_are_the_next_power_of_two_and_start_with_the_smallest(
        self, counts: np.ndarray, gpu: Gpu
    ) -> None:
        blocks = balance.buckets(counts, gpu)
        read = np.array([2 ** math.ceil(math.log2(n)) for n in counts.tolist()])
        assert np.bincount(blocks.row, blocks.selected + blocks.padding).tolist() == read.tolist()
        assert (np.diff(read[blocks.row]) >= 0).all()

    @given(counts=COUNTS, gpu=GPUS)
    def test_fa3_splits_as_a_plain_loop_does(self, counts: np.ndarray, gpu: Gpu) -> None:
        tile = max(1, 128 // gpu.page_size)
        tiles = [math.ceil(n / tile) for n in counts.tolist()]
        share = math.ceil(Fraction(11, 10) * sum(tiles) / gpu.multiprocessors)
        wanted = {}
        for row, pages in enumerate(counts.tolist()):
            splits = min(128, math.ceil(tiles[row] / share))
            chunk = tile * math.ceil(tiles[row] / splits)
            wanted[row] = [min(chunk, pages - first) for first in range(0, pages, chunk)]
        assert blocks_of_rows(balance.fa3_splits(counts, gpu)) == wanted

    def test_fa3_by_hand(self) -> None:
        """Pages of 64, so tiles of two: 50 + 5 + 1 tiles, a share of 56 * 1.1 / 10 -> 7."""
        rows = blocks_of_rows(balance.fa3_splits(np.array([100, 9, 1]), Gpu(multiprocessors=10)))
        # ceil(50 / 7) = 8 splits of 7 tiles each, 14 pages.
        assert rows == {0: [14] * 7 + [2], 1: [9], 2: [1]}

    @given(counts=COUNTS, gpu=GPUS)
    def test_flashinfers_blocks_all_run_at_once_where_they_can(self, counts: np.ndarray, gpu: Gpu) -> None:
        least = 128 // gpu.page_size
        rows = blocks_of_rows(balance.flashinfer_plan(counts, gpu))
        blocks, room = sum(map(len, rows.values())), 2 * gpu.multiprocessors
        if len(counts) > room:
            assert blocks == len(counts)  # a block a list, the fewest there are
            return
        assert blocks <= room
        chunk = max(parts[0] for parts in rows.values())
        if chunk > least:
            assert sum(math.ceil(n / (chunk - 1)) for n in counts.tolist()) > room

    @pytest.mark.parametrize(
        ("rows", "pages", "blocks"),
        [
            (256, 24, 1),  # 32 blocks a list, but no chunk of less than 24 pages
            (256, 25, 2),
            (256, 24 * 32, 32),
            (256, 24 * 32 + 1, 31),  # 32 blocks of 25 pages would do; 31 hold 769
            (16, 24 * 256, 256),  # few lists have 4096 / 16 blocks
            (16, 100, 5),
        ],
    )
    def test_self_planning_has_a_number_of_blocks_and_a_least_chunk(self, rows: int, pages: int, blocks: int):
        found = balance.self_planning(np.full(rows, pages), Gpu())
        assert np.bincount(found.row).tolist() == [blocks] * rows

    @given(counts=COUNTS, gpu=GPUS)
    def test_even_parts_are_even(self, counts: np.ndarray, gpu: Gpu) -> None:
        work = balance.even_split(counts, gpu).work()
        share = max(4, math.ceil(counts.sum() / gpu.slots))
        assert (work[:-1] == share).all()
        assert 0 < work[-1] <= share
        assert len(work) <= gpu.slots or share == 4

    def test_even_parts_go_over_the_ends_of_lists(self) -> None:
        blocks = balance.even_split(np.array([3, 9, 2, 2]), Gpu(multiprocessors=2))
        assert blocks.row.tolist() == [0, 1, 1, 1, 2, 3]
        assert blocks.block.tolist() == [0, 0, 1, 2, 3, 3]
        assert blocks.selected.tolist() == [3, 1, 4, 4, 2, 2]

    def test_some_kernels_leave_no_choice(self) -> None:
        gpu = Gpu(multiprocessors=10, resident=3)
        assert {name: scheme.slots(gpu) for name, scheme in SCHEMES.items()} == {
            **dict.fromkeys(SCHEMES, 30),
            "fa3": 10,
            "flashinfer": 20,
        }


class TestMakespan:
    @given(work=st.lists(st.integers(1, 50), max_size=40), slots=st.integers(1, 12))
    def test_it_is_that_of_a_clock(self, work: list[int], slots: int) -> None:
        """Tick by tick: idle slots take the next blocks, then all work on one page."""
        waiting, running, clock = list(work), [0] * slots, 0
        while True:
            running = [left or (waiting.pop(0) if waiting else 0) for left in running]
            if not any(running):
                break
            running = [max(0, left - 1) for left in running]
            clock += 1
        assert balance.makespan(work, slots) == clock

    def test_by_hand(self) -> None:
        assert balance.makespan([3, 1, 1, 4], 2) == 6  # 3 beside 1 + 1, then 4 where two ended at 2
        assert balance.makespan([4, 3, 1, 1], 2) == 5
        assert balance.makespan([], 5) == 0


class TestCompute:
    def test_a_line_a_scheme(self) -> None:
        table = balance.compute(np.array([[30, 20], [60, 90]]), Gpu(multiprocessors=2, resident=1))
        assert table["scheme"].to_list() == list(SCHEMES)
        assert table.filter("host")["scheme"].to_list() == ["buckets", "flashinfer"]
        lines = {line["scheme"]: line for line in table.to_dicts()}
        # A rectangle of 4 lists of 90 pages, which no chunk brings under 4 blocks, on 2 slots.
        assert lines["rectangular"] == {
            "scheme": "rectangular",
            "title": "rectangular grid",
            "host": False,
            "blocks": 4,
            "reads": pytest.approx(4 * 90 / 200),
            "most": 90,
            "over_even": pytest.approx(180 * 2 / 200),
        }
        assert lines["buckets"]["reads"] == pytest.approx((32 + 32 + 64 + 128) / 200)
        # 20 and 30 first (buckets of 32), then 64 and 128 where each ends.
        assert lines["buckets"]["over_even"] == pytest.approx((32 + 128) * 2 / 200)
        assert (lines["even"]["blocks"], lines["even"]["most"], lines["even"]["over_even"]) == (2, 100, 1.0)

    def test_fa3_is_timed_on_its_own_slots(self) -> None:
        """Blocks of one page: with one resident block a multiprocessor they take two rounds."""
        table = balance.compute(np.ones(8, int), Gpu(multiprocessors=4, resident=2))
        over = dict(table.select("scheme", "over_even").iter_rows())
        assert over["fa3"] == pytest.approx(2 * 4 / 8)
        assert over["flashinfer"] == pytest.approx(1 * 8 / 8)

    def test_an_even_split_of_many_pages_is_nearly_even(self) -> None:
        counts = np.random.default_rng(0).integers(2, 400, 128)
        over = dict(balance.compute(counts).select("scheme", "over_even").iter_rows())
        assert 1 <= over["even"] < 1.02
        assert over["even"] == min(over.values())


def segments(ax: Axes) -> dict[int, list[tuple[float, float, bool]]]:
    """Return bottom, height and whether it is padding of the segments of each bar."""
    found: dict[int, list[tuple[float, float, bool]]] = {}
    for patch in ax.patches:
        place = round(patch.get_x() + patch.get_width() / 2)
        red = patch.get_facecolor()[:3] == to_rgb("tab:red")
        found.setdefault(place, []).append((patch.get_y(), patch.get_height(), red))
    return found


class TestFigures:
    def test_a_segment_is_a_block_and_padding_is_red(self) -> None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots()
        gpu = Gpu(multiprocessors=3, resident=1)
        assert balance.plot(np.array([8, 2]), "rectangular", ax, gpu) is ax
        # Two lists of 8 pages on 3 slots: no chunk but the whole list fits; the shortest list first.
        assert segments(ax) == {0: [(0, 2, False), (2, 6, True)], 1: [(0, 8, False)]}
        assert ax.get_title() == "rectangular grid"
        _, ax = plt.subplots()
        balance.plot(np.array([8, 2]), "even", ax, gpu)
        # Parts of 4: the second list begins where the first one's last part ends.
        assert segments(ax) == {0: [(0, 2, False)], 1: [(0, 4, False), (4, 4, False)]}

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_bars_are_as_high_as_what_is_read(self, scheme: str) -> None:
        counts = np.random.default_rng(1).integers(2, 300, 40)
        ax = balance.plot(counts, scheme, bars=40)
        bars = segments(ax)
        blocks = SCHEMES[scheme].divide(counts, Gpu())
        order = np.argsort(counts, kind="stable")
        for place, row in enumerate(order):
            part = blocks.row == row
            drawn = {red: sum(h for _, h, which in bars[place] if which == red) for red in (False, True)}
            assert drawn == {False: counts[row], True: blocks.padding[part].sum()}
            for (bottom, height, _), (above, _, _) in zip(bars[place], bars[place][1:], strict=False):
                assert bottom + height == above

    def test_of_many_lists_some_are_drawn_the_ends_among_them(self) -> None:
        counts = np.arange(1, 101)
        bars = segments(balance.plot(counts, "fa3", bars=5))
        assert [sum(height for _, height, _ in bars[place]) for place in range(5)] == [1, 26, 51, 75, 100]

    def test_the_figure_has_every_scheme(self) -> None:
        figure = balance.figure(np.array([3, 50, 7]))
        figure.canvas.draw()
        assert [ax.get_title() for ax in figure.axes] == [scheme.title for scheme in SCHEMES.values()]
        assert all(ax.patches for ax in figure.axes)
