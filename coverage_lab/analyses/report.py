"""One page with everything that the analyses find in some traces: no network, no scripts."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from coverage_lab import __version__
from coverage_lab.analyses import Analysis, Finding, analyses, need_map
from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coverage_lab.trace import Trace

# From what all rows need to what single heads and estimates do.
ORDER = (
    "need-map",
    "variation",
    "budgets",
    "coarsening",
    "where",
    "sinks",
    "context-growth",
    "page-size",
    "stability",
    "slots",
    "estimator-error",
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Part:
    """What one analysis found in one trace, or why it found nothing.

    Attributes
    ----------
    label : str
        Of the trace.
    picture : str
        A data URI.
    columns, rows : list
        The table as text.
    missing : str
        What the trace lacks.
    """

    label: str
    picture: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    missing: str = ""


@dataclass(frozen=True)
class Section:
    """One analysis of all traces."""

    name: str
    anchor: str
    title: str
    source: str
    options: Sequence[str]
    parts: Sequence[Part]


@dataclass(frozen=True)
class Source:
    """One trace: what it was made of."""

    label: str
    facts: Sequence[tuple[str, str]]
    manifest: str
    columns: Sequence[str]
    requests: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    """The page, and what it has beside the paper.

    Attributes
    ----------
    html : str
        Whatever stands in a trace is escaped; figures are images within the page.
    findings : list of dict
        `figure, trace, ours, ci_low, ci_high, unit, paper, note`.
    """

    html: str
    findings: list[dict[str, Any]]


def build(
    traces: Sequence[Trace], seed: int = 0, progress: Progress = lambda what, done, total: None
) -> Page:
    """Run every analysis on some traces.

    Parameters
    ----------
    traces : sequence of Trace
    seed : int
        Of the bootstrap.
    progress : callable
        Told what is being done, how much is done and how much there is.

    Returns
    -------
    Page
    """
    import matplotlib as mpl
    from jinja2 import Environment

    labels = _labels(traces)
    kinds = _kinds(seed)
    findings: dict[str, dict[str, Finding]] = {}
    sections = []
    # Text in figures stays sharp, and the same trace gives the same page.
    with mpl.rc_context({"svg.hashsalt": "coverage-lab"}):
        for place, kind in enumerate(kinds):
            parts = []
            for number, (label, trace) in enumerate(zip(labels, traces, strict=True)):
                progress(f"{kind.name} of {label}", place * len(traces) + number, len(kinds) * len(traces))
                part, found = _part(label, trace, kind)
                parts.append(part)
                for finding in found:
                    findings.setdefault(finding.what, {})[label] = finding
            sections.append(
                Section(kind.name, _anchor(kind), _title(kind), kind.source, _options(kind), parts)
            )
    sources = [_source(label, trace) for label, trace in zip(labels, traces, strict=True)]
    template = resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    html = page.render(
        version=__version__,
        labels=labels,
        beside=_beside(findings, labels),
        sections=sections,
        sources=sources,
    )
    return Page(html, _records(findings))


def _kinds(seed: int) -> list[Analysis]:
    """Return every registered analysis, those without a place last, and the needs in every grouping."""
    names = sorted(analyses.names(), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    kinds: list[Analysis] = []
    for name in names:
        groups = [{"by": group} for group in need_map.GROUPS] if name == "need-map" else [{}]
        kind = analyses.get(name)
        own = {"seed": seed} if "seed" in {field.name for field in fields(kind)} else {}
        kinds += [kind(**own, **options) for options in groups]
    return kinds


def _anchor(kind: Analysis) -> str:
    """Return a section's name on the page."""
    by = getattr(kind, "by", None)
    return f"{kind.name}-{by.replace('_', '-')}" if by else kind.name


def _labels(traces: Sequence[Trace]) -> list[str]:
    """Return a name for every trace: its model's, and where that is not enough its directory's."""
    models = [str(trace.manifest["run"]["model"]["model"]) for trace in traces]
    if len(set(models)) == len(models):
        return models
    named = [f"{model} ({trace.path.resolve().name})" for model, trace in zip(models, traces, strict=True)]
    if len(set(named)) == len(named):
        return named
    return [f"{number}: {name}" for number, name in enumerate(named, 1)]


