"""`coverage-lab analyze NAME TRACE`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from coverage_lab.cli.options import CsvPath, FigurePath, JsonPath, Quiet, TracePath
from coverage_lab.wording import counted

if TYPE_CHECKING:
    from coverage_lab.analyses import Analysis


class _Registered(TyperGroup):
    """A command for every registered analysis, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        from coverage_lab.analyses import analyses

        return analyses.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from coverage_lab.analyses import analyses

        maker = typer.Typer(add_completion=False, context_settings=ctx.parent.command.context_settings)
        maker.command(cmd_name)(_command(analyses.get(cmd_name)))
        return typer.main.get_command(maker)


app = typer.Typer(cls=_Registered, help="Ask a recorded trace one question.", no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    every: Annotated[
        bool, typer.Option("--list", help="List the analyses, with what they show and where it is asked.")
    ] = False,
) -> None:
    if not every:
        return
    if context.invoked_subcommand is not None:
        from coverage_lab.errors import CoverageLabError

        raise CoverageLabError(f"--list lists all analyses; leave out {context.invoked_subcommand}")
    from coverage_lab.analyses import analyses
    from coverage_lab.cli import output

    kinds = {name: analyses.get(name) for name in analyses.names()}
    width = max(map(len, kinds))
    screen = output.console()
    for name, kind in kinds.items():
        screen.print(f"{name:{width}}  {kind.title} ({kind.source})", highlight=False, soft_wrap=True)


def _command(kind: type[Analysis]) -> Callable[..., None]:
    """Return a command whose options are the fields of an analysis."""

    def command(trace: Any, json: Any, csv: Any, figure: Any, quiet: bool, **options: Any) -> None:
        from coverage_lab.cli import output
        from coverage_lab.trace import Trace

        output.check_outputs(json, csv, figure=figure)
        analysis = kind(**options)
        data = Trace(trace)
        table = analysis.compute(data)
        if not output.write_records(table.to_dicts(), json, csv):
            model = data.manifest["run"]["model"]["model"]
            requests = counted(len(data.shards), "request")
            title = f"{kind.title[0].upper()}{kind.title[1:]}: {model}, {requests}"
            output.print_table(
                output.console(), title, table.columns, [list(map(_cell, row)) for row in table.rows()]
            )
        if figure:
            output.save_figure(analysis.figure(table), figure)

    keyword, types = inspect.Parameter.KEYWORD_ONLY, typing.get_type_hints(kind)
    common = {"json": JsonPath, "csv": CsvPath, "figure": FigurePath, "quiet": Quiet}
    own = [
        inspect.Parameter(
            field.name,
            keyword,
            default=field.default,
            annotation=Annotated[types[field.name], typer.Option(min=0 if field.name == "seed" else None)],
        )
        for field in fields(kind)
    ]
    rest = [
        inspect.Parameter(name, keyword, default=False if name == "quiet" else None, annotation=annotation)
        for name, annotation in common.items()
    ]
    first = inspect.Parameter("trace", keyword, annotation=TracePath)
    command.__signature__ = inspect.Signature([first, *own, *rest])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (first, *own, *rest)}
    command.__doc__ = f"Show {kind.title} ({kind.source})."
    return command


def _cell(value: Any) -> str:
    from coverage_lab.cli import output

    if isinstance(value, float):
        return output.number(value, 3)
    return "-" if value is None else str(value)
