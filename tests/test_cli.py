"""The commands that read traces or time kernels, as a shell runs them: output, exit codes, messages."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import synthetic

from coverage_lab.cli import main
from coverage_lab.trace.schema import oracle_column

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; returns its exit code, standard output and standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coverage-lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        said = capsys.readouterr()
        assert isinstance(code, int)
        return code, said.out, said.err

    return command


def refused(run: Run, *arguments: object) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


class TestComparePolicies:
    def test_both_tables(self, run: Run, synthetic_trace: Path):
        code, out, err = run("compare-policies", synthetic_trace)
        assert (code, err) == (0, "")
        assert "Same guarantee: budgets that give 90% of rows 0.95 of their mass" in out
        assert "Same reads: budgets that read as much as mvar/coverage:0.98" in out
        for policy in ("exact/coverage:", "mvar/fixed:", "mvar/profiled:per-kv_head", "exact/window:"):
            assert out.count(policy) == 2
        assert "256 rows of 4 requests" in out
        assert "4 are too few to trust them" in out
        assert "Same guarantee, profiled: quantile of the need, fitted on the other half" in out
        assert "-0.0%" not in out

    def test_json_and_csv_hold_the_same_lines(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        code, out, _ = run("compare-policies", synthetic_trace, "--json", "-", "--csv", tmp_path / "t.csv")
        records = json.loads(out)
        assert code == 0
        assert pl.read_csv(tmp_path / "t.csv")["policy"].to_list() == [r["policy"] for r in records]
        assert {record["table"] for record in records} == {"same_guarantee", "same_reads"}

    def test_policies_as_given(self, run: Run, synthetic_trace: Path):
        policies = ["exact/coverage:0.9", "mvar/fixed:3", "mvar/proportional:0.5@layer"]
        _, out, _ = run("compare-policies", synthetic_trace, "--json", "-", "--policies", *policies)
        assert [record["policy"] for record in json.loads(out)] == policies

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
    def test_figures(self, run: Run, synthetic_trace: Path, tmp_path: Path, kind: str):
        file = tmp_path / f"f.{kind}"
        assert run("compare-policies", synthetic_trace, "--figure", file)[0] == 0
        assert file.stat().st_size > 5000

    def test_a_narrow_screen_drops_columns_and_says_so(
        self, run: Run, synthetic_trace: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("COLUMNS", "90")
        _, out, _ = run("compare-policies", synthetic_trace)
        assert "Left out, for want of width: metadata" in out

    def test_one_request(self, run: Run, tmp_path: Path):
        alone = synthetic.write(tmp_path / "t", synthetic.Shape(requests=1, steps=3))
        _, out, _ = run("compare-policies", alone)
        assert "profiled" not in out.replace("no profiles", "")
        assert "18 rows of 1 request." in out
        assert "One request: no profiles" in out

    def test_bad_arguments(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        command = ("compare-policies", synthetic_trace)
        assert "unexpected argument 'mvar/fixed:3'" in refused(run, *command, "mvar/fixed:3")
        assert "--anchor is for matched reads" in refused(
            run, *command, "--policies", "mvar/fixed:3", "--anchor", "mvar/fixed:3"
        )
        assert "the trace comes first" in refused(
            run, "compare-policies", "--policies", "mvar/fixed:3", "mvar/fixed:4", synthetic_trace
        )
        assert "did you mean 'coverage'" in refused(run, *command, "--anchor", "mvar/coverag:0.9")
        assert "ends in a colon" in refused(run, *command, "--policies", "exact/coverage:")
        assert "must end in .png" in refused(run, *command, "--figure", tmp_path / "f.jpeg")
        assert "no directory" in refused(run, *command, "--json", tmp_path / "none" / "f.json")
        assert "stands for two" in refused(run, *command, "--policies", "exact/profiled:per-layer")
        assert "target coverage 1.5 is not in (0, 1]" in refused(run, *command, "--target-coverage", "1.5")
        assert "no trace at" in refused(run, "compare-policies", tmp_path / "none")

    def test_a_damaged_trace(self, run: Run, tmp_path: Path):
        path = synthetic.write(tmp_path / "t", synthetic.Shape(requests=2))
        shard = sorted((path / "rows").iterdir())[1]
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        for command in ("compare-policies", "variation"):
            assert "was altered" in refused(run, command, path)


class TestFitProfile:
    def test_a_profile_is_used_on_pages_of_its_size_alone(
        self, run: Run, synthetic_trace: Path, tmp_path: Path
    ):
        file = tmp_path / "p.json"
        code, out, err = run("fit-profile", synthetic_trace, "-o", file)
        assert (code, out) == (0, "")
        assert "8 counts of" in err
        assert json.loads(file.read_text())["fitted_on"]["page_size"] == 16
        policy = f"mvar/profiled:{file}"
        _, out, _ = run("compare-policies", synthetic_trace, "--json", "-", "--policies", policy)
        assert json.loads(out)[0]["policy"] == policy
        shape = synthetic.Shape(requests=2, layers=4, page_size=32)
        other = synthetic.write(tmp_path / "other", shape)
        assert "counts pages of 16 tokens, and here they have 32" in refused(
            run, "compare-policies", other, "--policies", policy
        )

    def test_bad_arguments(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        command = ("fit-profile", synthetic_trace, "-o", tmp_path / "p.json")
        assert "unknown --by 'head'" in refused(run, *command, "--by", "head")
        assert not (tmp_path / "p.json").exists()


class TestVariation:
    def test_the_table(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        code, out, _ = run("variation", synthetic_trace, "--figure", tmp_path / "v.png")
        assert code == 0
        assert "C*(0.95) is the fewest pages" in out
        assert "0.216" in out
        assert (tmp_path / "v.png").stat().st_size > 5000

    def test_the_papers_values_are_of_its_gamma(self, run: Run, synthetic_trace: Path):
        _, out, _ = run("variation", synthetic_trace, "--gamma", "0.9", "--json", "-")
        assert {line["paper"] for line in json.loads(out)} == {None}

    def test_other_gammas(self, run: Run, synthetic_trace: Path):
        assert f"no column '{oracle_column(0.97)}'" in refused(
            run, "variation", synthetic_trace, "--gamma", "0.97"
        )


# Two KV heads over 16 or 8 pages: the kernels run in an interpreter where there is no GPU.
LAYER = (
    *("--kv-heads", 2, "--group", 2, "--head-dim", 64, "--page-size", 16, "--dtype", "float16"),
    *("--device", "cpu"),
)
ATTEND = ("bench", "attend", "--shapes", "256x2", *LAYER)
BENCHES = {
    "attend": ATTEND,
    "path": ("bench", "path", "--shapes", "128x1", "--reads", "0.5", *LAYER),
    "select": ("bench", "select", "--shapes", "128x1", "--gamma", "0.9", *LAYER),
}


@pytest.fixture
def _one_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coverage_lab.bench.timing.CLOCKED", 1)


@pytest.mark.usefixtures("_one_repeat")
class TestBench:
    @pytest.mark.parametrize(
        ("name", "title", "column"),
        [
            ("attend", "Attention, one layer", "over"),
            ("path", "Decode path, one layer", "attend+merge"),
            ("select", "Selection, one layer", "stage"),
        ],
    )
    def test_the_table_and_that_it_says_nothing_about_the_kernels(
        self, run: Run, name: str, title: str, column: str
    ):
        code, out, err = run(*BENCHES[name])
        assert code == 0
        geometry = "2 KV heads, 2 query heads each, D 64, 16-token pages, float16"
        assert out.startswith(f"{title} (Triton's interpreter): {geometry}\n")
        assert column in out
        first = err.splitlines()[0]
        assert first == "no GPU: Triton's interpreter is timed, which says nothing about the kernels"

    def test_plain_torch_is_not_taken_for_the_kernels(self, run: Run, tmp_path: Path):
        """Where no kernel runs, title and records say so, also without the notices."""
        options = ("--cv", 0, "--dtype", "bfloat16", "--json", tmp_path / "a.json", "-q")
        _, out, err = run(*ATTEND, *options)
        assert out.startswith("Attention, one layer (plain torch, not the kernels): ")
        assert err == ""
        document = json.loads((tmp_path / "a.json").read_text())
        assert {record["backend"] for record in document["records"]} == {document["backend"]} == {"reference"}

    @pytest.mark.parametrize("name", BENCHES)
    def test_json(self, run: Run, tmp_path: Path, name: str):
        # A name that a shell would take apart.
        csv = tmp_path / "a b.csv"
        code, out, err = run(*BENCHES[name], "--json", "-", "--csv", csv, "-q")
        assert (code, err) == (0, "")
        document = json.loads(out)
        keys = {"benchmark", "command", "machine", "backend", "geometry", "records"}
        assert set(document) == keys | ({"left_out"} if name == "attend" else set())
        assert document["benchmark"] == name
        words = shlex.split(document["command"])
        assert words == ["coverage-lab", *map(str, BENCHES[name]), "--json", "-", "--csv", str(csv), "-q"]
        assert {"coverage-lab", "python", "torch"} <= set(document["machine"]["versions"])
        assert document["machine"]["device"]
        assert document["geometry"] == {
            "kv_heads": 2,
            "group": 2,
            "head_dim": 64,
            "page_size": 16,
            "dtype": "float16",
        }
        assert len(document["records"]) >= 4
        assert all(record["us"] > 0 for record in document["records"])
        assert pl.read_csv(csv)["us"].to_list() == [record["us"] for record in document["records"]]

    def test_attend_with_a_trace_and_a_figure(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        options = ("--cv", "0,0.5,3", "--trace", synthetic_trace, "--policy", "exact/coverage:0.9")
        figure, file = tmp_path / "f.png", tmp_path / "a.json"
        code, _, err = run(*ATTEND, *options, "--figure", figure, "--json", file)
        assert code == 0
        assert figure.stat().st_size > 5000
        records = json.loads(file.read_text())["records"]
        assert [(record["lists"], record["method"]) for record in records] == [
            ("all", "attend-dense"),
            ("all", "sdpa"),
            ("0", "attend"),
            ("0.5", "attend"),
            ("trace", "attend"),
        ]
        assert "left out: fa3-dense (needs an NVIDIA GPU)" in err
        assert "256x2: left out CV 3: " in err

    @pytest.mark.parametrize(
        ("baselines", "methods"),
        [("none", {"attend", "attend-dense"}), ("sdpa", {"attend", "attend-dense", "sdpa"})],
    )
    def test_baselines_as_given(self, run: Run, baselines: str, methods: set[str]):
        _, out, err = run(*ATTEND, "--cv", 0, "--baselines", baselines, "--json", "-")
        assert {record["method"] for record in json.loads(out)["records"]} == methods
        assert "left out" not in err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--shapes", "8kb32"), "shape '8kb32' is not like 8kx32"),
            (("--shapes", ","), "names no shape"),
            (("--shapes", "16x3000"), "6000 rows (requests x KV heads); at most 4096"),
            (("--head-dim", 48), "--head-dim: 48 is not one of"),
            (("--page-size", 8), "--page-size: 8 is not one of"),
            (("--group", 17), "17 query heads a KV head; 1 to 16 are possible"),
            (("--kv-heads", 0), "--kv-heads must be positive"),
            (("--dtype", "float32"), "--dtype float32 is not one of bfloat16, float16"),
            (("--device", "gpu"), "--device gpu is not a device; cpu, cuda and cuda:1 are"),
            (("--device", "meta"), "--device meta is not a device"),
            (("--seed", -1), "'--seed'"),
        ],
    )
    @pytest.mark.parametrize("name", BENCHES)
    def test_bad_layers_are_refused(self, run: Run, name: str, options: tuple[object, ...], message: str):
        assert message in refused(run, *BENCHES[name], "-q", *options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--baselines", "nonsense"), "unknown baseline 'nonsense'"),
            (("--baselines", "fa3-dens"), "did you mean 'fa3-dense'"),
            (("--baselines", "sdpa,fa3-dense"), "baseline fa3-dense: needs an NVIDIA GPU"),
            (("--cv", "abc"), "--cv 'abc' is no comma-separated list of numbers"),
            (("--cv=-0.5",), "CV -0.5 is not a number from 0 on"),
            (("--cv", "nan"), "CV nan is not a number"),
            (("--kept", 2), "kept fraction 2 is not in (0, 1]"),
            (("--trace", "none"), "no trace at none"),
            (("--figure", "f.jpeg"), "must end in .png"),
        ],
    )
    def test_bad_lists_are_refused(self, run: Run, options: tuple[object, ...], message: str):
        assert message in refused(run, *ATTEND, "-q", *options)

    def test_bad_budgets_are_refused(self, run: Run):
        for name in ("path", "select"):
            assert "--estimator mvra is not one of mvar" in refused(
                run, *BENCHES[name], "-q", "--estimator", "mvra"
            )
        assert "--gamma 2 is not in (0, 1]" in refused(run, *BENCHES["select"], "-q", "--gamma", 2)
        assert "--reads 2 is not in (0, 1]" in refused(run, *BENCHES["path"], "-q", "--reads", 2)
        assert "--reads 'x' is no comma-separated" in refused(run, *BENCHES["path"], "-q", "--reads", "x")

    @pytest.mark.parametrize(("there", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
    def test_a_gpu_that_is_not_there(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, there: int, device: str
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda: there)
        for command in BENCHES.values():
            assert f"--device {device}: there is no such CUDA device" in refused(
                run, *command, "-q", "--device", device
            )

    def test_no_figure_or_file_is_left_of_a_refused_run(self, run: Run, tmp_path: Path):
        file = tmp_path / "a.json"
        refused(run, *ATTEND, "-q", "--kept", 2, "--json", file, "--figure", tmp_path / "f.png")
        assert list(tmp_path.iterdir()) == []


class TestBalance:
    def test_drawn_lists(self, run: Run, tmp_path: Path):
        code, out, err = run("balance", "--figure", tmp_path / "b.png")
        assert (code, err) == (0, "")
        assert "128 lists at 32kx16: 22.0% of 512 pages, CV 0.75; 132 multiprocessors, 2 blocks each" in out
        for title in ("rectangular grid", "FA3 splits", "self-planning (paper)", "even split (coverage-lab)"):
            assert title in out
        assert (tmp_path / "b.png").stat().st_size > 5000

    def test_a_trace(self, run: Run, synthetic_trace: Path):
        code, out, _ = run("balance", synthetic_trace, "--shape", "8kx4", "--kv-heads", 2, "--page-size", 16)
        assert code == 0
        assert "8 lists at 8kx4" in out

    def test_json_holds_the_table(self, run: Run, synthetic_trace: Path):
        options = ("--multiprocessors", 4, "--resident", 1, "--json", "-")
        _, out, _ = run("balance", synthetic_trace, *options)
        document = json.loads(out)
        assert document["lists"]["rows"] == 128
        division = {r["scheme"]: r for r in document["records"]}
        assert list(division) == ["rectangular", "buckets", "fa3", "flashinfer", "self-planning", "even"]
        assert division["even"]["blocks"] == 4

    def test_the_spread_decides_and_the_seed_which_lists_of_a_trace(self, run: Run, synthetic_trace: Path):
        def lines(*options: object) -> str:
            return run("balance", "--csv", "-", *options)[1]

        assert lines() == lines()
        assert lines("--cv", 0) != lines()
        assert lines(synthetic_trace) == lines(synthetic_trace)
        assert lines(synthetic_trace, "--seed", 1) != lines(synthetic_trace)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--shape", "8k"), "shape '8k' is not like 8kx32"),
            (("--cv", 9), "take a smaller CV or a longer context"),
            (("--cv", "nan"), "CV nan is not a number"),
            (("--kept", 0), "kept fraction 0 is not in (0, 1]"),
            (("--multiprocessors", 0), "--multiprocessors and --resident must be positive"),
            (("--resident", -1), "must be positive"),
            (("--page-size", 0), "--page-size must be positive"),
            (("--seed", -1), "'--seed'"),
            (("--figure", "f.gif"), "must end in .png"),
            (("none",), "no trace at none"),
        ],
    )
    def test_bad_arguments(self, run: Run, options: tuple[object, ...], message: str):
        assert message in refused(run, "balance", *options)

    def test_bad_policies_and_traces(self, run: Run, synthetic_trace: Path, tmp_path: Path):
        assert "did you mean 'coverage'" in refused(
            run, "balance", synthetic_trace, "--policy", "mvar/coverag:0.9"
        )
        assert "--estimators exact,mvar,quest" in refused(
            run, "balance", synthetic_trace, "--policy", "quest/coverage:0.9"
        )
