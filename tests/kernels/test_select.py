"""The coverage rule: by sorting, by bisection, and by its definition."""

from fractions import Fraction

import numpy as np
import plain
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.select.reference import (
    MAX_WIDTH,
    ONE,
    coverage_bisection,
    coverage_counts,
    fixed_counts,
    fixed_point,
    oracle_counts,
    rank,
    take,
    thresholds_of,
)
from coverage_lab.pages import Rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
THRESHOLDS = [2, 4, 8, 16, 64]
NAN = float("nan")
PART = 2.0**-30


def rows_of(n_pages: list[int], first_page: list[int] | None = None, device: str = "cpu") -> Rows:
    count = len(n_pages)
    return Rows(
        n_pages=torch.tensor(n_pages, device=device),
        first_page=torch.tensor(first_page or [0] * count, device=device),
        position=torch.arange(count, device=device),
        layer=torch.zeros(count, dtype=torch.long, device=device),
        kv_head=torch.zeros(count, dtype=torch.long, device=device),
        page_size=64,
    )


def block(
    lists: list[list[float]], first_page: list[int] | None = None, device: str = "cpu", padding: float = 0.0
) -> tuple[Tensor, Rows]:
    """Return ragged lists as one padded matrix and its geometry."""
    width = max(map(len, lists))
    padded = [[*shares, *[padding] * (width - len(shares))] for shares in lists]
    return torch.tensor(padded, device=device), rows_of([len(shares) for shares in lists], first_page, device)


def pages(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def by_sorting(shares: Tensor, rows: Rows, gamma: float) -> Tensor:
    ranking = rank(shares, rows)
    gammas = torch.tensor([gamma], dtype=torch.float64, device=shares.device)
    return take(ranking, coverage_counts(ranking, gammas)[:, 0])


def units(shares: list[float]) -> list[int]:
    """Return shares in units of 2**-30, NaN as zero."""
    return [0 if share != share else round(Fraction(share) * 2**30) for share in shares]


def in_float32(shares: np.ndarray) -> list[float]:
    return np.float32(shares).tolist()


def normal(values: list[float]) -> list[float]:
    return in_float32(np.array(values) / sum(values))


def spread(seed: int, n_pages: int, sigma: float) -> list[float]:
    return normal(np.random.default_rng(seed).lognormal(0, sigma, n_pages).tolist())


seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 70)
SHARES = {
    "lognormal": st.builds(spread, seeds, sizes, st.sampled_from([0.1, 1.0, 3.0, 8.0])),
    "few values, many ties": st.lists(st.integers(1, 3), min_size=1, max_size=40).map(normal),
    "all equal": sizes.map(lambda n: normal([1.0] * n)),
    "zeros": st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=1, max_size=40).map(
        lambda values: normal([*values, 1.0])
    ),
    "tiny": st.lists(st.floats(1e-12, 3e-9), min_size=1, max_size=40).map(
        lambda values: in_float32(np.array([*values, 1 - sum(values)]))
    ),
    "one dominant": st.tuples(st.lists(st.floats(1e-7, 1e-4), max_size=40), st.integers(0, 40)).map(
        lambda drawn: normal([*drawn[0][: drawn[1]], 1e3, *drawn[0][drawn[1] :]])
    ),
    "float16": st.builds(spread, seeds, sizes, st.floats(0.1, 6)).map(
        lambda shares: np.float16(shares).tolist()
    ),
    "NaN": st.lists(st.sampled_from([NAN, 0.1, 0.2, 0.3]), min_size=1, max_size=20),
    "all NaN": sizes.map(lambda n: [NAN] * n),
}
any_shares = st.one_of(*SHARES.values())
any_gamma = st.one_of(
    st.floats(1e-6, 1.0), st.sampled_from([0.5, 0.9, 0.95, 0.98, 0.99, 1 - 1e-9, 1.0, 1e-6])
)
any_block = st.lists(st.tuples(any_shares, st.integers(0, 2)), min_size=1, max_size=4)

