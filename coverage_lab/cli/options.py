"""Options and readers that verbs share."""

from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.errors import CoverageLabError

TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", help="Directory written by `coverage-lab collect`.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write the records as JSON; - prints them alone.")
]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the records as CSV; - prints them alone.")]
FigurePath = Annotated[Path | None, typer.Option("--figure", help="Draw to this file (.png, .svg or .pdf).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the bootstrap.")]

# Of verbs that run the traced model on its requests.
ModelPath = Annotated[
    str | None, typer.Option("--model", help="Where the traced model is now, if not where it was.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; by default a GPU if any.")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Of replays: reference (plain torch) or triton (the kernels); by default triton where it can.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="At most this many requests, of all tasks in turn.")
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="At most this many steps a request.")]
Kept = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Keep finished requests in this file; a stopped run goes on."),
]


def names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Split a comma-separated list of numbers."""
    try:
        return tuple(float(part) for part in names(text))
    except ValueError:
        raise CoverageLabError(f"{option} {text!r} is no comma-separated list of numbers") from None