def _part(label: str, trace: Trace, kind: Analysis) -> tuple[Part, list[Finding]]:
    try:
        table = kind.compute(trace)
    except CoverageLabError as error:
        return Part(label, missing=str(error)), []
    rows = [[_text(value) for value in row] for row in table.rows()]
    columns = [column.replace("_", " ") for column in table.columns]
    return Part(label, _picture(kind.figure(table)), columns, rows), kind.findings(table)


def _picture(figure: Figure) -> str:
    import matplotlib.pyplot as plt

    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _beside(findings: dict[str, dict[str, Finding]], labels: Sequence[str]) -> list[list[str]]:
    """Return a line for every figure of the paper: what, the paper's, ours of every trace."""
    lines = []
    for what, by_label in findings.items():
        first = next(iter(by_label.values()))
        paper = first.paper if isinstance(first.paper, str) else _value(first.paper, first.unit)
        lines.append([what, paper, *(_ours(by_label.get(label)) for label in labels)])
    return lines


def _records(findings: dict[str, dict[str, Finding]]) -> list[dict[str, Any]]:
    return [
        {
            "figure": what,
            "trace": label,
            "ours": finding.ours,
            "ci_low": finding.low,
            "ci_high": finding.high,
            "unit": finding.unit,
            "paper": finding.paper,
            "note": finding.note,
        }
        for what, by_label in findings.items()
        for label, finding in by_label.items()
    ]


def _ours(finding: Finding | None) -> str:
    if finding is None:
        return "-"
    text = _value(finding.ours, finding.unit)
    if math.isfinite(finding.low):
        text += f" ({_value(finding.low, finding.unit)} to {_value(finding.high, finding.unit)})"
    return f"{text}, {finding.note}" if finding.note else text


def _value(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.1%}" if unit == "share" else f"{value:.2f}"


def _source(label: str, trace: Trace) -> Source:
    run, geometry = trace.manifest["run"], trace.geometry
    requests = trace.requests
    rows = sum(shard.rows for shard in trace.shards)
    tokens = requests["prompt_tokens"].to_numpy()
    layers = geometry["layers"]
    facts = {
        "directory": trace.path.resolve().name,
        "model": ", ".join(
            str(run["model"][name])
            for name in ("model", "architecture", "dtype", "device", "weights")
            if run["model"].get(name)
        ),
        "geometry": f"{len(layers)} layers, {geometry['query_heads']} query heads, {geometry['kv_heads']} KV "
        f"heads, D {geometry['head_dim']}",
        "data": f"{run['dataset']['name']}; {requests['task'].n_unique()} tasks",
        "requests": f"{len(trace.shards)} recorded of {len(requests)}; prompts of {tokens.min():,} to "
        f"{tokens.max():,} tokens",
        "rows": f"{rows:,} (request, layer, KV head, step)",
        "pages": f"{trace.page_size} tokens",
        "recorded": f"{run['record']}; estimators {', '.join(trace.estimators) or 'none'}; "
        f"gammas {', '.join(f'{gamma:g}' for gamma in trace.gammas)}",
        "versions": ", ".join(f"{name} {value}" for name, value in run.get("versions", {}).items() if value),
    }
    columns = [
        name
        for name in ("request_id", "task", "prompt_tokens", "steps", "stop", "score", "answers", "error")
        if name in requests.columns and not requests[name].is_null().all()
    ]
    lines = [[_text(value) for value in line] for line in requests.select(columns).iter_rows()]
    manifest = {name: value for name, value in trace.manifest.items() if name != "files"}
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    return Source(label, list(facts.items()), text, [name.replace("_", " ") for name in columns], lines)


def _options(kind: Analysis) -> list[str]:
    """Return the options of an analysis, as its command takes them."""
    shown = {name: value for name, value in vars(kind).items() if name != "seed"}
    return [f"--{name} {value}" for name, value in shown.items()]


def _title(kind: Analysis) -> str:
    by = getattr(kind, "by", None)
    group = f", by {by.replace('_', ' ').replace('kv', 'KV')}" if by else ""
    return kind.title[0].upper() + kind.title[1:] + group


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        value = " | ".join(map(str, value))
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