EXAMPLE = [0.70, 0.20, 0.08, 0.02]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("gamma", "count"), [(0.9, 2), (0.98, 3), (0.65, 1), (1.0, 4)])
def test_the_papers_example(device: str, dtype: torch.dtype, gamma: float, count: int) -> None:
    # Rounding to half precision moves 0.70 + 0.20 by up to 1e-3 to either side of 0.9.
    gamma -= 0.004 if dtype in (torch.float16, torch.bfloat16) and gamma < 1 else 0
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        shares = torch.tensor([[EXAMPLE[i] for i in order]], dtype=dtype, device=device)
        gammas = torch.tensor([gamma], dtype=torch.float64, device=device)
        assert oracle_counts(shares, rows_of([4], device=device), gammas).tolist() == [[count]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shares", "gamma", "kept"),
    [
        pytest.param([0.70, 0.08, 0.02, 0.20], 0.9, {0, 3}, id="the forced pages are enough"),
        pytest.param([0.70, 0.08, 0.02, 0.20], 0.98, {0, 1, 3}, id="forced pages count toward gamma"),
        pytest.param([0.02, 0.70, 0.20, 0.08], 0.9, {0, 1, 2, 3}, id="small forced pages are not enough"),
        pytest.param([0.125, 0.5, 0.25, 0.125], 0.75, {0, 1, 3}, id="exactly gamma is enough"),
        pytest.param([0.125, 0.5, 0.25, 0.125], 0.750001, {0, 1, 2, 3}, id="a hair above gamma is not"),
        pytest.param([0.1, 0.2, 0.2, 0.2, 0.2, 0.1], 0.6, {0, 1, 2, 5}, id="ties by lower page"),
        pytest.param([0.1, 0.2, 0.2, 0.2, 0.2, 0.1], 0.601, {0, 1, 2, 3, 5}, id="a hair more"),
        pytest.param([0.5, 0.5], 0.1, {0, 1}, id="two pages are both forced"),
        pytest.param([1.0], 0.5, {0}, id="the sink is the current page, counted once"),
        pytest.param([0.0, 0.0, 1.0, 0.0, 0.0], 0.5, {0, 2, 4}, id="one page has everything"),
        # Ten parts in all: 5 parts are less than 5.4.
        pytest.param([0.0, 5 * PART, 3 * PART, 2 * PART, 0.0], 0.54, {0, 1, 2, 4}, id="a part short"),
        pytest.param([0.0, 5 * PART, 3 * PART, 2 * PART, 0.0], 0.5, {0, 1, 4}, id="not a part short"),
        pytest.param([0.4, 0.3, 0.0, 0.3], 1.0, {0, 1, 2, 3}, id="gamma 1 keeps pages without mass"),
    ],
)
def test_known_sets(device: str, shares: list[float], gamma: float, kept: set[int]) -> None:
    matrix = torch.tensor([shares], dtype=torch.float64, device=device)
    rows = rows_of([len(shares)], device=device)
    assert pages(by_sorting(matrix, rows, gamma)) == [kept]
    for thresholds in THRESHOLDS:
        assert pages(coverage_bisection(matrix, rows, gamma, thresholds)) == [kept]


def test_a_sliding_window_has_no_sink() -> None:
    shares, rows = block([[0.01, 0.9, 0.09]], first_page=[5])
    assert pages(by_sorting(shares, rows, 0.9)) == [{1, 2}]
    assert pages(coverage_bisection(shares, rows, 0.9)) == [{1, 2}]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100)
@given(drawn=any_block, gamma=any_gamma, padding=st.sampled_from([0.0, 0.7, NAN]))
@example(drawn=[([0.5, 0.25, 0.25], 0), ([NAN, NAN], 0), ([1.0], 1)], gamma=0.75, padding=NAN)
@example(drawn=[(normal([1.0] * 5), 0)], gamma=0.4, padding=0.0)
def test_sorting_keeps_the_set_of_the_definition(
    device: str, drawn: list[tuple[list[float], int]], gamma: float, padding: float
) -> None:
    lists, first = [shares for shares, _ in drawn], [page for _, page in drawn]
    shares, rows = block(lists, first, device, padding)
    before = shares.clone()
    kept = pages(by_sorting(shares, rows, gamma))
    torch.testing.assert_close(shares, before, rtol=0, atol=0, equal_nan=True)
    for row, chosen, page in zip(lists, kept, first, strict=True):
        assert chosen == expected(row, gamma, page)


def expected(shares: list[float], gamma: float, first_page: int) -> set[int]:
    """Return the set of Eq. 3 on shares in fixed point."""
    return plain.coverage(units(shares), gamma, first_page)


