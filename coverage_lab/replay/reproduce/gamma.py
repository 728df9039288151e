"""KL and reads over gamma (paper, appendix A and 5.5.1)."""

from __future__ import annotations

from coverage_lab.collectors.models import LoadedModel
from coverage_lab.policies.policy import parse_policy
from coverage_lab.replay.report import CONTROL, replay, summarize
from coverage_lab.replay.reproduce import Report, Settings, reads_and_divergence
from coverage_lab.trace import Trace

GAMMAS = (0.9, 0.95, 0.98, 0.99, 0.995)
ESTIMATORS = ("exact", "mvar")
# Llama-3.1-8B, 60 LongBench requests; the control on RULER at 128k.
PAPER: dict[str, tuple[float | None, float | None]] = {
    CONTROL: (1.0, 0.0003),
    "exact/coverage:0.95": (0.239, 0.00348),
    "mvar/coverage:0.98": (0.371, 0.00441),
    "mvar/coverage:0.995": (0.617, 0.00095),
}


def run(trace: Trace, loaded: LoadedModel, settings: Settings) -> Report:
    """Replay the coverage rule over gamma, on exact and on estimated masses."""
    policies = [parse_policy(f"{name}/coverage:{gamma}") for name in ESTIMATORS for gamma in GAMMAS]
    outcome = replay(trace, loaded, policies, backend=settings.backend, **settings.part("gamma"))
    lines = summarize(outcome.records, settings.seed)
    title = "The coverage rule over gamma"
    return Report(title, reads_and_divergence(lines, PAPER), [outcome], lines)
