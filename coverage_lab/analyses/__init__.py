"""Questions asked of a trace. A new one is a new file with a registered class.

`compute` returns a tidy frame, `plot` draws it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from coverage_lab.registry import Registry

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from coverage_lab.trace import Trace


@dataclass(frozen=True)
class Finding:
    """A figure of ours beside the paper's.

    Attributes
    ----------
    what : str
    ours : float
    paper : float or str or None
        The paper's figure, or a range; None where it gives none.
    low, high : float
        95% interval over requests; NaN where there is none.
    unit : {"share", "nats", "ratio", "ms", "log"}
    note : str
    """

    what: str
    ours: float
    paper: float | str | None = None
    low: float = float("nan")
    high: float = float("nan")
    unit: str = "ratio"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Analysis(ABC):
    """Base class of analyses; fields are options, of the command line too.

    Attributes
    ----------
    title : str
        The question, in a few words.
    source : str
        Where the paper asks it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def compute(self, trace: Trace) -> pl.DataFrame:
        """Return what was found, a line a finding.

        Raises
        ------
        CoverageLabError
            If the trace lacks a column, naming the option of `collect` that records it.
        """

    @abstractmethod
    def plot(self, table: pl.DataFrame, ax: Axes | None = None) -> Axes:
        """Draw the table of `compute`; on the current axes by default."""

    def findings(self, table: pl.DataFrame) -> list[Finding]:
        """Return what the table has beside a figure of the paper."""
        return []

    def figure(self, table: pl.DataFrame) -> Figure:
        """Draw the table in a figure of its own."""
        import matplotlib.pyplot as plt

        drawn, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
        self.plot(table, ax)
        return drawn


def beside_paper(
    table: pl.DataFrame,
    value: str,
    what: Callable[[dict[str, Any]], str],
    unit: str = "ratio",
    note: Callable[[dict[str, Any]], str] = lambda line: "",
) -> list[Finding]:
    """Return a finding for every line of a table that has a `paper`; its interval is `ci_low, ci_high`."""
    return [
        Finding(what(line), line[value], line["paper"], line["ci_low"], line["ci_high"], unit, note(line))
        for line in table.to_dicts()
        if line["paper"] is not None
    ]


analyses: Registry[Analysis] = Registry("analysis", __name__)
register = analyses.register