@settings(max_examples=100)
@given(shares=any_shares, gamma=st.floats(1e-6, 1 - 1e-9), first_page=st.integers(0, 1))
def test_the_set_covers_gamma_and_none_of_it_can_go(
    shares: list[float], gamma: float, first_page: int
) -> None:
    matrix, rows = block([shares], [first_page])
    (kept,) = pages(by_sorting(matrix, rows, gamma))
    clean = [0.0 if share != share else share for share in shares]
    total, slack = sum(clean), len(shares) * 2**-30
    assert plain.forced(len(shares), first_page) <= kept <= set(range(len(shares)))
    covered = sum(clean[page] for page in kept)
    assert covered >= gamma * total - slack
    on_merit = kept - plain.forced(len(shares), first_page)
    if on_merit:
        assert covered - min(clean[page] for page in on_merit) < gamma * total + slack
        left = [clean[page] for page in set(range(len(shares))) - kept]
        assert min(clean[page] for page in on_merit) >= max(left, default=0) - 2**-30


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("thresholds", THRESHOLDS)
@settings(max_examples=50)
@given(drawn=any_block, gamma=any_gamma, padding=st.sampled_from([0.0, 0.7, NAN]))
def test_bisection_keeps_the_set_of_sorting(
    device: str, thresholds: int, drawn: list[tuple[list[float], int]], gamma: float, padding: float
) -> None:
    shares, rows = block([s for s, _ in drawn], [page for _, page in drawn], device, padding)
    assert pages(coverage_bisection(shares, rows, gamma, thresholds)) == pages(
        by_sorting(shares, rows, gamma)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["lognormal", "equal", "float16", "halving"])
def test_long_rows(device: str, kind: str, gamma: float) -> None:
    n_pages = 16_384
    shares = {
        "lognormal": spread(0, n_pages, 2.0),
        "equal": [1 / n_pages] * n_pages,
        "float16": np.float16(spread(1, n_pages, 3.0)).tolist(),
        "halving": [2.0**-k for k in range(1, n_pages + 1)],
    }[kind]
    matrix, rows = block([shares], device=device)
    (kept,) = pages(by_sorting(matrix, rows, gamma))
    assert kept == expected(shares, gamma, 0)
    for thresholds in (2, 8):
        assert pages(coverage_bisection(matrix, rows, gamma, thresholds)) == [kept]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60)
@given(lists=st.lists(any_shares, min_size=1, max_size=4), gammas=st.lists(any_gamma, min_size=1, max_size=9))
def test_many_gammas_at_once_equal_one_by_one(
    device: str, lists: list[list[float]], gammas: list[float]
) -> None:
    shares, rows = block(lists, device=device)
    ranking = rank(shares, rows)
    values = torch.tensor(gammas, dtype=torch.float64, device=device)
    together = coverage_counts(ranking, values)
    assert together.shape == (len(lists), len(gammas))
    for column in range(len(gammas)):
        alone = coverage_counts(ranking, values[column : column + 1])
        assert together[:, column].tolist() == alone[:, 0].tolist()
    order = values.argsort()
    assert bool((together[:, order].diff(dim=1) >= 0).all())


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100)
@given(lists=st.lists(any_shares, min_size=1, max_size=4), gamma=any_gamma)
def test_oracle_counts_are_the_fewest_pages(device: str, lists: list[list[float]], gamma: float) -> None:
    shares, rows = block(lists, device=device, padding=0.3)
    counts = oracle_counts(shares, rows, torch.tensor([gamma], dtype=torch.float64, device=device))[:, 0]
    for row, count in zip(lists, counts.tolist(), strict=True):
        assert count == len(plain.oracle(units(row), gamma))


def test_no_set_with_fewer_pages_covers_gamma() -> None:
    # All subsets of small rows, so that this does not rest on the greedy order.
    for seed in range(6):
        shares = np.float16(spread(seed, 7, 1.5)).tolist()
        sums = {
            subset: sum(units(shares)[page] for page in range(7) if subset >> page & 1)
            for subset in range(2**7)
        }
        matrix, rows = block([shares])
        for gamma in (0.3, 0.6, 0.9, 0.99):
            fewest = min(
                subset.bit_count() for subset, mass in sums.items() if mass >= gamma * sum(units(shares))
            )
            gammas = torch.tensor([gamma], dtype=torch.float64)
            assert oracle_counts(matrix, rows, gammas).item() == fewest


