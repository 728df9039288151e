"""`coverage-lab collect`."""

from pathlib import Path
from typing import Annotated

import typer

from coverage_lab.cli.options import Quiet, names, numbers


def collect(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the trace; an unfinished one goes on.")
    ],
    model: Annotated[
        str,
        typer.Option(help="`smollm2`, a local directory, a .gguf file, or an id on the Hugging Face hub."),
    ] = "smollm2",
    dataset: Annotated[
        str, typer.Option(help="What to read; `coverage-lab datasets list` has all.")
    ] = "docs",
    data_dir: Annotated[Path | None, typer.Option(help="Directory or file of the data set.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated tasks; all by default.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many requests of each task.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts to this length.")] = None,
    steps: Annotated[int, typer.Option(help="Most decode steps a request.")] = 64,
    decode: Annotated[str, typer.Option(help="greedy, or forced: feed the reference answer.")] = "greedy",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
    ] = False,
    page_size: Annotated[int, typer.Option(help="Tokens a page, a power of two.")] = 64,
    estimators: Annotated[
        str | None, typer.Option(help="Comma-separated estimators; exact always is, and mvar by default.")
    ] = None,
    gammas: Annotated[
        str, typer.Option(help="Coverages whose oracle counts are stored.")
    ] = "0.9,0.95,0.98,0.99",
    record: Annotated[
        str,
        typer.Option(
            help="shares; counts (scalars only); query-heads (adds shares of each); tensors (adds q, k, v)."
        ),
    ] = "shares",
    share_dtype: Annotated[str, typer.Option(help="Type of stored shares: float16 or float32.")] = "float16",
    tensor_steps: Annotated[
        str, typer.Option(help="Steps whose tensors are stored, with --record tensors.")
    ] = "0",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default float32 on a CPU, else bfloat16."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if any.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests decoded together.")] = 1,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template; by default where the data set means it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what the data set draws.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Record what attention needs of every page, per layer, KV head and decode step.

    A run that was stopped goes on with the same command, and ends with the same bytes.
    """
    from coverage_lab.errors import CoverageLabError

    if record == "counts" and set(names(estimators)) - {"exact"}:
        raise CoverageLabError("--record counts stores no shares, so no estimates; leave out --estimators")
    from rich.console import Console

    from coverage_lab.cli.progress import CollectProgress
    from coverage_lab.collectors.collect import CollectOptions
    from coverage_lab.collectors.collect import collect as run
    from coverage_lab.wording import counted

    options = CollectOptions(
        model=model,
        dataset=dataset,
        output=output,
        data_dir=data_dir,
        tasks=names(tasks),
        limit=limit,
        max_prompt_tokens=max_prompt_tokens,
        steps=steps,
        decode=decode,  # type: ignore[arg-type]
        ignore_eos=ignore_eos,
        page_size=page_size,
        estimators=names(estimators) or CollectOptions.estimators,
        gammas=numbers(gammas, "--gammas"),
        record=record,  # type: ignore[arg-type]
        share_dtype=share_dtype,  # type: ignore[arg-type]
        tensor_steps=numbers(tensor_steps, "--tensor-steps"),  # type: ignore[arg-type]
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        chat=chat,
        seed=seed,
    )
    messages = Console(stderr=True)
    try:
        with CollectProgress(quiet) as progress:
            summary = run(options, progress)
    except BaseException as stop:
        if isinstance(stop, Exception):
            raise
        # Ctrl-C or SIGTERM
        if not quiet and output.is_dir():
            messages.print(f"stopped; the same command goes on from what is in {output}", highlight=False)
        if isinstance(stop, KeyboardInterrupt):
            raise typer.Exit(130) from None
        raise
    ok, failed = summary.requests.get("ok", 0), summary.requests.get("failed", 0)
    if not quiet:
        state = " was complete already" if summary.complete_before else ""
        messages.print(
            f"{output}{state}: {counted(ok, 'request')}, {counted(summary.steps, 'step')} in all, "
            f"{counted(summary.rows, 'row')}, {summary.bytes / 1e6:.1f} MB, {summary.seconds:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
        if summary.empty:
            messages.print(
                f"{counted(summary.empty, 'request')} ended before the first step and left no rows; "
                "--ignore-eos goes on after an end-of-sequence token",
                highlight=False,
                soft_wrap=True,
            )
    if failed:
        messages.print(f"{counted(failed, 'request')} failed:", highlight=False)
        for line in summary.errors:
            messages.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)
