"""Page geometry: which pages a row has, and which of them are always kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import Rows, check_page_size, page_range

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows_of(n_pages: list[int], first_page: list[int], device: str = "cpu") -> Rows:
    count = len(n_pages)
    return Rows(
        n_pages=torch.tensor(n_pages, device=device),
        first_page=torch.tensor(first_page, device=device),
        position=torch.arange(100, 100 + count, device=device),
        layer=torch.arange(count, device=device),
        kv_head=torch.arange(count, device=device) + 7,
        page_size=16,
    )


@pytest.mark.parametrize("size", [2**k for k in range(11)])
def test_powers_of_two_are_page_sizes(size: int) -> None:
    assert check_page_size(size) == size


@pytest.mark.parametrize("size", [0, -1, -64, 3, 63, 96, 1000, 1025, 2048])
def test_other_page_sizes_are_refused(size: int) -> None:
    with pytest.raises(CoverageLabError, match=f"page size {size} .*try 64"):
        check_page_size(size)


@given(
    position=st.integers(0, 500),
    size=st.sampled_from([1, 2, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 600)),
)
def test_page_range_is_the_pages_of_the_visible_tokens(position: int, size: int, window: int | None) -> None:
    visible = range(position + 1) if window is None else range(max(0, position - window + 1), position + 1)
    pages = sorted({token // size for token in visible})
    first, count = page_range(position, size, window)
    assert list(range(first, first + count)) == pages


@pytest.mark.parametrize(
    ("position", "window", "expected"),
    [
        (0, None, (0, 1)),
        (63, None, (0, 1)),
        (64, None, (0, 2)),
        (127, 64, (1, 1)),
        (128, 64, (1, 2)),
        (126, 64, (0, 2)),
        (1000, 1, (15, 1)),
    ],
)
def test_page_range_by_hand(position: int, window: int | None, expected: tuple[int, int]) -> None:
    assert page_range(position, 64, window) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_rows(device: str) -> None:
    rows = rows_of([3, 1, 4, 1], [0, 0, 2, 5], device)
    assert len(rows) == 4
    true, false = True, False
    assert rows.valid(4).tolist() == [
        [true, true, true, false],
        [true, false, false, false],
        [true, true, true, true],
        [true, false, false, false],
    ]
    # The sink and the current page; where a window has left the sink behind, the current page alone.
    assert rows.forced(4).tolist() == [
        [true, false, true, false],
        [true, false, false, false],
        [false, false, false, true],
        [true, false, false, false],
    ]
    assert rows.n_forced().tolist() == [2, 1, 1, 1]
    assert rows.n_forced().tolist() == rows.forced(4).sum(1).tolist()


@pytest.mark.parametrize("sink", [0, 1, 2, 3, 9])
def test_forced_pages_of_any_sink(sink: int) -> None:
    rows = rows_of([3, 1, 4, 1, 5], [0, 0, 2, 3, 1])
    forced = rows.forced(6, sink)
    for row, (pages, first) in enumerate([(3, 0), (1, 0), (4, 2), (1, 3), (5, 1)]):
        kept = {page for page in range(pages) if first + page < sink} | {pages - 1}
        assert set(forced[row].nonzero()[:, 0].tolist()) == kept
    assert rows.n_forced(sink).tolist() == forced.sum(1).tolist()
    for part in (range(0, 2), range(2, 6), range(4, 4)):
        assert torch.equal(rows.forced(part, sink), forced[:, part.start : part.stop])
        assert torch.equal(rows.valid(part), rows.valid(6)[:, part.start : part.stop])


def grid(layers: int, heads: int, steps: int) -> Rows:
    layer, head, step = torch.meshgrid(*map(torch.arange, (layers, heads, steps)), indexing="ij")
    flat = layer.flatten()
    return Rows(
        n_pages=torch.full_like(flat, 100),
        first_page=torch.zeros_like(flat),
        position=step.flatten() + 6000,
        layer=flat,
        kv_head=head.flatten(),
        page_size=64,
    )


@pytest.mark.parametrize("shape", [(30, 3, 24), (32, 8, 64), (1, 1, 200), (32, 8, 1)], ids=str)
@pytest.mark.parametrize("count", [2.0, 2.1, 2.5, 2.995])
def test_dithered_counts_have_the_mean_asked_for(shape: tuple[int, int, int], count: float) -> None:
    dither = grid(*shape).dither()
    assert bool(((dither >= 0) & (dither < 1)).all())
    whole = (count + dither).floor()
    assert set(whole.tolist()) <= {2.0, 3.0}
    assert whole.mean().item() == pytest.approx(count, abs=3 / len(dither) ** 0.75)


def test_dither_differs_between_neighbours() -> None:
    dither = grid(4, 4, 4).dither().view(4, 4, 4)
    for axis in range(3):
        assert (dither.diff(dim=axis).abs() > 0.1).all()
