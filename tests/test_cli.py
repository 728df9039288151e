"""The commands that read traces, as a shell runs them: output, exit codes, messages."""

import json
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
        assert "counts pages of 16 tokens, the trace has pages of 32" in refused(
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
