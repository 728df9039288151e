"""Comparisons of the paper, run again: one file each, every figure beside the paper's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coverage_lab.analyses import Finding
from coverage_lab.replay.report import CONTROL
from coverage_lab.replay.requests import Outcome, Progress


@dataclass(frozen=True)
class Settings:
    """How much to run, and where to keep it.

    Attributes
    ----------
    limit, steps : int, optional
        At most so many requests, of all tasks in turn, and steps of each.
    directory : Path, optional
        Where finished requests are kept, one file a part.
    backend : {"reference", "triton"}, optional
        What runs the policies; the kernels where they can by default.
    seed : int
        Seed of the bootstrap.
    progress : callable
        Called with the request, runs done and runs in all.
    """

    limit: int | None = None
    steps: int | None = None
    directory: Path | None = None
    backend: str | None = None
    seed: int = 0
    progress: Progress = lambda request, done, all_: None

    def part(self, name: str) -> dict[str, Any]:
        """Return the options of a part: how much to run, and the file that keeps it."""
        output = None if self.directory is None else self.directory / f"{name}.jsonl"
        return {"limit": self.limit, "steps": self.steps, "output": output, "progress": self.progress}


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes
    ----------
    title : str
    findings : list of Finding
    outcomes : list of Outcome
        Of the runs behind it.
    lines : list of dict
        What is behind the findings: the summary of a replay, or times.
    """

    title: str
    findings: list[Finding]
    outcomes: list[Outcome] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def joined(self) -> Outcome:
        """Return the outcomes as one."""
        failed = {name: error for outcome in self.outcomes for name, error in outcome.failed.items()}
        records = [record for outcome in self.outcomes for record in outcome.records]
        return Outcome(records, failed, max((outcome.empty for outcome in self.outcomes), default=0))


def _of_control(paper: float | None) -> str:
    return "numerical error" + ("" if paper is None else "; the paper's in bf16, at 128k")


def reads_and_divergence(
    lines: list[dict[str, Any]], paper: dict[str, tuple[float | None, float | None]]
) -> list[Finding]:
    """Return two findings a policy: pages read, and KL to dense; `paper` has both by policy."""
    findings = []
    for line in lines:
        reads, divergence = paper.get(line["policy"], (None, None))
        control = line["policy"] == CONTROL
        metadata = f"and {line['reads_metadata']:.1%} for the choice" if line["reads_metadata"] else ""
        findings += [
            Finding(
                f"{line['policy']}: pages read",
                line["reads"],
                reads,
                unit="share",
                note="" if control else metadata,
            ),
            Finding(
                f"{line['policy']}: KL to dense",
                line["kl_mean"],
                divergence,
                line["ci_low"],
                line["ci_high"],
                unit="nats",
                note=_of_control(divergence) if control else "",
            ),
        ]
    return findings
