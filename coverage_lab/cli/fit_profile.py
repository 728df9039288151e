"""`coverage-lab fit-profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.cli.options import Quiet, TracePath


def fit_profile(
    trace: TracePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file of the profile.")],
    policy: Annotated[
        str, typer.Option(help="Policy whose mean page counts are taken.")
    ] = "mvar/coverage:0.98",
    by: Annotated[str, typer.Option(help="kv_head or layer: what shares a count.")] = "kv_head",
    quiet: Quiet = False,
) -> None:
    """Measure a profile on a trace, for policies like `mvar/profiled:FILE.json`."""
    from coverage_lab.cli.output import check_outputs
    from coverage_lab.policies.fit import fit_profile as fit
    from coverage_lab.policies.policy import parse_policy
    from coverage_lab.registry import unknown
    from coverage_lab.trace import Trace

    check_outputs(output)
    if by not in ("layer", "kv_head"):
        raise unknown("--by", by, ["layer", "kv_head"])
    profile = fit(Trace(trace), parse_policy(policy), by)  # type: ignore[arg-type]
    profile.save(output)
    if not quiet:
        counts = [count for layer in profile.counts for count in layer]
        typer.echo(
            f"{output}: {len(counts)} counts of {min(counts):.1f} to {max(counts):.1f} pages", err=True
        )
