"""Kernels to compare with: what they make of page lists by brute force, and attention in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coverage_lab.kernels.attend import reference
from coverage_lab.kernels.baselines import Baseline, baselines, fa3_op, page_sets
from coverage_lab.kernels.cache import PagedCache

NAMES = [
    "fa3-buckets",
    "fa3-dense",
    "fa3-padded",
    "fa3-shared",
    "fa3-varlen",
    "flashinfer",
    "sdpa",
]
# Lies wherever no token does. Not NaN: that a kernel multiplies what it masks by zero is its own affair.
POISON = 60.0


@dataclass
class Case:
    """A pool with poison wherever no token lies, ascending lists that end with the current page, a query."""

    cache: PagedCache
    query: Tensor
    pages: Tensor
    counts: Tensor

    def lists(self, request: int, head: int) -> list[int]:
        return self.pages[request, head, : int(self.counts[request, head])].tolist()


def make(
    layout: str = "HND",
    lengths: tuple[int, ...] = (7, 70, 133),
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    batch, pages = len(lengths), -(-max(lengths) // page_size) + 1
    pool = batch * pages + 2
    table = torch.randperm(pool, generator=generator)[: batch * pages].view(batch, pages)
    held = torch.full((2, pool, kv_heads, page_size, head_dim), POISON, dtype=dtype)
    lists = torch.full((batch, kv_heads, pages), 2**30, dtype=torch.int32)
    counts = torch.zeros(batch, kv_heads, dtype=torch.int32)
    for request, length in enumerate(lengths):
        own = -(-length // page_size)
        for page in range(own):
            tokens = min(page_size, length - page * page_size)
            drawn = torch.randn(2, kv_heads, tokens, head_dim, generator=generator)
            held[:, table[request, page], :, :tokens] = drawn.to(dtype)
        for head in range(kv_heads):
            chosen = torch.rand(own, generator=generator) < 0.2 + 0.5 * head / kv_heads
            chosen[-1] = True
            found = chosen.nonzero()[:, 0].int()
            lists[request, head, : len(found)], counts[request, head] = found, len(found)
    if layout == "NHD":
        key, value = held.transpose(2, 3).contiguous().to(device)
    elif layout == "fused":
        key, value = torch.cat([held[0], held[1]], -1).to(device).split(head_dim, -1)
    else:
        key, value = held.to(device)
    cache = PagedCache.pool(
        key,
        value,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table.int().to(device),
        "NHD" if layout == "NHD" else "HND",
    )
    query = torch.randn(batch, kv_heads * group, head_dim, generator=generator).to(dtype).to(device)
    return Case(cache, query, lists.to(device), counts.to(device))


def tokens_of(cache: PagedCache, request: int, pages: list[int]) -> list[int]:
    length, size = int(cache.lengths[request]), cache.page_size
    return [token for page in pages for token in range(page * size, min((page + 1) * size, length))]


def rows(case: Case) -> Iterator[tuple[int, int]]:
    return ((b, h) for b in range(case.cache.batch) for h in range(case.cache.kv_heads))


class TestSets:
    @given(
        chosen=st.lists(st.lists(st.sets(st.integers(0, 8)), min_size=2, max_size=2), min_size=3, max_size=3),
        poison=st.sampled_from([0, 8, 2**30, -1]),
    )
    def test_lists_and_sets_are_the_same_thing(self, chosen: list[list[set[int]]], poison: int):
        case = make()
        assert case.cache.max_pages == 10
        pages = torch.full((3, 2, 9), poison, dtype=torch.int32)
        for request, head in rows(case):
            # Lists may be in any order here.
            found = sorted(chosen[request][head], reverse=True)
            pages[request, head, : len(found)] = torch.tensor(found)
        counts = torch.tensor([[len(pages) for pages in heads] for heads in chosen], dtype=torch.int32)
        kept = page_sets.to_set(case.cache, pages, counts)
        assert kept.shape == (3, 2, 10)
        back, numbers = page_sets.to_lists(kept)
        assert torch.equal(numbers, counts)
        assert back.dtype == numbers.dtype == torch.int32
        for request, head in rows(case):
            assert set(kept[request, head].nonzero()[:, 0].tolist()) == chosen[request][head]
            found = back[request, head, : counts[request, head]].tolist()
            assert found == sorted(chosen[request][head])

    def test_every_page(self):
        case = make(lengths=(1, 16, 17, 160))
        pages, counts = page_sets.every_page(case.cache)
        assert counts.tolist() == [[1, 1], [1, 1], [2, 2], [10, 10]]
        for request, head in rows(case):
            count = int(counts[request, head])
            assert pages[request, head, :count].tolist() == list(range(count))

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("wanted", [0, 1, 4, 7, 100])
    def test_longer_lists_have_the_first_pages_that_they_lack(self, wanted: int, seed: int):
        case = make(lengths=(5, 70, 133, 160), seed=seed)
        asked = torch.full_like(case.counts, wanted)
        pages, counts = page_sets.extended(case.cache, case.pages, case.counts, asked)
        for request, head in rows(case):
            given, there = case.lists(request, head), range(-(-int(case.cache.lengths[request]) // 16))
            lacking = [page for page in there if page not in given]
            found = pages[request, head, : counts[request, head]].tolist()
            assert found == sorted(given + lacking[: max(0, wanted - len(given))])
            assert len(found) == max(len(given), min(wanted, len(there)))

    def test_the_next_power_of_two(self):
        counts = torch.arange(16_500, dtype=torch.int32)
        found = page_sets.power_of_two(counts)
        assert found.dtype == torch.int32
        assert found.tolist() == [1 << max(0, count - 1).bit_length() for count in counts.tolist()]


class TestPlaces:
    def test_tokens_of_lists_that_end_with_the_current_page(self):
        case = make(lengths=(1, 16, 17, 150))
        found = page_sets.list_tokens(case.cache, case.counts)
        assert found.dtype == torch.int32
        for request, head in rows(case):
            assert found[request, head] == len(tokens_of(case.cache, request, case.lists(request, head)))
        alone = page_sets.list_tokens(case.cache, case.counts[:, 1])
        assert torch.equal(alone, found[:, 1])

    @pytest.mark.parametrize("layout", ["HND", "fused"])
    @pytest.mark.parametrize("kv_heads", [1, 3])
    def test_a_head_of_a_page_is_a_page_of_its_own(self, layout: str, kv_heads: int):
        case = make(layout, kv_heads=kv_heads, seed=kv_heads)
        cache = case.cache
        views = page_sets.rows_as_pool(cache)
        assert views is not None
        places = page_sets.row_places(cache, case.pages, case.counts)
        tokens = page_sets.list_tokens(cache, case.counts).flatten().tolist()
        assert places.dtype == torch.int32
        for view, source in zip(views, (cache.key, cache.value), strict=True):
            assert view.shape == (cache.physical_pages * kv_heads, 16, 1, 64)
            assert view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()  # no copy
        for row, (request, head) in enumerate(rows(case)):
            place = places[row, : case.counts[request, head]].long()
            chosen = tokens_of(cache, request, case.lists(request, head))
            for view, whole in zip(views, cache.tokens(request), strict=True):
                assert torch.equal(view[place].flatten(0, 1)[: tokens[row], 0], whole[head, chosen])
            # Kernels may fetch ahead, so behind a list stands a page that there is.
            assert cache.table is not None
            first = int(cache.table[request, 0]) * kv_heads + head
            assert (places[row, case.counts[request, head] :] == first).all()

    def test_where_a_head_is_no_whole_page_there_is_no_such_view(self):
        assert page_sets.rows_as_pool(make("NHD").cache) is None
        key = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
        lengths = torch.tensor([5], dtype=torch.int32)
        assert page_sets.rows_as_pool(PagedCache.contiguous(key, key, lengths, 16)) is None

    @pytest.mark.parametrize("layout", ["HND", "NHD", "fused"])
    def test_token_major(self, layout: str):
        case = make(layout)
        cache = case.cache
        assert cache.table is not None
        for which, view in enumerate(page_sets.token_major(cache)):
            source = (cache.key, cache.value)[which]
            assert view.shape == (cache.physical_pages, 16, 2, 64)
            assert view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            for request in range(cache.batch):
                length = int(cache.lengths[request])
                found = view[cache.table[request].long()].flatten(0, 1)[:length]
                assert torch.equal(found.transpose(0, 1), cache.tokens(request)[which])


class TestBaselines:
    def test_the_names(self):
        assert baselines.names() == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_each_says_what_it_is(self, name: str):
        cls = baselines.get(name)
        assert cls.name == name
        assert cls.title
        assert cls.dense == (name in ("fa3-dense", "sdpa"))

    @pytest.mark.parametrize("name", [name for name in NAMES if name != "sdpa"])
    def test_those_of_a_gpu_say_so_on_a_cpu(self, name: str):
        assert baselines.get(name).missing(make().cache) == "needs an NVIDIA GPU"

    @pytest.mark.parametrize("lengths", [(7, 70, 133), (64, 64), (1,)])
    @pytest.mark.parametrize("layout", ["HND", "NHD", "fused"])
    def test_sdpa_is_dense_attention(self, layout: str, lengths: tuple[int, ...]):
        case = make(layout, lengths, group=3)
        cls = baselines.get("sdpa")
        assert cls.missing(case.cache) is None
        # A scale of its own, so that the default one would show.
        made = cls(case.query, case.cache, case.pages, case.counts, 0.3)
        assert made.plan() is False
        found = made.run()
        assert found.shape == case.query.shape
        for request in range(case.cache.batch):
            keys, values = (part.double() for part in case.cache.tokens(request))
            query = case.query[request].double().unflatten(0, (2, 3))
            wanted = (0.3 * query @ keys.mT).softmax(-1) @ values
            assert (found[request].double() - wanted.flatten(0, 1)).norm(dim=-1).max() < 5e-3 * wanted.norm()
        assert torch.equal(made.counts, page_sets.every_page(case.cache)[1])

    def test_the_error_shows_what_is_wrong(self):
        case = make()
        made = baselines.get("sdpa")(case.query, case.cache, case.pages, case.counts, 64**-0.5)
        assert relative_error(made, case) < 1e-3
        case.query *= 1.1
        assert relative_error(made, make()) > 2e-2


def relative_error(made: Baseline, case: Case) -> float:
    """Return the largest error of a query head against attention over the lists that a baseline reads."""
    wanted = reference.attend(case.query, case.cache, made.pages, made.counts, made.scale).float()
    error = (made.run().float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(error.nan_to_num(nan=float("inf")).max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [4, 7])
@pytest.mark.parametrize("layout", ["HND", "fused"])
def test_every_baseline_attends_to_its_lists(name: str, group: int, layout: str) -> None:
    case = make(layout, (5000, 70, 64, 1, 2049), 4, group, 128, 64, "cuda", torch.bfloat16)
    cls = baselines.get(name)
    reason = cls.missing(case.cache)
    if reason is not None:
        # Others' kernels are optional: what is not installed can't be compared, and bench says so too.
        pytest.skip(reason)
    made = cls(case.query, case.cache, case.pages, case.counts, 128**-0.5)
    for _ in range(2):  # the second call finds what the first one left
        made.plan()
        assert relative_error(made, case) < 2e-2
    # A page of the given lists that it does not read would be an unfair advantage.
    given = page_sets.to_set(case.cache, case.pages, case.counts)
    assert (page_sets.to_set(case.cache, made.pages, made.counts) | ~given).all()


class TestLibrary:
    @pytest.fixture(autouse=True)
    def _found_anew(self) -> Iterator[None]:
        fa3_op.library.cache_clear()
        yield
        fa3_op.library.cache_clear()

    def test_a_file_that_is_named_is_taken(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        file = tmp_path / "fa3.so"
        file.touch()
        monkeypatch.setenv(fa3_op.VARIABLE, str(file))
        assert fa3_op.library() == file

    def test_a_file_that_is_not_there_is_not_made_up_for(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        vllm_with_fa3(monkeypatch, tmp_path)
        monkeypatch.setenv(fa3_op.VARIABLE, str(tmp_path / "none.so"))
        assert fa3_op.library() is None

    def test_else_it_is_that_of_vllm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        file = vllm_with_fa3(monkeypatch, tmp_path)
        monkeypatch.delenv(fa3_op.VARIABLE, raising=False)
        assert fa3_op.library() == file
        file.unlink()
        fa3_op.library.cache_clear()
        assert fa3_op.library() is None


def vllm_with_fa3(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Put a vllm that can be found and not imported first on the path; return its shared library."""
    inside = folder / "vllm" / "vllm_flash_attn"
    inside.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise ImportError")
    file = inside / "_vllm_fa3_C.abi3.so"
    file.touch()
    monkeypatch.syspath_prepend(str(folder))
    return file
