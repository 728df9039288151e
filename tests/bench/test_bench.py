"""What benchmarks time and write down, on tiny shapes and without a GPU: every result is checked."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coverage_lab.bench import attend, layers, path, select, timing
from coverage_lab.bench.check import attention_error
from coverage_lab.bench.shapes import Geometry, Shape
from coverage_lab.cli.bench import CPU_SHAPES, GPU_SHAPES
from coverage_lab.errors import CoverageLabError
from coverage_lab.kernels.attend import reference
from coverage_lab.kernels.baselines import baselines, page_sets
from coverage_lab.kernels.decode import DecodePath
from coverage_lab.policies.policy import parse_policy
from coverage_lab.trace import Trace

CPU = torch.device("cpu")
# The interpreter gets bf16 arithmetic wrong.
GEOMETRY = Geometry(kv_heads=2, group=2, head_dim=64, page_size=16, dtype="float16")
SHAPE = Shape(256, 2)


@pytest.fixture(autouse=True, scope="module")
def _one_repeat() -> Iterator[None]:
    """Times mean nothing here, so each call is timed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "CLOCKED", 1)
        yield


class TestShapes:
    @pytest.mark.parametrize(
        ("text", "shape", "written"),
        [
            ("8kx32", Shape(8192, 32), "8kx32"),
            ("8192x32", Shape(8192, 32), "8192x32"),
            (" 8KX32 ", Shape(8192, 32), "8kx32"),
            ("1000x1", Shape(1000, 1), "1000x1"),
            ("128kx4", Shape(131_072, 4), "128kx4"),
            # As the paper writes it, and it alone.
            ("131kx4", Shape(131_072, 4), "131kx4"),
            ("130kx4", Shape(133_120, 4), "130kx4"),
        ],
    )
    def test_text(self, text: str, shape: Shape, written: str):
        assert Shape.parse(text) == shape
        assert str(Shape.parse(text)) == written

    @given(
        context=st.integers(1, 1 << 21) | st.integers(1, 4096).map(lambda k: 1024 * k),
        batch=st.integers(1, 999),
    )
    def test_what_is_written_can_be_read(self, context: int, batch: int):
        assert Shape.parse(str(Shape(context, batch))) == Shape(context, batch)

    @pytest.mark.parametrize(
        "text", ["", "8k", "x8", "8kx", "0x4", "0kx4", "8kx0", "-8kx4", "8.5kx4", "8kx4x2", "8mx4"]
    )
    def test_other_text_is_refused(self, text: str):
        with pytest.raises(CoverageLabError, match="is not like 8kx32"):
            Shape.parse(text)

    def test_the_default_contexts_are_those_of_the_paper(self):
        """Of all others the paper has no reads."""
        for text in GPU_SHAPES.split(","):
            assert Shape.parse(text).context in path.PAPER_READS
        Shape.parse(CPU_SHAPES)

    def test_sizes(self):
        geometry = Geometry(kv_heads=8, head_dim=128, page_size=64)
        shape = Shape(1000, 3)
        assert geometry.pages(shape) == 16
        assert geometry.rows(shape) == 24
        assert geometry.page_bytes() == 64 * 128 * 2 * 2  # keys and values of two bytes
        assert geometry.dense_bytes(shape) == 24 * 16 * geometry.page_bytes()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": "float32"}, "--dtype float32 is not one of bfloat16, float16"),
            ({"kv_heads": 0}, "--kv-heads must be positive"),
            ({"page_size": -16}, "--page-size must be positive"),
        ],
    )
    def test_bad_geometry_names_the_option(self, change: dict[str, Any], message: str):
        with pytest.raises(CoverageLabError, match=message):
            Geometry(**change)