@pytest.mark.parametrize("device", DEVICES)
def test_ranking(device: str) -> None:
    shares, rows = block([[0.1, 0.3, 0.3, 0.2, 0.1], [0.9, 0.1]], device=device, padding=5.0)
    ranking = rank(shares, rows)
    assert ranking.order.tolist() == [[0, 4, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert ranking.n_forced.tolist() == [2, 2]
    torch.testing.assert_close(
        ranking.mass.double().cpu() / ONE,
        torch.tensor([[0.1, 0.1, 0.3, 0.3, 0.2], [0.9, 0.1, 0, 0, 0]], dtype=torch.float64),
        rtol=0,
        atol=1e-7,
    )
    assert ranking.covered.tolist() == ranking.mass.cumsum(1).tolist()
    free = rank(shares, rows, sink=None)
    assert free.order.tolist() == [[1, 2, 3, 0, 4], [0, 1, 2, 3, 4]]
    assert free.n_forced.tolist() == [0, 0]


def test_pages_beyond_the_row_are_not_forced() -> None:
    shares, rows = block([[0.5, 0.5], [0.25] * 4])
    ranking = rank(shares, rows, sink=3)
    assert ranking.n_forced.tolist() == [2, 4]
    assert pages(take(ranking, torch.tensor([2, 1]))) == [{0, 1}, {0}]


@pytest.mark.parametrize("device", DEVICES)
def test_take_keeps_the_first_ranked_pages(device: str) -> None:
    shares, rows = block([[0.1, 0.2, 0.4, 0.2, 0.1]] * 4, device=device)
    mask = take(rank(shares, rows), torch.tensor([2, 3, 4, 5], device=device))
    assert pages(mask) == [{0, 4}, {0, 2, 4}, {0, 1, 2, 4}, {0, 1, 2, 3, 4}]


@pytest.mark.parametrize("device", DEVICES)
def test_fixed_point(device: str) -> None:
    shares = torch.tensor(
        [0.0, 1.0, 0.5, 2.0**-30, 2.0**-31, 3 * 2.0**-31, NAN, -1.0, 2.0], dtype=torch.float64, device=device
    )
    # Halves go to the even neighbour; NaN is no share; values outside [0, 1] are clamped.
    assert fixed_point(shares).tolist() == [0, ONE, ONE // 2, 1, 0, 2, 0, 0, ONE]


@pytest.mark.parametrize("device", DEVICES)
def test_shares_too_large_for_an_integer_are_clamped(device: str) -> None:
    shares = torch.tensor([float("inf"), 1e300, 1e10, float("-inf")], dtype=torch.float64, device=device)
    assert fixed_point(shares).tolist() == [ONE, ONE, ONE, 0]


def test_float16_shares_are_exact_in_fixed_point() -> None:
    every = np.arange(0x3C01, dtype=np.uint16).view(np.float16)  # all float16 from 0 to 1
    assert (fixed_point(torch.from_numpy(every)).double() / ONE == torch.from_numpy(every).double()).all()


def test_the_widest_row() -> None:
    shares = torch.zeros(1, MAX_WIDTH)
    shares[0, -2] = 1.0
    ranking = rank(shares, rows_of([MAX_WIDTH]))
    assert ranking.order[0, :4].tolist() == [0, MAX_WIDTH - 1, MAX_WIDTH - 2, 1]
    with pytest.raises(CoverageLabError, match="65537 pages"):
        rank(torch.zeros(1, MAX_WIDTH + 1), rows_of([MAX_WIDTH + 1]))


@pytest.mark.gpu
@settings(max_examples=60)
@given(drawn=any_block, gamma=any_gamma)
def test_cpu_and_gpu_keep_the_same_set(drawn: list[tuple[list[float], int]], gamma: float) -> None:
    lists, first = [s for s, _ in drawn], [page for _, page in drawn]
    here, there = block(lists, first), block(lists, first, "cuda")
    assert pages(by_sorting(*there, gamma)) == pages(by_sorting(*here, gamma))
    assert pages(coverage_bisection(*there, gamma)) == pages(coverage_bisection(*here, gamma))


def test_thresholds_a_pass_are_those_of_the_paper() -> None:
    """K_B is 8, 4 and 2 for rows of fewer than 256, 1,024 and 4,096 pages; beyond it stays 2."""
    widths = (1, 255, 256, 1023, 1024, 4095, 4096, 16_384)
    assert [thresholds_of(width) for width in widths] == [8, 8, 4, 4, 2, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_the_fixed_count_is_exact(count: int) -> None:
    ranking = rank(torch.rand(4, 9), rows_of([1, 2, 5, 9]))
    kept = fixed_counts(ranking, count)
    # Sink and current page are always among them.
    assert kept.tolist() == [min(max(count, forced), n) for n, forced in ((1, 1), (2, 2), (5, 2), (9, 2))]
