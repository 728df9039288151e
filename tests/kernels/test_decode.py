"""The kernels of a decode step against the references in float64: layouts, page sizes, groups, lengths."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coverage_lab.kernels.attend import reference as attend_reference
from coverage_lab.kernels.cache import PagedCache
from coverage_lab.kernels.decode import DecodePath
from coverage_lab.kernels.estimate import reference as estimate_reference
from coverage_lab.kernels.lists import pack
from coverage_lab.kernels.merge import reference as merge_reference
from coverage_lab.kernels.ragged import Attend, attend
from coverage_lab.kernels.select.reference import coverage_counts, fixed_point, rank
from coverage_lab.kernels.summarize import reference as summarize_reference
from coverage_lab.pages import Rows

# The interpreter gets bf16 arithmetic wrong, so the CPU runs float16.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = ["contiguous", "NHD", "HND", "fused"]
NAN = float("nan")


@dataclass
class Case:
    """Keys and values with poison wherever no token lies, and a query."""

    cache: PagedCache
    query: Tensor
    lengths: list[int]

    def wide(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and queries of a request in float64 on the CPU, `[KV heads, T or G, D]`."""
        keys, values = self.cache.tokens(request)
        query = self.query[request].unflatten(0, (self.cache.kv_heads, -1))
        return keys.double().cpu(), values.double().cpu(), query.double().cpu()


