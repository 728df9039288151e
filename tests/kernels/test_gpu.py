"""What only a GPU can show: the table of shapes, long rows, many rows, graphs, races, bf16."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coverage_lab.bench.check import attention_error
from coverage_lab.bench.layers import Layer, lists_of, make
from coverage_lab.bench.lengths import drawn
from coverage_lab.bench.shapes import Geometry, Shape
from coverage_lab.kernels.attend import reference as attend_reference
from coverage_lab.kernels.baselines.page_sets import every_page
from coverage_lab.kernels.cache import PagedCache
from coverage_lab.kernels.decode import DecodePath
from coverage_lab.kernels.estimate.reference import exact_log_mass, group_shares, mvar_log_mass
from coverage_lab.kernels.lists import pack
from coverage_lab.kernels.ragged import Attend
from coverage_lab.kernels.step_reference import chosen
from coverage_lab.kernels.summarize.reference import page_moments

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN = float("nan")

# Every page size, head dimension and group at least thrice, no two lines alike in more than one of them.
SHAPES = [
    (16, 64, 1), (16, 80, 3), (16, 96, 4), (16, 128, 6), (16, 256, 7),
    (32, 64, 3), (32, 80, 4), (32, 96, 6), (32, 128, 7), (32, 256, 8),
    (64, 64, 7), (64, 80, 8), (64, 96, 16), (64, 128, 1), (64, 128, 4), (64, 256, 3),
    (128, 64, 8), (128, 80, 16), (128, 96, 1), (128, 128, 3), (128, 256, 16),
]  # fmt: skip


def layer_of(shape: Shape, geometry: Geometry, seed: int = 0) -> Layer:
    return make(shape, geometry, CUDA, 1, seed)[0]


def ragged(layer: Layer, kept: float = 0.3, cv: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    cache = layer.cache
    counts = drawn(cache.rows, cache.max_pages, kept, cv, seed)
    return lists_of(cache, counts.reshape(cache.batch, -1), seed)


def same_lists(path: DecodePath, pages: Tensor, counts: Tensor) -> None:
    place = torch.arange(pages.shape[1], device=CUDA)
    assert torch.equal(path.counts.flatten(), counts)
    assert ((path.pages.flatten(0, 1) == pages) | (place >= counts[:, None])).all()


@pytest.mark.parametrize(("page_size", "head_dim", "group"), SHAPES)
def test_the_table_of_shapes(page_size: int, head_dim: int, group: int):
    dtype = "float16" if SHAPES.index((page_size, head_dim, group)) % 2 else "bfloat16"
    geometry = Geometry(kv_heads=3, group=group, head_dim=head_dim, page_size=page_size, dtype=dtype)
    layer = layer_of(Shape(40 * page_size + 5, 5), geometry)
    cache = layer.cache
    # Nothing beyond the length may be read.
    rest = int(cache.lengths[0]) % page_size
    for tensor in (cache.key, cache.value):
        tensor[cache.table[:, -1].long(), :, rest:] = NAN  # type: ignore[index]
    out = torch.full_like(layer.query, NAN)
    path = DecodePath(layer.cache, 3 * group, gamma=0.9)
    path.log_mass.fill_(NAN)
    path.lists.entries.fill_(-1)
    path._step.summary.fill_(NAN)
    path.summarize()
    path(layer.query, out)
    assert path.estimate_error(layer.query) < 5e-3
    same_lists(path, *chosen(path.log_mass, layer.cache, 0.9, None))
    attention_error("the path", out, layer, path.pages, path.counts)
    assert 2 < path.counts.float().mean() < 40


@pytest.mark.parametrize(("pages", "requests"), [(1, 3), (2, 3), (300, 3), (5000, 2), (16_384, 1)])
def test_rows_of_any_length(pages: int, requests: int):
    geometry = Geometry(kv_heads=2)
    layer = layer_of(Shape(64 * pages, requests), geometry)
    for budget in ({"gamma": 0.98}, {"count": 100}):
        path = DecodePath(layer.cache, 8, **budget)
        path.summarize()
        out = path(layer.query, torch.full_like(layer.query, NAN))
        same_lists(path, *chosen(path.log_mass, layer.cache, path.gamma, path.count))
        attention_error("the path", out, layer, path.pages, path.counts)


def test_as_many_rows_as_are_possible():
    layer = layer_of(Shape(900, 512), Geometry())
    assert layer.cache.rows == 4096
    path = DecodePath(layer.cache, 32, gamma=0.9)
    path.summarize()
    out = path(layer.query, torch.full_like(layer.query, NAN))
    same_lists(path, *chosen(path.log_mass, layer.cache, 0.9, None))
    attention_error("the path", out, layer, path.pages, path.counts)


def test_64_of_64_lists_are_those_of_a_float32_reference_of_estimate_and_rule():
    """Paper, appendix B, at gamma 0.98: nothing that the kernels computed goes into the reference."""
    layer = layer_of(Shape(8192, 8), Geometry(), seed=1)
    path = DecodePath(layer.cache, 32, gamma=0.98)
    path.summarize()
    path(layer.query)
    masses = []
    for request in range(8):
        keys = layer.cache.tokens(request)[0].float()
        scaled = layer.scale * layer.query[request].float().unflatten(0, (8, 4))
        mass = exact_log_mass(scaled, keys, 64)
        full = keys[:, : 127 * 64].unflatten(1, (127, 64))
        means, variances = (part.bfloat16().float() for part in page_moments(full))
        mass[..., 1:127] = mvar_log_mass(scaled, means[:, 1:], variances[:, 1:], 64)
        masses.append(mass)
    assert group_shares(torch.cat(masses)).shape == (64, 128)
    same_lists(path, *chosen(torch.cat(masses), layer.cache, 0.98, None))


@pytest.mark.parametrize("shape", ["8kx4", "32kx2"])
def test_at_gamma_one_it_is_dense_within_a_bf16_ulp(shape: str):
    """One unit in the last place at the magnitude of the result (paper, appendix B)."""
    layer = layer_of(Shape.parse(shape), Geometry())
    path = DecodePath(layer.cache, 32, gamma=1.0)
    path.summarize()
    found = path(layer.query).float()
    wanted = attend_reference.attend(layer.query, layer.cache, *every_page(layer.cache), layer.scale).float()
    unit = torch.exp2(wanted.abs().amax(-1, keepdim=True).log2().floor() - 7)
    assert ((found - wanted).abs() <= unit).all()


def test_a_graph_follows_the_lengths_and_gamma_on_the_device():
    """Captured once; later steps write tokens and lengths, and a replay does what a fresh eager step does."""
    generator = torch.Generator(CUDA).manual_seed(0)
    key, value = (torch.randn(3, 4, 1024, 64, generator=generator, device=CUDA).bfloat16() for _ in range(2))
    lengths = torch.tensor([60, 500, 127], dtype=torch.int32, device=CUDA)
    cache = PagedCache.contiguous(key, value, lengths, page_size=16)
    query = torch.empty(3, 28, 64, dtype=torch.bfloat16, device=CUDA)
    path = DecodePath(cache, 28, gamma=0.9)
    path.summarize()
    out = torch.empty_like(query)
    query.normal_(generator=generator)
    path(query, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        path(query, out)
    for step in range(40):
        query.normal_(generator=generator)
        lengths += 1
        if step == 20:
            path.gamma = 0.6
        out.fill_(NAN)
        graph.replay()
        # Its summaries are all made at once, the path's a page at a time as steps fill them.
        fresh = DecodePath(cache, 28, gamma=path.gamma)
        fresh.summarize()
        assert torch.equal(fresh(query), out)
        assert torch.equal(fresh.counts, path.counts)


def test_runs_are_bit_identical():
    layer = layer_of(Shape(65_536, 2), Geometry())
    lists = pack(layer.cache, *ragged(layer))
    run = Attend(layer.cache, 32)
    first = run(layer.query, layer.cache, lists).clone()
    for _ in range(50):
        out = torch.full_like(first, NAN)
        assert torch.equal(run(layer.query, layer.cache, lists, out), first)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.2])
@pytest.mark.parametrize("kept", [0.02, 0.22, 1.0])
def test_ragged_lists(kept: float, cv: float):
    layer = layer_of(Shape(32_768, 3), Geometry(kv_heads=4, group=7))
    pages, counts = ragged(layer, kept, cv if kept < 1 else 0.0)
    out = torch.full_like(layer.query, NAN)
    run = Attend(layer.cache, 28)
    run._parts.fill_(NAN)
    run._log_sums.fill_(NAN)
    run(layer.query, layer.cache, pack(layer.cache, pages, counts), out)
    attention_error("attend", out, layer, pages, counts)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        # It comes with the CUDA toolkit, which a machine that only runs the kernels need not have.
        pytest.skip("no compute-sanitizer")
    step = Path(__file__).parents[1] / "tools" / "decode_step.py"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(step)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 errors" in run.stdout or "0 hazards" in run.stdout, run.stdout