class TestLayers:
    def test_keys_and_values_lie_side_by_side_in_a_pool(self):
        made = layers.make(SHAPE, GEOMETRY, CPU, 3, seed=0)
        assert len(made) == 3
        for layer in made:
            cache = layer.cache
            assert layer.query.shape == (2, 4, 64)
            assert layer.query.dtype == torch.float16
            assert layer.scale == 0.125
            assert cache.key.shape == (32, 2, 16, 64)
            assert cache.value.data_ptr() - cache.key.data_ptr() == 64 * 2
            assert page_sets.rows_as_pool(cache) is not None  # what FA3 and FlashInfer read
            assert cache.table is not None
            assert sorted(cache.table.flatten().tolist()) == list(range(32))
            assert cache.table is made[0].cache.table
        assert not torch.equal(made[0].cache.key, made[1].cache.key)
        assert not torch.equal(made[0].query, made[1].query)

    @pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 18, 19, 31, 32, 33, 250, 256])
    def test_the_current_page_has_tokens_and_is_not_full(self, context: int):
        """Lists end with it: were it empty, they would have a page more than there is."""
        shape = Shape(context, 2)
        (layer,) = layers.make(shape, GEOMETRY, CPU, 1, seed=0)
        assert layer.cache.pages_held.tolist() == [GEOMETRY.pages(shape)] * 2
        assert layer.cache.max_pages == GEOMETRY.pages(shape)
        assert (layer.cache.lengths <= context).all()
        assert (page_sets.last_tokens(layer.cache) < 16).all()

    def test_the_seed_decides(self):
        one, again, other = (layers.make(SHAPE, GEOMETRY, CPU, 1, seed)[0] for seed in (0, 0, 1))
        assert torch.equal(one.cache.key, again.cache.key)
        assert torch.equal(one.query, again.query)
        assert not torch.equal(one.cache.key, other.cache.key)

    def test_lists_begin_with_the_sink_and_end_with_the_current_page(self):
        (layer,) = layers.make(SHAPE, GEOMETRY, CPU, 1, seed=0)
        wanted = np.array([[2, 3], [9, 16]])
        pages, counts = layers.lists_of(layer.cache, wanted, seed=5)
        assert pages.dtype == counts.dtype == torch.int32
        assert counts.tolist() == wanted.tolist()
        for request in range(2):
            for head in range(2):
                found = pages[request, head, : wanted[request, head]].tolist()
                assert found == sorted(set(found))
                assert (found[0], found[-1]) == (0, 15)
        other, _ = layers.lists_of(layer.cache, wanted, seed=6)
        assert pages[1, 0, :9].tolist() != other[1, 0, :9].tolist()

    def test_the_only_page_is_sink_and_current_page(self):
        (layer,) = layers.make(Shape(10, 2), GEOMETRY, CPU, 1, seed=0)
        pages, counts = layers.lists_of(layer.cache, np.ones((2, 2), int), seed=0)
        assert counts.tolist() == [[1, 1], [1, 1]]
        assert not pages[..., 0].any()

    def test_on_a_cpu_one_layer_does(self):
        assert layers.how_many(1, 1 << 60, CPU) == 1

    @pytest.mark.parametrize(
        ("read", "held", "count"),
        [
            (100, 1, 5),  # 4 * 100 bytes of cache, and the layer itself
            (99, 1, 6),  # rounded up
            (100, 250, 3),  # no more fit into 80% of 1,000 bytes
            (1, 1, 64),
        ],
    )
    def test_on_a_gpu_the_cache_is_cold_again(
        self, monkeypatch: pytest.MonkeyPatch, read: int, held: int, count: int
    ):
        gpu(monkeypatch, cache=100, free=1000)
        assert layers.how_many(read, held, torch.device("cuda")) == count

    def test_a_layer_that_does_not_fit_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        gpu(monkeypatch, cache=100, free=2 << 30)
        with pytest.raises(CoverageLabError, match=r"one layer takes 3\.0 GiB"):
            layers.how_many(1, 3 << 30, torch.device("cuda"))

    def test_spread(self):
        assert layers.spread([1, 3]) == 0.5
        assert layers.spread(np.array([[4, 4], [4, 4]])) == 0
        assert np.isnan(layers.spread([]))
        assert np.isnan(layers.spread([0, 0]))