def make(
    layout: str = "HND",
    lengths: tuple[int, ...] = (1, 70, 133),
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    page_size: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, pages = len(lengths), -(-max(lengths) // page_size) + 1
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    keys, values = (
        [
            normal(kv_heads, length, head_dim)
            * (1 + torch.rand(kv_heads, 1, 1, generator=generator)).to(dtype)
            for length in lengths
        ]
        for _ in range(2)
    )
    if layout == "contiguous":
        tokens = pages * page_size - 3
        held = torch.full((2, batch, kv_heads, tokens, head_dim), NAN, dtype=dtype)
        for request, length in enumerate(lengths):
            held[0, request, :, :length], held[1, request, :, :length] = keys[request], values[request]
        key, value = held.to(device)
        cache = PagedCache.contiguous(key, value, on_device, page_size)
    else:
        pool = batch * pages + 3
        table = torch.randperm(pool, generator=generator)[: batch * pages].view(batch, pages)
        held = torch.full((2, pool, kv_heads, page_size, head_dim), NAN, dtype=dtype)
        for request, length in enumerate(lengths):
            for page in range(-(-length // page_size)):
                part = slice(page * page_size, min(length, (page + 1) * page_size))
                for which, source in enumerate((keys, values)):
                    count = part.stop - part.start
                    held[which, table[request, page], :, :count] = source[request][:, part]
        table = table.int().to(device)
        if layout == "NHD":
            key, value = held.transpose(2, 3).contiguous().to(device)
        elif layout == "HND":
            key, value = held.to(device)
        else:
            key, value = torch.cat([held[0], held[1]], -1).to(device).split(head_dim, -1)
        cache = PagedCache.pool(key, value, on_device, table, "NHD" if layout == "NHD" else "HND")
    query = normal(batch, kv_heads * group, head_dim).to(device) * 1.5
    return Case(cache, query, list(lengths))


def random_lists(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return lists of one page to all of a row's, in any order, and poison behind them."""
    generator = torch.Generator().manual_seed(seed)
    cache = case.cache
    pages = torch.full((cache.batch, cache.kv_heads, cache.max_pages), 2**30, dtype=torch.int32)
    counts = torch.zeros(cache.batch, cache.kv_heads, dtype=torch.int32)
    for request, length in enumerate(case.lengths):
        held = -(-length // cache.page_size)
        for head in range(cache.kv_heads):
            count = int(torch.randint(1, held + 1, (1,), generator=generator)) if held else 0
            chosen = torch.randperm(held, generator=generator)[:count]
            pages[request, head, :count], counts[request, head] = chosen.int(), count
    return pages.to(cache.key.device), counts.to(cache.key.device)


def expected(case: Case, pages: Tensor, counts: Tensor) -> Tensor:
    """Return attention over lists in float64."""
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    size = case.cache.page_size
    for request in range(case.cache.batch):
        keys, values, query = case.wide(request)
        for head in range(case.cache.kv_heads):
            chosen = pages[request, head, : int(counts[request, head])].tolist()
            tokens = [t for p in chosen for t in range(p * size, min((p + 1) * size, keys.shape[1]))]
            if tokens:
                logits = query[head] @ keys[head, tokens].T * case.cache.head_dim**-0.5
                group = query.shape[1]
                out[request, head * group : (head + 1) * group] = logits.softmax(-1) @ values[head, tokens]
    return out


def close(found: Tensor, wanted: Tensor) -> None:
    """Within a few roundings of the dtype, NaN nowhere."""
    error = (found.double().cpu() - wanted).abs()
    unit = torch.finfo(found.dtype).eps
    assert (error <= 2 * unit * (1 + wanted.abs())).all(), error.max()


@pytest.mark.parametrize("device", DEVICES)
class TestAttend:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, device: str, layout: str):
        case = make(layout, device=device)
        lists = random_lists(case)
        close(attend_once(case, *lists), expected(case, *lists))

    @pytest.mark.parametrize(
        ("group", "head_dim", "page_size"),
        [(1, 64, 16), (3, 80, 32), (6, 96, 64), (7, 128, 16), (8, 256, 16), (16, 64, 128)],
    )
    def test_shapes(self, device: str, group: int, head_dim: int, page_size: int):
        lengths = (1, page_size, 3 * page_size + 1)
        case = make("fused", lengths, 2, group, head_dim, page_size, device)
        lists = random_lists(case)
        close(attend_once(case, *lists), expected(case, *lists))

    @pytest.mark.parametrize("blocks", [1, 2, 3, 5, 16, 64])
    def test_the_split_does_not_matter(self, device: str, blocks: int):
        case = make(lengths=(200, 1, 17, 90), device=device)
        lists = random_lists(case)
        close(attend_once(case, *lists, blocks=blocks), expected(case, *lists))

    def test_partial_results_merge_as_the_reference_does(self, device: str):
        """One row over many blocks: what they wrote, merged in plain torch."""
        case = make(lengths=(700,), kv_heads=1, group=2, device=device)
        pages = torch.arange(44, dtype=torch.int32, device=device).view(1, 1, -1)
        counts = torch.full((1, 1), 44, dtype=torch.int32, device=device)
        run = Attend(case.cache, 2, blocks=5)
        found = run(case.query, case.cache, pack(case.cache, pages, counts))
        # The first block holds the row's beginning, so its place is the second; the others have their first.
        places = [1, 2, 4, 6, 8]
        parts = run._parts[places].transpose(0, 1).cpu()
        log_sums = run._log_sums[places].T.cpu() * math.log(2)
        merged = merge_reference.merge(parts.double(), log_sums.double())
        close(found[0], merged)
        close(found, expected(case, pages.cpu(), counts.cpu()))

    def test_rows_without_tokens_give_zeros(self, device: str):
        case = make(lengths=(0, 40, 0, 33), device=device)
        lists = random_lists(case)
        found = attend_once(case, *lists)
        assert not found[0].any()
        assert not found[2].any()
        close(found, expected(case, *lists))

    def test_repeated_runs_are_identical(self, device: str):
        case = make(lengths=(300, 5, 120), device=device)
        pages, counts = random_lists(case)
        run = Attend(case.cache, case.query.shape[1])
        lists = pack(case.cache, pages, counts)
        first = run(case.query, case.cache, lists)
        for _ in range(3):
            again = torch.full_like(first, NAN)
            assert run(case.query, case.cache, lists, again) is again
            assert torch.equal(first, again)

    def test_rows_without_tokens_give_zeros_whatever_their_lists(self, device: str):
        """One long list for all requests: the parts of an empty one hold nothing, and merge to nothing."""
        case = make(lengths=(0, 700), device=device)
        pages = torch.arange(44, dtype=torch.int32, device=device).expand(2, 2, -1)
        counts = torch.full((2, 2), 44, dtype=torch.int32, device=device)
        for blocks in (1, 5, 64):
            found = attend_once(case, pages, counts, blocks)
            assert not found[0].any()
            close(found, expected(case, pages.cpu(), counts.cpu()))

    def test_a_row_over_many_blocks(self, device: str):
        """More parts than the merge loads at once."""
        case = make(lengths=(16 * 90,), kv_heads=1, group=2, device=device)
        pages = torch.arange(90, dtype=torch.int32, device=device).view(1, 1, -1)
        counts = torch.full((1, 1), 90, dtype=torch.int32, device=device)
        run = Attend(case.cache, 2, blocks=23)
        close(run(case.query, case.cache, pack(case.cache, pages, counts)), expected(case, pages, counts))

    def test_counts_and_pages_out_of_range(self, device: str):
        """As the reference has it: no page beyond a list, no tokens on a page that is not there."""
        case = make(lengths=(100, 40), device=device)
        pages = torch.tensor([[[0, 99, 3], [-3, 1, 2]], [[2, 1, 7], [0, 1, 2]]], dtype=torch.int32)
        counts = torch.tensor([[3, 3], [9, -1]], dtype=torch.int32)
        on_device = pages.to(device), counts.to(device)
        wanted = attend_reference.attend(case.query, case.cache, *on_device, 64**-0.5)
        close(attend_once(case, *on_device), wanted.double().cpu())
        assert not wanted[1, 4:].any()

    @pytest.mark.parametrize("change", ["transposed", "sliced", "expanded"])
    def test_lists_with_any_strides(self, device: str, change: str):
        case = make(device=device)
        pages, counts = random_lists(case)
        if change == "transposed":
            strided = pages.mT.contiguous().mT, counts.T.contiguous().T
        elif change == "sliced":
            doubled = torch.stack([pages, pages], -1).flatten(2)
            strided = doubled[..., ::2], torch.stack([counts, counts], -1)[..., 0]
        else:
            pages, counts = pages[:1, :1].expand_as(pages), counts[:1, :1].expand_as(counts)
            strided = pages, counts
        close(attend_once(case, *strided), expected(case, pages, counts))

    def test_the_entry_point_takes_any_lists(self, device: str):
        case = make("NHD", device=device)
        pages, counts = random_lists(case)
        found = attend(case.query, case.cache, pages.long(), counts)
        close(found, expected(case, pages, counts))


def attend_once(case: Case, pages: Tensor, counts: Tensor, blocks: int | None = None) -> Tensor:
    """Return the kernels' result in a poisoned output."""
    out = torch.full_like(case.query, NAN)
    run = Attend(case.cache, case.query.shape[1], blocks=blocks)
    run._parts.fill_(NAN)
    run._log_sums.fill_(NAN)
    return run(case.query, case.cache, pack(case.cache, pages, counts), out)


def log_masses(case: Case, estimator: str) -> list[Tensor]:
    """Return the wanted log masses of every row, `[G, pages]` float64."""
    size, dtype = case.cache.page_size, case.query.dtype
    found = []
    for request, length in enumerate(case.lengths):
        keys, _, query = case.wide(request)
        last = -(-length // size) - 1
        for head in range(case.cache.kv_heads):
            scaled = query[head] * case.cache.head_dim**-0.5
            masses = estimate_reference.exact_log_mass(scaled, keys[head], size)
            if last > 1:
                full = keys[head, size : last * size].unflatten(0, (-1, size))
                if estimator == "quest":
                    box = [part.to(dtype).double() for part in summarize_reference.page_box(full)]
                    masses[:, 1:last] = estimate_reference.quest_log_mass(scaled, *box, size)
                else:
                    mean, variance = (p.to(dtype).double() for p in summarize_reference.page_moments(full))
                    masses[:, 1:last] = (
                        estimate_reference.mvar_log_mass(scaled, mean, variance, size)
                        if estimator == "mvar"
                        else estimate_reference.mean_log_mass(scaled, mean, size)
                    )
            found.append(masses)
    return found


@pytest.mark.parametrize("device", DEVICES)
class TestPath:
    @pytest.mark.parametrize("estimator", ["mvar", "mean", "quest"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_log_masses(self, device: str, estimator: Any, layout: str):
        case = make(layout, (1, 32, 250, 96), device=device)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9, estimator=estimator)
        path._step.summary.fill_(NAN)
        path.summarize()
        found = path.estimate(case.query).cpu()
        for row, wanted in enumerate(log_masses(case, estimator)):
            got = found[row, :, : wanted.shape[1]].double()
            # float32 logits, and a spread whose factors are rounded to tf32 on the GPU.
            assert (got - wanted).abs().max() < (1e-4 if device == "cpu" else 5e-3) * (1 + wanted.abs().max())

    @pytest.mark.parametrize("gamma", [0.3, 0.9, 0.98, 1.0])
    def test_lists_are_those_of_the_reference(self, device: str, gamma: float):
        case = make(lengths=(1, 16, 17, 40, 333, 512), device=device, seed=3)
        path = DecodePath(case.cache, case.query.shape[1], gamma=gamma)
        path.summarize()
        path(case.query)
        kept, seen = check_lists(case, path, gamma=gamma)
        assert path.reads.tolist() == [kept, seen]

    @pytest.mark.parametrize("count", [1, 2, 5, 1000])
    def test_the_fixed_count_is_exact(self, device: str, count: int):
        case = make(lengths=(1, 17, 40, 333), device=device, seed=4)
        path = DecodePath(case.cache, case.query.shape[1], count=count)
        path.summarize()
        path(case.query)
        check_lists(case, path, count=count)

    def test_every_row_has_a_count_of_its_own(self, device: str):
        case = make(lengths=(1, 17, 40, 333), device=device, seed=4)
        rows = case.cache.batch, case.cache.kv_heads
        counts = torch.arange(1, 1 + rows[0] * rows[1], device=device).view(rows) * 2
        path = DecodePath(case.cache, case.query.shape[1], count=counts)
        path.summarize()
        path(case.query)
        kept, seen = check_lists(case, path, count=counts.cpu())
        assert path.reads.tolist() == [kept, seen]

    @pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 20.0])
    @pytest.mark.parametrize("distinct", [2, 5, 0])
    def test_lists_of_any_masses(self, device: str, spread: float, distinct: int):
        """Flat and peaked masses, with ties by the dozen or none."""
        # Shares that tie over several heads tie only up to the rounding of each device.
        case = make(lengths=(16, 130, 700, 1500), group=1 if distinct else 3, device=device)
        generator = torch.Generator().manual_seed(int(10 * spread) + distinct)
        for budget in ({"gamma": 0.5}, {"gamma": 0.95}, {"gamma": 0.9999}, {"count": 7}):
            path = DecodePath(case.cache, case.query.shape[1], **budget)
            drawn = torch.randn(path.log_mass.shape, generator=generator)
            if distinct:
                drawn = torch.randint(distinct, drawn.shape, generator=generator).float()
            path.log_mass.copy_(spread * drawn)
            path.select()
            check_lists(case, path, **budget)

    def test_long_rows_of_any_masses(self, device: str):
        case = make(lengths=(16 * 3000, 16 * 1030 + 1), kv_heads=1, group=2, device=device)
        generator = torch.Generator().manual_seed(0)
        for budget in ({"gamma": 0.9}, {"count": 77}):
            path = DecodePath(case.cache, 2, **budget)
            path.log_mass.copy_(3 * torch.randn(path.log_mass.shape, generator=generator))
            path.select()
            check_lists(case, path, **budget)

    def test_step_after_step_is_a_fresh_path(self, device: str):
        """Tokens come one at a time and fill pages: the same bits as if all were summarized at once."""
        case = make("contiguous", (200, 14, 95), device=device)
        case.cache.key.nan_to_num_(1.0), case.cache.value.nan_to_num_(1.0)
        case.cache.lengths.sub_(25).clamp_(min=1)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.8)
        path.summarize()
        for _ in range(20):
            case.cache.lengths.add_(1)
            found = path(case.query)
        fresh = DecodePath(case.cache, case.query.shape[1], gamma=0.8)
        fresh.summarize()
        assert torch.equal(fresh(case.query), found)
        assert torch.equal(fresh.counts, path.counts)

    def test_lengths_beyond_the_cache_count_as_full(self, device: str):
        """A step too many must not write beyond what was allocated; a negative length is none."""
        case = make("contiguous", (150, 30), device=device)
        case.cache.key.nan_to_num_(0.5), case.cache.value.nan_to_num_(0.5)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        runs = []
        for lengths in ((case.cache.max_tokens, 0), (case.cache.max_tokens + 5000, -7)):
            case.cache.lengths.copy_(torch.tensor(lengths))
            path.summarize()
            runs.append((path(case.query).clone(), path.counts.clone(), path.pages.clone()))
        (out, counts, pages), (again, same, more) = runs
        assert torch.equal(out, again)
        assert torch.equal(counts, same)
        assert torch.equal(pages[0], more[0])
        assert not again[1].any()

    def test_summaries_that_float16_cannot_hold(self, device: str):
        """The variance of a page with keys of 300 and -300 is beyond float16: it stays finite."""
        case = make("contiguous", (160,), device=device)
        case.cache.key[0, :, 32:48:2] = 300.0
        case.cache.key[0, :, 33:48:2] = -300.0
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        path.summarize()
        assert path.estimate(case.query)[..., :10].isfinite().all()
        path.select()
        check_lists(case, path, gamma=0.9)
        assert all(2 in path.pages[0, head, : path.counts[0, head]].tolist() for head in range(2))

    def test_ties_are_taken_by_page(self, device: str):
        """Keys that are all alike: every page has the same share."""
        case = make(lengths=(160,), device=device)
        case.cache.key.nan_to_num_(0.0).zero_()
        for count, wanted in ((2, [0, 9]), (5, [0, 1, 2, 3, 9])):
            path = DecodePath(case.cache, case.query.shape[1], count=count)
            path.summarize()
            path(case.query)
            assert path.pages[0, 0, :count].tolist() == wanted

    def test_at_gamma_one_it_is_dense(self, device: str):
        case = make("NHD", (1, 33, 200), device=device)
        path = DecodePath(case.cache, case.query.shape[1], gamma=1.0)
        path.summarize()
        pages = torch.arange(case.cache.max_pages, dtype=torch.int32).expand(3, 2, -1)
        counts = torch.tensor([[-(-length // 16)] * 2 for length in case.lengths])
        close(path(case.query), expected(case, pages, counts))

    def test_the_step_that_fills_a_page_summarizes_it(self, device: str):
        case = make("HND", (47, 64), device=device)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        path.summarize()
        path._step.summary.fill_(NAN)
        path.estimate(case.query)
        held = case.cache.table[1, 3].item()  # type: ignore[index]
        assert not path._step.summary[held].isnan().any()
        assert path._step.summary.isnan().flatten(1).all(1).sum() == len(path._step.summary) - 1


def check_lists(
    case: Case, path: DecodePath, gamma: float = 0.0, count: int | torch.Tensor = 0
) -> tuple[int, int]:
    """Compare every list with the reference on the same log masses; return pages kept and seen."""
    kept = seen = 0
    masses = path.log_mass.cpu()
    for row in range(case.cache.rows):
        request, head = divmod(row, case.cache.kv_heads)
        length = case.lengths[request]
        n_pages = -(-length // case.cache.page_size)
        shares = estimate_reference.group_shares(masses[row, :, :n_pages])[None]
        numbers = {"n_pages": n_pages, "first_page": 0, "position": length - 1, "layer": 0, "kv_head": head}
        rows = Rows(**{name: torch.tensor([value]) for name, value in numbers.items()}, page_size=16)
        ranking = rank(shares, rows)
        own = int(count[request, head]) if isinstance(count, torch.Tensor) else count
        wanted = (
            max(min(own, n_pages), int(ranking.n_forced))
            if own
            else int(coverage_counts(ranking, torch.tensor([gamma], dtype=torch.float64)))
        )
        found = path.pages[request, head, : int(path.counts[request, head])].tolist()
        assert found == sorted(ranking.order[0, :wanted].tolist())
        kept += wanted
        seen += n_pages
    return kept, seen


shares_of_rows = st.lists(
    st.lists(st.sampled_from([-8.0, -1.0, 0.0, 0.5, 1.0, 3.0]) | st.floats(-12, 12), min_size=1, max_size=40),
    min_size=1,
    max_size=3,
)


class TestSelectProperties:
    """What the rule promises, of the kernel's own lists (paper, Eq. 3)."""

    @settings(max_examples=40)
    @given(masses=shares_of_rows, gamma=st.floats(0.01, 0.9999))
    def test_it_covers_gamma_and_no_page_less_would(self, masses: list[list[float]], gamma: float):
        for units, kept in selected(masses, gamma=gamma):
            forced = {0, len(units) - 1}
            total, held = sum(units), sum(units[page] for page in kept)
            assert forced <= set(kept)
            assert kept == sorted(set(kept))
            assert held >= gamma * total - 1
            for page in set(kept) - forced:
                assert held - units[page] < gamma * total

    @settings(max_examples=40)
    @given(masses=shares_of_rows, count=st.integers(1, 45))
    def test_a_count_is_exact_and_keeps_the_largest(self, masses: list[list[float]], count: int):
        for units, kept in selected(masses, count=count):
            forced = {0, len(units) - 1}
            assert len(kept) == max(min(count, len(units)), len(forced))
            left = set(range(len(units))) - set(kept)
            for page in set(kept) - forced:
                # Of pages that tie the lower ones are kept.
                assert all((units[page], -page) > (units[other], -other) for other in left)

    @settings(max_examples=20)
    @given(masses=shares_of_rows, gamma=st.floats(0.01, 0.9999), seed=st.integers(0, 99))
    def test_pages_in_another_order_are_the_same_pages(
        self, masses: list[list[float]], gamma: float, seed: int
    ):
        """But for ties, and for the pages that are forced."""
        row = [mass + 1e-3 * place for place, mass in enumerate(masses[0])]
        order = np.random.default_rng(seed).permutation(range(1, len(row) - 1)).tolist()
        order = [0, *order, len(row) - 1][: len(row)]
        ((units, kept),) = selected([row], gamma=gamma)
        ((moved, again),) = selected([[row[place] for place in order]], gamma=gamma)
        if len(set(units)) == len(units) and moved == [units[place] for place in order]:
            assert sorted(order[place] for place in again) == kept

    def test_repeated_runs_are_identical(self):
        generator = np.random.default_rng(0)
        masses = [generator.normal(size=40).tolist() for _ in range(3)]
        assert selected(masses, gamma=0.7) == selected(masses, gamma=0.7)


def selected(masses: list[list[float]], **budget: Any) -> list[tuple[list[int], list[int]]]:
    """Return the fixed-point shares of each row of log masses, and the pages that the kernel keeps of it."""
    lengths = tuple(16 * len(row) for row in masses)
    case = make(lengths=lengths, kv_heads=1, group=1, device="cpu")
    path = DecodePath(case.cache, 1, **budget)
    path.log_mass.fill_(NAN)
    for row, values in enumerate(masses):
        path.log_mass[row, 0, : len(values)] = torch.tensor(values)
    path.select()
    found = []
    for row, values in enumerate(masses):
        units = fixed_point(estimate_reference.group_shares(path.log_mass[row, :, : len(values)]))
        found.append((units.tolist(), path.pages[row, 0, : int(path.counts[row, 0])].tolist()))
    return found


class TestWithoutKernels:
    """Where no kernel runs, plain torch does the same."""

    @pytest.mark.parametrize("budget", [{"gamma": 0.9}, {"gamma": 1.0}, {"count": 3}])
    @pytest.mark.parametrize("estimator", ["mvar", "mean", "quest"])
    def test_the_reference_serves(
        self, monkeypatch: pytest.MonkeyPatch, budget: dict[str, Any], estimator: Any
    ):
        case = make("NHD", (48, 0, 1, 170), seed=5)
        ran = {}
        for backend, interpret in (("triton", "1"), ("reference", "0")):
            monkeypatch.setenv("TRITON_INTERPRET", interpret)
            path = DecodePath(case.cache, case.query.shape[1], estimator=estimator, **budget)
            assert path.backend == backend
            path._step.summary.fill_(0.0)
            path.summarize()
            ran[backend] = path, path(case.query)
        (kernels, found), (plain, wanted) = ran["triton"], ran["reference"]
        assert torch.equal(kernels.counts, plain.counts)
        assert kernels.reads.tolist() == plain.reads.tolist()
        kept = torch.arange(kernels.pages.shape[2]) < kernels.counts[..., None]
        kept[1] = False  # a request without tokens
        assert torch.equal(kernels.pages[kept], plain.pages[kept])
        assert torch.equal(kernels.lists.entries[kept], plain.lists.entries[kept])
        assert (kernels._step.summary - plain._step.summary).abs().max() < 2e-3
        close(found, wanted.double())


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"dtype": torch.float32}, "key"),
            ({"head_dim": 48}, "key"),
            ({"page_size": 8}, "key"),
            ({"group": 17}, "query_heads"),
        ],
    )
    def test_what_the_kernels_cannot_take_is_named(self, change: Any, name: str):
        def run() -> None:
            case = make(**change)
            DecodePath(case.cache, case.query.shape[1], gamma=0.9)(case.query)

        with pytest.raises(ValueError, match=f"^{name}: "):
            run()

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({}, "gamma"),
            ({"gamma": 0.9, "count": 3}, "gamma"),
            ({"gamma": 1.5}, "gamma"),
            ({"gamma": "0.9"}, "gamma"),
            ({"count": 0}, "count"),
            ({"count": 2.5}, "count"),
            ({"count": True}, "count"),
            ({"count": torch.ones(3)}, "count"),
            ({"count": torch.zeros(3, 2, dtype=torch.int32)}, "count"),
            ({"gamma": 0.9, "estimator": "mvra"}, "estimator"),
        ],
    )
    def test_options(self, options: Any, name: str):
        case = make()
        with pytest.raises(ValueError, match=f"^{name}: "):
            DecodePath(case.cache, case.query.shape[1], **options)

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"lengths": [5, 9]}, "lengths"),
            ({"lengths": torch.tensor(5, dtype=torch.int32)}, "lengths"),
            ({"lengths": torch.tensor([5, 9])}, "lengths"),
            ({"lengths": torch.tensor([5, 0, 9, 0], dtype=torch.int32)[::2]}, "lengths"),
            ({"lengths": torch.tensor([5], dtype=torch.int32).expand(2)}, "lengths"),
            ({"lengths": torch.empty(0, dtype=torch.int32)}, "lengths"),
            ({"lengths": torch.tensor([5, 9], dtype=torch.int32, device="meta")}, "lengths"),
            ({"table": torch.zeros(6, dtype=torch.int32)}, "table"),
            ({"table": torch.zeros(3, 3, dtype=torch.int32)}, "table"),
            ({"table": torch.zeros(2, 3)}, "table"),
            ({"table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]}, "table"),
            ({"table": torch.zeros(3, 2, dtype=torch.int32).T}, "table"),
            ({"table": torch.zeros(2, 0, dtype=torch.int32)}, "table"),
            ({"key": torch.zeros(6, 16, 2, 64, dtype=torch.int8)}, "key"),
            ({"key": torch.zeros(6, 16, 2, 128).half()[..., ::2]}, "key"),
            ({"key": torch.zeros(6, 16, 64).half()}, "key"),
            ({"key": torch.zeros(6, 16, 0, 64).half()}, "key|value"),
            ({"value": torch.zeros(6, 16, 2, 64)}, "value"),
            ({"value": torch.zeros(6, 16, 2, 32).half()}, "value"),
            ({"layout": "HDN"}, "layout"),
        ],
    )
    def test_caches(self, change: dict[str, Any], name: str):
        given: dict[str, Any] = {
            "key": torch.zeros(6, 16, 2, 64).half(),
            "value": torch.zeros(6, 16, 2, 64).half(),
            "lengths": torch.tensor([5, 9], dtype=torch.int32),
            "table": torch.zeros(2, 3, dtype=torch.int32),
        }
        with pytest.raises(ValueError, match=f"^({name}): "):
            PagedCache.pool(**{**given, **change})

    def test_contiguous_caches(self):
        key = torch.zeros(2, 2, 40, 64).half()
        lengths = torch.tensor([5, 9], dtype=torch.int32)
        for name, arguments in (
            ("lengths", (key, key, lengths[:1])),
            ("page_size", (key, key, lengths, 0)),
            ("page_size", (key, key, lengths, 16.0)),
            ("key", (key[:, :, :0], key[:, :, :0], lengths)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: "):
                PagedCache.contiguous(*arguments)

    def test_nothing_is_launched_before_the_complaint(self, monkeypatch: pytest.MonkeyPatch):
        case = make()
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        path.summarize()
        monkeypatch.setattr(path, "_kernels", None)
        for out in (torch.empty(3, 8, 64), torch.empty(3, 8, 32).half(), torch.empty(8, 3, 64).half()):
            with pytest.raises(ValueError, match=r"^out: "):
                path(case.query, out)
        with pytest.raises(ValueError, match=r"^query: "):
            path(case.query.float())

    def test_a_path_without_summaries(self):
        case = make()
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        with pytest.raises(ValueError, match="call summarize once after the prefill"):
            path(case.query)
        # Lists are there from the start, of nothing.
        assert not path.attend(case.query).any()

    def test_packed_lists(self):
        case, other = make(), make(page_size=32)
        run, lists = Attend(case.cache, 8), pack(case.cache, *random_lists(case))
        for wrong in (
            pack(other.cache, *random_lists(other)),
            replace(lists, entries=lists.entries[:2]),
            replace(lists, counts=lists.counts[:, :1]),
            replace(lists, entries=lists.entries.long()),
            replace(lists, entries=lists.entries.mT.contiguous().mT),
        ):
            with pytest.raises(ValueError, match=r"^lists: "):
                run(case.query, case.cache, wrong)
        with pytest.raises(ValueError, match=r"^cache: "):
            run(other.query, other.cache, pack(other.cache, *random_lists(other)))

    def test_limits(self, monkeypatch: pytest.MonkeyPatch):
        case = make()
        for name, limit in (
            ("lengths", "ragged.MOST_ROWS"),
            ("key", "ragged.MOST_PAGES"),
            ("lengths", "decode.MOST_WIDTH"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(f"coverage_lab.kernels.{limit}", 3)
                with pytest.raises(ValueError, match=f"^{name}: .* at most 3 "):
                    DecodePath(case.cache, 8, gamma=0.5)
        for name, value in (("blocks", 0), ("scale", NAN), ("scale", 0.0)):
            with pytest.raises(ValueError, match=f"^{name}: "):
                Attend(case.cache, 8, **{name: value})

    def test_wrong_types_are_named(self):
        case = make()
        path = DecodePath(case.cache, 8, gamma=0.9)
        path.summarize()
        lengths = torch.tensor([5], dtype=torch.int32)
        for name, call in (
            ("query", lambda: path([1])),
            ("out", lambda: path(case.query, [1])),
            ("query_heads", lambda: DecodePath(case.cache, 8.0, gamma=0.9)),
            ("scale", lambda: DecodePath(case.cache, 8, gamma=0.9, scale="x")),
            ("scale", lambda: DecodePath(case.cache, 8, gamma=0.9, scale=torch.ones(()))),
            ("blocks", lambda: Attend(case.cache, 8, blocks=1.5)),
            ("key", lambda: PagedCache.contiguous(None, None, lengths)),
            ("page_size", lambda: PagedCache.contiguous(*[torch.ones(1, 1, 9, 64)] * 2, lengths, None)),
            ("key", lambda: PagedCache.contiguous(*[torch.ones(1, 1, 9, 0)] * 2, lengths)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: "):
                call()
        # numpy's numbers are numbers.
        assert DecodePath(case.cache, 8, gamma=np.float32(0.5)).gamma == 0.5

    def test_another_default_dtype_changes_nothing(self):
        case = make()
        runs = []
        for dtype in (torch.float32, torch.float16):
            torch.set_default_dtype(dtype)
            try:
                path = DecodePath(case.cache, 8, gamma=0.9)
                path.summarize()
                runs.append(path(case.query))
            finally:
                torch.set_default_dtype(torch.float32)
            assert path.log_mass.dtype == torch.float32
        assert torch.equal(*runs)

    def test_entries_of_one_kv_head_with_odd_strides(self):
        """Contiguous, as torch counts axes of one, and yet its strides say nothing of rows."""
        case = make(kv_heads=1)
        pages, counts = random_lists(case)
        lists = pack(case.cache, pages, counts)
        odd = torch.zeros(1, 3, pages.shape[2], dtype=torch.int32).transpose(0, 1)
        odd.copy_(lists.entries)
        assert odd.is_contiguous()
        run = Attend(case.cache, 4)
        close(run(case.query, case.cache, replace(lists, entries=odd)), expected(case, pages, counts))

    def test_a_wrong_estimate_or_summary_is_seen(self):
        case = make(lengths=(64, 200))
        path = DecodePath(case.cache, 8, gamma=0.9)
        path.summarize()
        path.estimate(case.query)
        assert path.estimate_error(case.query) < 1e-3
        filled = int(case.cache.table[0, 3])  # type: ignore[index]
        path._step.summary[filled] += 1.0
        assert path.estimate_error(case.query) > 0.1
        assert path.estimate_error(case.query) > 0.1  # and it is not mended on the way
        path.estimate(case.query)
        path.log_mass[3, 1, 2] += 1.0
        assert path.estimate_error(case.query) > 0.05

    def test_gamma_of_a_count(self):
        case = make()
        path = DecodePath(case.cache, 8, count=3)
        with pytest.raises(ValueError, match=r"^gamma: "):
            path.gamma = 0.5

    def test_lists_and_queries(self):
        case = make()
        pages, counts = random_lists(case)
        for name, arguments in (
            ("query", (case.query[:2], pages, counts)),
            ("query", (case.query.float(), pages, counts)),
            ("pages", (case.query, pages[0], counts)),
            ("pages", (case.query, pages.float(), counts)),
            ("counts", (case.query, pages, counts[0])),
            ("counts", (case.query, pages, counts.tolist())),
            ("pages", (case.query, pages[..., :0], counts)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: "):
                attend(arguments[0], case.cache, *arguments[1:])

    def test_a_workspace_is_for_one_shape(self):
        case = make()
        lists = pack(case.cache, *random_lists(case))
        run = Attend(case.cache, case.query.shape[1])
        for name, arguments in (
            ("cache", (make(lengths=(5, 9)).query, make(lengths=(5, 9)).cache, lists)),
            ("query", (case.query[:, :2].contiguous(), case.cache, lists)),
            ("out", (case.query, case.cache, lists, torch.empty_like(case.query).float())),
            ("out", (case.query, case.cache, lists, torch.empty_like(case.query)[:2])),
            ("out", (case.query, case.cache, lists, torch.empty_like(case.query).mT.contiguous().mT)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: "):
                run(*arguments)
        with pytest.raises(ValueError, match=r"^query: "):
            DecodePath(case.cache, case.query.shape[1], gamma=0.9)(case.query[:, :2].contiguous())
        with pytest.raises(ValueError, match=r"^query_heads: "):
            Attend(case.cache, 7)

    def test_bf16_is_not_for_the_interpreter(self):
        """Its arithmetic is wrong there, so plain torch serves."""
        case = make(dtype=torch.bfloat16)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.9)
        assert path.backend == "reference"
        pages, counts = random_lists(case)
        close(attend(case.query, case.cache, pages, counts), expected(case, pages, counts))

    def test_the_reference_takes_any_dtype(self):
        case = make()
        pages, counts = random_lists(case)
        found = attend_reference.attend(case.query, case.cache, pages, counts, 64**-0.5)
        close(found, expected(case, pages, counts))


@pytest.mark.gpu
class TestOnTheGpu:
    def test_graph_replay_is_eager(self):
        case = make("fused", (5000, 17, 4096, 9000), 8, 4, 128, 64, "cuda", torch.bfloat16)
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.98)
        path.summarize()
        eager = path(case.query).clone()
        lists, counts = path.pages.clone(), path.counts.clone()
        graph = torch.cuda.CUDAGraph()
        out = torch.empty_like(eager)
        with torch.cuda.graph(graph):
            path(case.query, out)
        for _ in range(3):
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out, eager)
            assert torch.equal(path.counts, counts)
        kept = torch.arange(lists.shape[2], device="cuda") < counts[..., None]
        assert torch.equal(path.pages[kept], lists[kept])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_long_rows(self, dtype: torch.dtype):
        case = make("NHD", (131_000, 64, 1_048_000), 2, 4, 128, 64, "cuda", dtype)
        lists = random_lists(case)
        close(attend_once(case, *lists), expected(case, *lists))
        path = DecodePath(case.cache, case.query.shape[1], gamma=0.98)
        path.summarize()
        assert not path(case.query).isnan().any()
        shares = path.counts.float().sum().item()
        assert math.isfinite(shares)
