"""`coverage-lab reproduce NAME`."""

from __future__ import annotations

import math
from dataclasses import asdict
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coverage_lab.cli.options import (
    Backend,
    CsvPath,
    Device,
    JsonPath,
    Limit,
    ModelPath,
    Quiet,
    Seed,
    Steps,
    TracePath,
)
from coverage_lab.wording import counted

if TYPE_CHECKING:
    from coverage_lab.analyses import Finding
    from coverage_lab.replay.reproduce import Report

app = typer.Typer(
    help="Run a comparison of the paper, and print its figures beside ours.", no_args_is_help=True
)

_TRACED = {
    "estimators": "Estimators side by side, and where the mean of the keys fails (appendix A).",
    "equal-reads": "The coverage rule against other budgets that read as much (5.5.2).",
    "granularity": "Lists for query heads, KV heads and layers at the same error (2.2, 5.5.3).",
    "gamma": "KL and reads over gamma (5.5.1, appendix A).",
    "tpot": "Time per output token with CUDA graphs, on a GPU (5.5.4).",
}

# A comparison has no option that would mean nothing to it.
_WITHOUT = {"tpot": {"backend", "limit", "steps", "to"}, "granularity": {"backend"}}


def _traced(name: str) -> Any:
    without = _WITHOUT.get(name, set())

    def command(
        trace: TracePath,
        model: ModelPath = None,
        device: Device = None,
        backend: Backend = None,
        limit: Limit = None,
        steps: Steps = None,
        to: Annotated[
            Path | None,
            typer.Option(
                "--output", "-o", help="Keep finished requests in this directory; a stopped run goes on."
            ),
        ] = None,
        seed: Seed = 0,
        json: JsonPath = None,
        csv: CsvPath = None,
        quiet: Quiet = False,
    ) -> None:
        from coverage_lab.cli import output
        from coverage_lab.cli.running import finish, kept_in, running
        from coverage_lab.errors import CoverageLabError
        from coverage_lab.replay.reproduce import Settings
        from coverage_lab.replay.requests import load_traced_model, provenance
        from coverage_lab.trace import Trace

        output.check_outputs(json, csv, directory=to)
        data = Trace(trace)
        if to is not None:
            if to.is_file():
                raise CoverageLabError(f"{to} is a file; give a directory with -o")
            try:
                to.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CoverageLabError(f"can't make {to}: {error.strerror or error}") from None
        comparison = import_module(f"coverage_lab.replay.reproduce.{name.replace('-', '_')}")
        with running(quiet, stopped="" if "to" in without else kept_in(to)) as progress:
            loaded = load_traced_model(data, model, device)
            settings = Settings(limit, steps, to, backend, seed, progress)
            report = comparison.run(data, loaded, settings)
        described = f"{loaded.identity['model']} in {loaded.identity['dtype']} on {loaded.identity['device']}"
        write(report, described, provenance(data, loaded, limit=limit, steps=steps, seed=seed), json, csv)
        finish(report.joined(), quiet)

    command.__doc__ = _TRACED[name]
    whole = signature(command, eval_str=True)
    taken = [one for one in whole.parameters.values() if one.name not in without]
    command.__signature__ = whole.replace(parameters=taken)  # type: ignore[attr-defined]
    return command


for _name in _TRACED:
    app.command(_name)(_traced(_name))


def write(
    report: Report, described: str, source: dict[str, Any], json: Path | None, csv: Path | None
) -> None:
    """Write the findings where asked, or print them as a table.

    JSON has what is behind them too: the lines of the summary, and the figures of every run.
    """
    from coverage_lab.cli import output

    requests = len({record["request_id"] for outcome in report.outcomes for record in outcome.records})
    joined = report.joined()
    head = {
        "title": report.title,
        **source,
        "requests": requests,
        "failed": joined.failed,
        "lines": report.lines,
        "runs": [
            {name: value for name, value in record.items() if not isinstance(value, list)}
            for record in joined.records
        ],
    }
    # Lines that belong to the one before are indented in the table alone.
    records = [asdict(finding) | {"what": finding.what.strip()} for finding in report.findings]
    if output.write_records(records, json, csv, head):
        return
    rows = [
        [
            finding.what,
            finding.paper if isinstance(finding.paper, str) else _text(finding.paper, finding.unit),
            _text(finding.ours, finding.unit),
            _interval(finding),
            finding.note,
        ]
        for finding in report.findings
    ]
    title = f"{report.title}: {described}" + (f", {counted(requests, 'request')}" if report.outcomes else "")
    output.print_table(output.console(), title, ["", "paper", "ours", "95% interval", "note"], rows, ["note"])


def _text(value: float | None, unit: str) -> str:
    from coverage_lab.cli import output

    if value is None or math.isnan(value):
        return "-"
    forms = {"share": output.percent, "nats": lambda v: f"{v:.3g}", "log": lambda v: f"{v:+.1f}"}
    return forms.get(unit, lambda v: f"{v:.2f}")(value)


def _interval(finding: Finding) -> str:
    if finding.low != finding.low:  # NaN
        return "-"
    return f"{_text(finding.low, finding.unit)}..{_text(finding.high, finding.unit)}"