def gpu(monkeypatch: pytest.MonkeyPatch, cache: int, free: int) -> None:
    """Have torch tell of a GPU with this much level-2 cache and free memory."""
    properties = type("Properties", (), {"L2_cache_size": cache})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))


class Clock:
    """Time that passes only in calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self, *seconds: float) -> timing.Call:
        """Return a call that takes these seconds, one after the other."""
        left = iter(seconds)

        def spend() -> None:
            self.now += next(left)

        return spend


class TestTiming:
    def test_the_best_of_some_rounds_over_the_calls(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(timing, "CLOCKED", 3)
        clock = Clock(monkeypatch)
        calls = [clock.call(5, 2, 9), clock.call(1, 2, 1)]
        assert timing.seconds_a_call(calls, CPU) == (5 + 1) / 2

    def test_the_hosts_time_is_the_median_call(self, monkeypatch: pytest.MonkeyPatch):
        clock = Clock(monkeypatch)
        calls = [clock.call(seconds) for seconds in (100.0, 1.0, 2.0)]
        assert timing.host_seconds_a_call(calls, CPU) == 2


@pytest.fixture(scope="module")
def layer() -> layers.Layer:
    return layers.make(SHAPE, GEOMETRY, CPU, 1, seed=0)[0]


@pytest.fixture(scope="module")
def lists(layer: layers.Layer) -> tuple[Tensor, Tensor]:
    return layers.lists_of(layer.cache, np.array([[2, 5], [11, 16]]), seed=0)


class TestCheck:
    def right(self, layer: layers.Layer, lists: tuple[Tensor, Tensor]) -> Tensor:
        return reference.attend(layer.query, layer.cache, *lists, layer.scale)

    def test_the_error_is_that_of_the_worst_head(self, layer: layers.Layer, lists: tuple[Tensor, Tensor]):
        right = self.right(layer, lists)
        assert attention_error("x", right, layer, *lists) == 0
        right[1, 2] *= 1.01
        right[0, 1] *= 0.99609375
        assert attention_error("x", right, layer, *lists) == pytest.approx(0.01, rel=0.05)

    def test_rounding_passes(self, layer: layers.Layer, lists: tuple[Tensor, Tensor]):
        assert 0 < attention_error("x", self.right(layer, lists).bfloat16(), layer, *lists) < 5e-3

    def test_wrong_results_are_refused(self, layer: layers.Layer, lists: tuple[Tensor, Tensor]):
        pages, counts = lists
        fewer = counts.clone()
        fewer[1, 0] -= 1
        swapped = self.right(layer, lists)
        swapped[1, [0, 1]] = swapped[1, [1, 0]]
        poisoned = self.right(layer, lists)
        poisoned[0, 0, 7] = float("nan")
        for wrong in (
            reference.attend(layer.query, layer.cache, pages, fewer, layer.scale),
            reference.attend(layer.query, layer.cache, *page_sets.every_page(layer.cache), layer.scale),
            reference.attend(layer.query, layer.cache, *lists, 1.2 * layer.scale),
            torch.zeros_like(layer.query),
            swapped,
            poisoned,
        ):
            with pytest.raises(CoverageLabError, match=r"^kernel is wrong: a relative error of"):
                attention_error("kernel", wrong, layer, *lists)


OPTIONS = attend.AttendOptions(
    shapes=(SHAPE, Shape(512, 1)), geometry=GEOMETRY, cvs=(0.0, 0.5), baselines=("sdpa",), seed=1
)
ATTEND_KEYS = {
    *("shape", "context", "batch", "rows", "lists", "cv", "kept", "method", "us", "plan_us", "bytes"),
    *("gbps", "error", "of_dense_bandwidth", "over_floor", "over_attend", "dense_over", "layers"),
}


class TestAttend:
    @pytest.fixture(scope="class")
    def said(self) -> list[str]:
        return []

    @pytest.fixture(scope="class")
    def records(self, said: list[str]) -> list[dict[str, Any]]:
        return attend.run(OPTIONS, CPU, said.append)

    def test_a_record_for_every_shape_set_of_lists_and_method(self, records: list[dict[str, Any]]):
        assert [(r["shape"], r["lists"], r["method"]) for r in records] == [
            (shape, *rest)
            for shape in ("256x2", "512x1")
            for rest in [("all", "attend-dense"), ("all", "sdpa"), ("0", "attend"), ("0.5", "attend")]
        ]
        assert all(set(record) == ATTEND_KEYS for record in records)

    def test_what_the_records_say(self, records: list[dict[str, Any]]):
        of = {(r["shape"], r["lists"], r["method"]): r for r in records}
        dense, even = of["256x2", "all", "sdpa"], of["256x2", "0", "attend"]
        assert (dense["context"], dense["batch"], dense["rows"]) == (256, 2, 4)
        assert (dense["kept"], dense["cv"]) == (1.0, 0.0)
        assert dense["bytes"] == 4 * 16 * 16 * 64 * 4
        # 14 pages of 4 * 16: the total is 0.22 of them, rounded.
        assert even["kept"] == pytest.approx(14 / 64)
        assert even["bytes"] == 14 * 16 * 64 * 4
        assert of["256x2", "0.5", "attend"]["bytes"] == even["bytes"]
        assert of["256x2", "0.5", "attend"]["cv"] > even["cv"]
        for record in records:
            assert record["plan_us"] is None
            assert record["error"] < 5e-3
            assert record["gbps"] == pytest.approx(record["bytes"] / record["us"] / 1e3)

    def test_what_is_under_way_is_said(self, records: list[dict[str, Any]], said: list[str]):
        assert "256x2: layers (1, 0.2 MiB each)" in said
        assert "512x1: attend, lists 0.5" in said

    def test_a_spread_that_cannot_be_is_left_out_and_said(self):
        said: list[str] = []
        options = replace(OPTIONS, shapes=(SHAPE,), cvs=(0.0, 3.0), baselines=())
        found = attend.run(options, CPU, said.append)
        assert [record["lists"] for record in found] == ["all", "0"]
        assert said[0].startswith("256x2: left out CV 3: 4 lists of 2 to 16 pages that keep 0.22")

    def test_lists_of_a_trace(self, tmp_path: Path):
        trace = Trace(synthetic.write(tmp_path / "t", synthetic.Shape(requests=2, steps=3)))
        policy = parse_policy("exact/coverage:0.9")
        options = replace(OPTIONS, shapes=(SHAPE,), cvs=(), baselines=(), trace=trace, policy=policy)
        records = attend.run(options, CPU)
        assert [(record["lists"], record["method"]) for record in records] == [
            ("all", "attend-dense"),
            ("trace", "attend"),
        ]
        counts = attend.lengths.of_trace(trace, policy, 2, 2, 16, OPTIONS.seed)
        assert records[1]["kept"] == pytest.approx(counts.mean() / 16)
        assert records[1]["cv"] == pytest.approx(counts.std() / counts.mean())

    def test_no_time_of_a_wrong_baseline(self, monkeypatch: pytest.MonkeyPatch):
        cls = baselines.get("sdpa")
        right = cls.run
        monkeypatch.setattr(cls, "run", lambda self: 1.1 * right(self))
        assert "256x2: left out sdpa (sdpa is wrong: a relative error of 0.1" in self.left_out()

    def test_the_last_layer_is_checked_too(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(attend, "how_many", lambda *sizes: 3)
        cls, ran = baselines.get("sdpa"), []
        right = cls.run

        def right_on_the_first_layer(self: Any) -> Tensor:
            ran.append(self)
            return right(self) * (1.0 if self is ran[0] else 1.1)

        monkeypatch.setattr(cls, "run", right_on_the_first_layer)
        assert "256x2: left out sdpa (sdpa is wrong" in self.left_out()

    def test_a_baseline_that_fails_is_left_out(self, monkeypatch: pytest.MonkeyPatch):
        def fail(self: Any) -> Tensor:
            raise RuntimeError("no such layout\nand a long trace")

        monkeypatch.setattr(baselines.get("sdpa"), "run", fail)
        assert "256x2: left out sdpa (no such layout)" in self.left_out()

    def left_out(self) -> str:
        """Run without a record of `sdpa`; return what was said. One asked for by name ends the run."""
        said: list[str] = []
        options = replace(OPTIONS, shapes=(SHAPE,), cvs=(), strict=False)
        found = attend.run(options, CPU, said.append)
        assert [record["method"] for record in found] == ["attend-dense"]
        with pytest.raises(CoverageLabError, match=r"^baseline sdpa at 256x2: "):
            attend.run(replace(options, strict=True), CPU)
        return "\n".join(said)

    def test_our_own_kernel_must_be_right(self, monkeypatch: pytest.MonkeyPatch):
        right = attend._attend
        monkeypatch.setattr(attend, "_attend", lambda *lists: lambda: 1.1 * right(*lists)())
        with pytest.raises(CoverageLabError, match=r"^attend-dense is wrong: a relative error of 0\.1"):
            attend.run(replace(OPTIONS, shapes=(SHAPE,), cvs=()), CPU)

    def test_a_plan_is_timed_apart(self, monkeypatch: pytest.MonkeyPatch):
        cls, planned = baselines.get("sdpa"), []
        monkeypatch.setattr(cls, "plan", lambda self: planned.append(self) is None)
        _, sdpa = attend.run(replace(OPTIONS, shapes=(SHAPE,), cvs=()), CPU)
        assert sdpa["plan_us"] >= 0
        assert len(planned) == 1 + 3


def line(method: str, lists: str, us: float, of_bytes: int, shape: str = "a") -> dict[str, Any]:
    return {
        "shape": shape,
        "lists": lists,
        "method": method,
        "us": us,
        "bytes": of_bytes,
        "gbps": of_bytes / us / 1e3,
    }


class TestCompared:
    # Dense: 4 MB in 2 us, 2,000 GB/s; in shape b 6 MB in 2.4 us, 2,500 GB/s: the best.
    RECORDS = (
        line("attend-dense", "all", 2.0, 4_000_000),
        line("attend", "0", 1.0, 1_000_000),
        line("fa3-padded", "0", 4.0, 3_000_000),
        line("attend-dense", "all", 2.4, 6_000_000, "b"),
        line("attend", "0", 0.5, 1_000_000, "b"),
    )

    def test_by_hand(self):
        found = attend.compared(self.RECORDS)
        # The floor of a million bytes at 2,500 GB/s is 0.4 us; padding is read and does not lift it.
        assert [record["over_floor"] for record in found] == pytest.approx([2 / 1.6, 2.5, 10, 1, 1.25])
        assert [record["of_dense_bandwidth"] for record in found] == pytest.approx([0.8, 0.4, 0.3, 1, 0.8])
        assert [record["over_attend"] for record in found] == pytest.approx([1, 1, 4, 1, 1])

    def test_where_fa3_ran_its_dense_bandwidth_counts(self):
        found = attend.compared([*self.RECORDS, line("fa3-dense", "all", 4.0, 4_000_000)])
        assert found[1]["of_dense_bandwidth"] == pytest.approx(1.0)
        assert found[1]["over_floor"] == pytest.approx(1.0)
        assert found[-1]["over_attend"] == pytest.approx(2.0)
        # And its time where it ran, else that of our own dense attention.
        dense = {r["shape"]: r["us"] for r in found if r["method"] == "attend-dense"} | {"a": 4.0}
        wanted = [dense[record["shape"]] / record["us"] for record in found]
        assert [record["dense_over"] for record in found] == pytest.approx(wanted)

    def test_nothing_is_lost(self):
        found = attend.compared(self.RECORDS)
        assert [{key: record[key] for key in self.RECORDS[0]} for record in found] == list(self.RECORDS)


def covering(log_mass: Tensor, gamma: float, forced: tuple[int, ...] = (0, -1)) -> list[int]:
    """Return the pages that the coverage rule keeps of one row, `[G, pages]`, in float64."""
    masses = np.exp(log_mass.double().numpy())
    shares = (masses / masses.sum(1, keepdims=True)).mean(0)
    kept = sorted({range(len(shares))[page] for page in forced})
    for page in np.argsort(-shares).tolist():
        if shares[kept].sum() >= gamma:
            break
        if page not in kept:
            kept.append(page)
    return sorted(kept)


SELECT = select.SelectOptions(shapes=(Shape(128, 2),), geometry=GEOMETRY, gamma=0.8)


class TestSelect:
    @pytest.fixture(scope="class")
    def records(self) -> list[dict[str, Any]]:
        return select.run(SELECT, CPU)

    def test_a_record_for_every_stage(self, records: list[dict[str, Any]]):
        assert [r["stage"] for r in records] == ["estimate", "select", "estimate+select", "sort"]
        for record in records:
            assert record["us"] > 0
            assert {name: record[name] for name in ("shape", "context", "batch", "rows", "pages")} == {
                "shape": "128x2",
                "context": 128,
                "batch": 2,
                "rows": 4,
                "pages": 8,
            }
            assert record["rows_equal"] == 4
            assert record["gamma"] == 0.8

    def test_kept_and_cv_are_those_of_the_lists(self, records: list[dict[str, Any]]):
        _, paths = select.prepared(SELECT, SELECT.shapes[0], CPU)
        counts = np.array([len(covering(masses, 0.8)) for masses in paths[0].log_mass])
        assert records[0]["kept"] == pytest.approx(counts.mean() / 8)
        assert records[0]["cv"] == pytest.approx(counts.std() / counts.mean())

    def test_no_time_of_a_wrong_list(self, monkeypatch: pytest.MonkeyPatch):
        right = DecodePath.select

        # One page too many would have Attend read what no kernel wrote.
        def one_page_too_few(self: DecodePath) -> Any:
            found = right(self)
            self.counts[1, 1] -= 1
            return found

        monkeypatch.setattr(DecodePath, "select", one_page_too_few)
        with pytest.raises(CoverageLabError, match="select is wrong: 3 of 4 lists equal the reference"):
            select.run(SELECT, CPU)

    def test_pages_are_compared_and_not_counts_alone(self, monkeypatch: pytest.MonkeyPatch):
        right = DecodePath.select

        def another_page(self: DecodePath) -> Any:
            found = right(self)
            self.pages[0, 0, 0] = 1
            return found

        monkeypatch.setattr(DecodePath, "select", another_page)
        with pytest.raises(CoverageLabError, match="3 of 4"):
            select.run(SELECT, CPU)

    @pytest.mark.parametrize("gamma", [0.1, 0.5, 0.8, 0.98, 0.999])
    def test_sorting_gives_the_lists_of_the_rule(self, gamma: float):
        log_mass = 2 * torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(1))
        pages, counts = select.sorted_lists(log_mass, gamma)
        for row, masses in enumerate(log_mass):
            assert pages[row, : int(counts[row])].tolist() == covering(masses, gamma)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"gamma": 0.0}, r"--gamma 0 is not in \(0, 1\]"),
            ({"gamma": 1.5}, "--gamma 1.5"),
            ({"reads": (0.2, 2.0)}, r"--reads 2 is not in \(0, 1\]"),
            ({"reads": (-0.5,)}, "--reads -0.5"),
            ({"estimator": "mvra"}, "--estimator mvra is not one of mvar, mean, quest"),
            ({"shapes": (Shape(16 * 20_000, 1),)}, "has 20000 pages; at most 16384"),
        ],
    )
    def test_bad_options_are_refused_before_any_work(self, change: dict[str, Any], message: str):
        with pytest.raises(CoverageLabError, match=message):
            replace(SELECT, **change)


class TestPath:
    OPTIONS = replace(SELECT, shapes=(Shape(128, 2), Shape(256, 1)), reads=(0.5, 0.3))

    @pytest.fixture(scope="class")
    def records(self) -> list[dict[str, Any]]:
        return path.run(self.OPTIONS, CPU)

    def test_a_record_for_every_shape_and_stage(self, records: list[dict[str, Any]]):
        stages = ["estimate", "select", "estimate+select", "attend+merge", "path", "attend-dense", "sdpa"]
        assert [(r["shape"], r["stage"]) for r in records] == [
            (shape, stage) for shape in ("128x2", "256x1") for stage in stages
        ]
        for record in records:
            assert record["us"] > 0
            assert record["error"] < 2e-2
            assert record["rows_equal"] == record["rows"]
            # Mean and variance of a page are as much as the keys of two tokens of 2 * 16.
            assert record["reads"] == pytest.approx(record["kept"] + 2 / 32)

    def test_the_reads_are_those_wanted(self, records: list[dict[str, Any]]):
        for shape, wanted in (("128x2", 0.5), ("256x1", 0.3)):
            (kept,) = {r["kept"] for r in records if r["shape"] == shape}
            # Any page of any row may be the one that is too many, or several at once.
            assert wanted <= kept < wanted + 0.1

    def test_dense_attention_is_what_the_path_is_compared_with(self, records: list[dict[str, Any]]):
        for record in records:
            (dense,) = (
                r["us"] for r in records if (r["shape"], r["stage"]) == (record["shape"], "attend-dense")
            )
            assert record["dense_over"] == pytest.approx(dense / record["us"])

    def test_reads_without_metadata_of_variances(self):
        options = replace(SELECT, reads=(0.5,), estimator="mean")
        record = path.run(options, CPU)[0]
        assert record["reads"] == pytest.approx(record["kept"] + 1 / 32)

    def test_the_coverage_is_the_least_that_keeps_so_much(self):
        made, paths = select.prepared(replace(SELECT, gamma=0.9), Shape(256, 2), CPU)
        log_mass = paths[0].estimate(made[0].query)
        for wanted in (0.2, 0.4, 0.8):
            gamma = path.gamma_for(paths, made, wanted)

            def kept(gamma: float) -> float:
                return float(np.mean([len(covering(masses, gamma)) for masses in log_mass]) / 16)

            assert kept(gamma + 1e-7) >= wanted
            assert kept(gamma - 1e-5) < wanted

    def test_without_reads_they_are_the_papers_or_a_fifth(self, monkeypatch: pytest.MonkeyPatch):
        asked = []
        monkeypatch.setattr(path, "_shape", lambda *given: asked.append(given[1:3]) or [])
        shapes = [Shape(8192, 32), Shape(131_072, 4), Shape(2048, 2)]
        path.run(replace(SELECT, shapes=shapes), CPU)
        assert asked == list(zip(shapes, (0.42, 0.15, 0.22), strict=True))
        asked.clear()
        path.run(replace(SELECT, shapes=shapes, reads=(0.3, 0.6)), CPU)
        assert asked == list(zip(shapes, (0.3, 0.6, 0.3), strict=True))

    def test_no_time_of_a_wrong_path(self, monkeypatch: pytest.MonkeyPatch):
        right = DecodePath.__call__
        monkeypatch.setattr(DecodePath, "__call__", lambda self, *given: 1.1 * right(self, *given))
        with pytest.raises(CoverageLabError, match=r"the path is wrong: a relative error of 0\.1"):
            path.run(replace(SELECT, reads=(0.5,)), CPU)
