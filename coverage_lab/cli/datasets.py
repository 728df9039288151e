"""`coverage-lab datasets list|show|validate`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coverage_lab.cli.options import JsonPath, names

if TYPE_CHECKING:
    from coverage_lab.collectors.datasets import Dataset
    from coverage_lab.collectors.prompts import PromptBuilder

app = typer.Typer(help="The data sets: what there is, what their prompts look like, whether files are sound.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set, as `datasets list` names it.")]
DataDir = Annotated[Path | None, typer.Option(help="Directory or file of the data set.")]
Tasks = Annotated[str | None, typer.Option(help="Comma-separated tasks; all by default.")]
Model = Annotated[
    str | None, typer.Option(help="Model whose tokenizer counts the tokens: what `collect` takes.")
]
MaxPromptTokens = Annotated[int | None, typer.Option(min=1, help="Length of the prompts, as for `collect`.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Chat template; by default where the data set means it."),
]
Seed = Annotated[int, typer.Option(help="Seed of what the data set draws.")]

# Faults of one task that are printed.
_SHOWN = 10


@app.command("list")
def list_(json: JsonPath = None) -> None:
    """List the data sets: name, title and tasks."""
    from coverage_lab.cli import output
    from coverage_lab.collectors.datasets import datasets

    output.check_outputs(json)
    records = [
        {"name": name, "title": datasets.get(name).title, "tasks": list(datasets.get(name).task_names)}
        for name in datasets.names()
    ]
    if output.write_records(records, json, None):
        return
    for record in records:
        typer.echo(f"{record['name']:14}{record['title']}")
        tasks = ", ".join(record["tasks"]) or "a task for each file"
        typer.echo(
            textwrap.fill(
                tasks, 100, initial_indent=" " * 14, subsequent_indent=" " * 14, break_on_hyphens=False
            )
        )


@app.command("show")
def show(
    name: Name,
    data_dir: DataDir = None,
    tasks: Tasks = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many prompts of each task.")] = 1,
    model: Model = None,
    max_prompt_tokens: MaxPromptTokens = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that will follow.")] = 64,
    chat: Chat = None,
    seed: Seed = 0,
    characters: Annotated[
        int, typer.Option(min=1, help="Characters of each prompt's beginning and end that are shown.")
    ] = 200,
    json: JsonPath = None,
) -> None:
    """Show prompts: how they begin and end, their length in tokens with --model, their answers."""
    from coverage_lab.cli import output

    output.check_outputs(json)
    dataset, builder, prompt_tokens = _opened(
        name, data_dir, tasks, limit, model, max_prompt_tokens, chat, seed
    )
    records = []
    for example in dataset.examples(prompt_tokens or 0, steps):
        text = example.before + example.context + example.after
        record = {
            "request": f"{example.task}-{example.index:05d}",
            "source": example.source,
            "characters": len(text),
            "tokens": None,
            "left_out": None,
            "begins": text[:characters],
            "ends": text[-characters:],
            "prefix": example.prefix,
            "answers": list(example.answers),
        }
        if builder is not None:
            prompt = builder.build(example, prompt_tokens, steps, forced=False)
            record |= {"tokens": len(prompt.ids), "left_out": prompt.dropped}
        records.append(record)
        if json != output.STDOUT:
            _print(record)
    output.write_records(records, json, None)


@app.command("validate")
def validate(
    name: Name,
    data_dir: DataDir = None,
    tasks: Tasks = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many prompts of each task; all by default.")
    ] = None,
    model: Model = None,
    max_prompt_tokens: MaxPromptTokens = None,
    chat: Chat = None,
    seed: Seed = 0,
    json: JsonPath = None,
) -> None:
    """Read all prompts and say what is wrong: malformed rows, answers that can't be, lengths of RULER.

    A row that can't be read ends its file; other files are read all the same. The exit code is 1 if anything
    is wrong.
    """
    from dataclasses import asdict

    from coverage_lab.cli import output
    from coverage_lab.collectors.validate import validate as check

    output.check_outputs(json)
    dataset, builder, prompt_tokens = _opened(
        name, data_dir, tasks, limit, model, max_prompt_tokens, chat, seed
    )
    reports = []
    for report in check(dataset, prompt_tokens or 0, 1, builder.count if builder else None):
        reports.append(report)
        if json == output.STDOUT:
            continue
        tokens = f", {report.shortest:,} to {report.longest:,} tokens" if report.longest else ""
        state = "ok" if not report.faults else f"{len(report.faults)} at fault"
        typer.echo(
            f"{report.task}: {report.prompts:,} prompts, {report.answered:,} with answers{tokens}: {state}"
        )
        for fault in report.faults[:_SHOWN]:
            typer.echo(f"  {fault}")
        if len(report.faults) > _SHOWN:
            typer.echo(f"  and {len(report.faults) - _SHOWN} more; --json has them")
    output.write_records([asdict(report) for report in reports], json, None)
    if any(report.faults for report in reports):
        raise typer.Exit(1)


def _opened(
    name: str,
    data_dir: Path | None,
    tasks: str | None,
    limit: int | None,
    model: str | None,
    max_prompt_tokens: int | None,
    chat: bool | None,
    seed: int,
) -> tuple[Dataset, PromptBuilder | None, int | None]:
    """Return the data set, what builds its prompts if a model is named, and their length."""
    from coverage_lab.collectors.datasets import datasets

    dataset = datasets.get(name)(path=data_dir, tasks=names(tasks), limit=limit, seed=seed)
    prompt_tokens = max_prompt_tokens or dataset.default_prompt_tokens(None)
    if model is None:
        return dataset, None, prompt_tokens
    from coverage_lab.collectors.prompts import PromptBuilder
    from coverage_lab.collectors.tokenizers import load_tokenizer

    builder = PromptBuilder(load_tokenizer(model), chat)
    return dataset.with_counter(builder.count), builder, prompt_tokens


def _print(record: dict[str, object]) -> None:
    size = f"{record['characters']:,} characters"
    if record["tokens"] is not None:
        size += f", {record['tokens']:,} tokens"
        size += f", {record['left_out']:,} left out" if record["left_out"] else ""
    typer.echo(f"{record['request']}  {size}  ({record['source']})")
    shown = {"begins": record["begins"], "ends": record["ends"], "prefix": record["prefix"]}
    for label, text in shown.items():
        if text:
            typer.echo(f"  {label:8}{' '.join(str(text).split())}")
    answers = record["answers"]
    assert isinstance(answers, list)
    typer.echo(f"  {'answers':8}{'; '.join(answers) or '-'}\n")
