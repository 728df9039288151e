"""Tables for people, records for programs, figures."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from coverage_lab.errors import CoverageLabError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STDOUT = Path("-")
FIGURE_TYPES = (".png", ".svg", ".pdf")


def console() -> Console:
    """Return a console; where its output goes to a file, it is as wide as tables need, or as COLUMNS says."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=200)


def check_outputs(*paths: Path | None, figure: Path | None = None, directory: Path | None = None) -> None:
    """Raise CoverageLabError for an output that can't be written, before any work is done.

    `directory` is one that is made, the others are files.
    """
    if paths.count(STDOUT) > 1:
        raise CoverageLabError("--json - and --csv - can't both go to standard output; give one a file")
    for path in (*paths, figure):
        if path is not None and path != STDOUT and not path.absolute().parent.is_dir():
            raise CoverageLabError(f"no directory {path.parent} to write {path.name} into; make it first")
        if path is not None and path.is_dir():
            raise CoverageLabError(f"{path} is a directory; name a file in it")
    named = (*paths, figure, directory)
    files = [path.resolve() for path in named if path is not None and path != STDOUT]
    for path in files:
        if files.count(path) > 1:
            raise CoverageLabError(f"{path.name} is named for two outputs; give each a file of its own")
    if figure is not None and figure.suffix.lower() not in FIGURE_TYPES:
        raise CoverageLabError(f"--figure {figure} must end in {', '.join(FIGURE_TYPES)}")


def write_records(
    records: Sequence[dict[str, Any]],
    json_path: Path | None,
    csv_path: Path | None,
    head: dict[str, Any] | None = None,
) -> bool:
    """Write records where asked; True if they went to standard output, where a table would be in the way.

    With a `head`, the JSON is an object of its fields and `records`, else a list.
    """
    import polars as pl

    if json_path is not None:
        finite = [_finite(record) for record in records]
        document = finite if head is None else {**_finite(head), "records": finite}
        write_text(json_path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if csv_path is not None:
        frame = pl.DataFrame([_finite(record) for record in records], infer_schema_length=None)
        write_text(csv_path, frame.write_csv())
    return STDOUT in (json_path, csv_path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix."""
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise CoverageLabError(f"can't write {path}: {error.strerror or error}") from None


def print_table(
    screen: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    droppable: Sequence[str] = (),
) -> None:
    """Print a table; every column but the first is right-aligned.

    Where the screen is too narrow, `droppable` columns are left out, the first one first, and a line says so.
    """
    left_out: list[str] = []
    while True:
        drawn = _table(columns, rows, left_out)
        natural = Measurement.get(screen, screen.options.update(width=10_000), drawn).maximum
        if natural <= screen.width or len(left_out) == len(droppable):
            break
        left_out.append(droppable[len(left_out)])
    # A title of the table's own would be broken to its width.
    screen.print(Text(title, style="bold"), soft_wrap=True)
    # What is still too wide goes over the edge, and is not cut.
    wide = Console(file=screen.file, width=max(natural, screen.width), force_terminal=screen.is_terminal)
    wide.print(drawn)
    if left_out:
        names = ", ".join(" ".join(name.replace("-\n", "").split()) for name in left_out)
        screen.print(f"Left out, for want of width: {names}. --json and --csv have them.", highlight=False)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_out: Sequence[str]) -> Table:
    drawn = Table(box=SIMPLE_HEAD)
    shown = [place for place, column in enumerate(columns) if column not in left_out]
    for place in shown:
        drawn.add_column(
            columns[place], justify="right" if place else "left", no_wrap=True, vertical="bottom"
        )
    for row in rows:
        drawn.add_row(*(row[place] for place in shown))
    return drawn


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with a fixed number of decimals, or a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a fraction in percent."""
    return (
        "-"
        if value is None or not math.isfinite(value)
        else f"{round(100 * value, digits) + 0.0:.{digits}f}%"
    )


def interval(low: float, high: float, form: str = ".2g") -> str:
    """Return the two ends, or a dash where there is no interval, or none to speak of."""
    return "-" if math.isnan(low) or low == high == 0 else f"{low:{form}}..{high:{form}}"


def write_text(path: Path, text: str) -> None:
    """Write text to a file, or to standard output."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CoverageLabError(f"can't write {path}: {error.strerror or error}") from None


def _finite(value: Any) -> Any:
    """Return a JSON-ready value with None in place of numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
