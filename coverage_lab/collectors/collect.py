"""Record a model on prompts: requests in, a trace out."""

from __future__ import annotations

import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import polars as pl
import safetensors.torch
import torch

from coverage_lab import __version__
from coverage_lab.collectors.datasets import Dataset, Example, datasets
from coverage_lab.collectors.decode import Decoded, decode_batch
from coverage_lab.collectors.models import DTYPES, LoadedModel, load_model
from coverage_lab.collectors.prompts import Prompt, PromptBuilder
from coverage_lab.collectors.recorder import RequestRecorder
from coverage_lab.collectors.rows import RowFormat, layer_rows
from coverage_lab.collectors.scoring import Scorer
from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import check_page_size
from coverage_lab.policies.estimators import estimators
from coverage_lab.registry import unknown
from coverage_lab.trace.schema import ROUNDING
from coverage_lab.trace.writer import TraceWriter, check_directory
from coverage_lab.wording import counted

RECORDS = ("shares", "counts", "query-heads", "tensors")

# Log masses on the device move to the host when they reach this size.
_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """What to record.

    Parameters
    ----------
    model : str
        `smollm2`, a local directory, a `.gguf` file or a hub id.
    dataset : str
        Name of a registered data set.
    output : Path
        Directory of the trace.
    data_dir : Path, optional
        Where the data set's files are.
    tasks : tuple of str
        Tasks of the data set; empty means all.
    limit : int, optional
        At most this many requests of each task.
    max_prompt_tokens : int, optional
        Longer prompts are cut to this length.
    steps : int
        Most decode steps a request.
    decode : {"greedy", "forced"}
        Feed the model's own choice, or the tokens of the reference.
    ignore_eos : bool
        Go on after an end-of-sequence token.
    page_size : int
        Tokens a page.
    estimators : tuple of str
        Estimators to record; `exact` always is.
    gammas : tuple of float
        Coverages whose oracle counts are stored.
    record : {"shares", "counts", "query-heads", "tensors"}
        `counts` stores only scalars; `query-heads` adds the shares of each query head, `tensors` the
        q, k and v of `tensor_steps`.
    share_dtype : {"float16", "float32"}
        Type of the stored shares.
    tensor_steps : tuple of int
        Steps whose tensors are stored.
    dtype, device : str, optional
        Of the model; see `load_model`.
    batch_size : int
        Requests decoded together.
    chat : bool, optional
        Use the chat template: always, never, or where the data set means it (default).
    seed : int
        Seed of the data set.
    """

    model: str
    dataset: str
    output: Path
    data_dir: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    max_prompt_tokens: int | None = None
    steps: int = 64
    decode: Literal["greedy", "forced"] = "greedy"
    ignore_eos: bool = False
    page_size: int = 64
    estimators: tuple[str, ...] = ("exact", "mvar")
    gammas: tuple[float, ...] = (0.9, 0.95, 0.98, 0.99)
    record: Literal["shares", "counts", "query-heads", "tensors"] = "shares"
    share_dtype: Literal["float16", "float32"] = "float16"
    tensor_steps: tuple[int, ...] = (0,)
    dtype: str | None = None
    device: str | None = None
    batch_size: int = 1
    chat: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        for name in ("steps", "batch_size", "limit", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CoverageLabError(f"--{name.replace('_', '-')} {value} is less than 1")
        for gamma in self.gammas:
            if not 0 < gamma <= 1:
                raise CoverageLabError(f"gamma {gamma} is not in (0, 1]; try --gammas 0.9,0.95,0.98,0.99")
        for step in self.tensor_steps:
            if step not in range(self.steps):
                raise CoverageLabError(
                    f"--tensor-steps {step:g} is no step; there are steps 0 to {self.steps - 1}"
                )
        if self.record != "tensors" and set(self.tensor_steps) != {0}:
            raise CoverageLabError("--tensor-steps is for --record tensors; leave it out")
        for name, value, known in (
            ("decode", self.decode, ("greedy", "forced")),
            ("record", self.record, RECORDS),
            ("share-dtype", self.share_dtype, tuple(ROUNDING)),
        ):
            if value not in known:
                raise unknown(f"--{name}", value, list(known))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise unknown("--dtype", self.dtype, list(DTYPES))
        for name in self.estimators:
            estimators.get(name)
        names = (
            ()
            if self.record == "counts"
            else tuple(n for n in dict.fromkeys(self.estimators) if n != "exact")
        )
        object.__setattr__(self, "estimators", ("exact", *names))
        object.__setattr__(self, "gammas", tuple(sorted(set(self.gammas))))
        object.__setattr__(self, "tensor_steps", tuple(sorted({int(step) for step in self.tensor_steps})))


class Reporter(Protocol):
    """Told how a run goes."""

    def begin(self, total: int, done: int, plan: str) -> None:
        """`done` of `total` requests were finished by an earlier run; `plan` says what they are."""

    def request(self, request: dict[str, Any], seconds: float) -> None:
        """A request was finished; `request` is its line of the requests table."""


@dataclass(frozen=True)
class CollectSummary:
    """How a run ended.

    Attributes
    ----------
    output : Path
    requests : dict of str to int
        Requests by status (`ok`, `failed`).
    errors : tuple of str
        Request and error of the failed ones.
    empty : int
        Requests that ended before their first step.
    rows, steps, bytes : int
        Of the whole trace.
    seconds : float
        Of this run.
    complete_before : bool
        Whether there was nothing to do.
    """

    output: Path
    requests: dict[str, int]
    errors: tuple[str, ...]
    empty: int
    rows: int
    steps: int
    bytes: int
    seconds: float
    complete_before: bool = False


@dataclass(frozen=True)
class _Request:
    id: str
    example: Example
    prompt: Prompt


def collect(
    options: CollectOptions, reporter: Reporter | None = None, loaded: LoadedModel | None = None
) -> CollectSummary:
    """Record a trace, or finish one that was begun with the same options.

    Parameters
    ----------
    options : CollectOptions
    reporter : Reporter, optional
        Told about progress.
    loaded : LoadedModel, optional
        The model of `options.model`, where it is loaded already.

    Returns
    -------
    CollectSummary

    Raises
    ------
    CoverageLabError
        If an option, the model, the data or the output directory is at fault. Nothing is written
        before all prompts are known to be good.
    """
    start = time.perf_counter()
    dataset = datasets.get(options.dataset)(
        path=options.data_dir, tasks=options.tasks, limit=options.limit, seed=options.seed
    )
    described = dataset.describe()
    check_directory(options.output)
    loaded = loaded or load_model(options.model, options.dtype, options.device)
    _check_windows(loaded, options.page_size)
    requests = _prepare(options, dataset, loaded)
    run = _run(options, described, loaded)
    with TraceWriter(options.output, run) as writer:
        complete = writer.finished
        if not complete:
            _record(options, loaded, dataset, requests, writer, reporter)
            writer.finish([request.id for request in requests], _facts(options, loaded))
    return _summary(options.output, time.perf_counter() - start, complete)


def _check_windows(loaded: LoadedModel, page_size: int) -> None:
    for layer in loaded.layers:
        if layer.window is not None and layer.window < page_size:
            raise CoverageLabError(
                f"page size {page_size} is larger than the sliding window of layer {layer.layer} "
                f"({layer.window} tokens); give a smaller --page-size"
            )


def _prepare(options: CollectOptions, dataset: Dataset, loaded: LoadedModel) -> list[_Request]:
    room = None if loaded.max_tokens is None else loaded.max_tokens - options.steps
    if room is not None and room < 1:
        raise CoverageLabError(
            f"--steps {options.steps} leave no room in the model's window of {loaded.max_tokens} tokens"
        )
    limit = options.max_prompt_tokens
    if limit is not None and room is not None and limit > room:
        raise CoverageLabError(
            f"--max-prompt-tokens {limit} and --steps {options.steps} do not fit in the model's window of "
            f"{loaded.max_tokens} tokens; at most {room} prompt tokens do"
        )
    if limit is None:
        limit = dataset.default_prompt_tokens(room)
    builder = PromptBuilder(loaded.tokenizer, options.chat)
    embeddings: Any = loaded.model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    requests = []
    for example in dataset.with_counter(builder.count).examples(limit or room or 0, options.steps):
        prompt = builder.build(example, limit, options.steps, options.decode == "forced")
        if room is not None and len(prompt.ids) > room:
            raise CoverageLabError(
                f"{example.source or example.task}: the prompt has {len(prompt.ids)} tokens; "
                f"with {options.steps} steps at most {room} fit in the model's window: "
                f"give --max-prompt-tokens {room}"
            )
        if max(prompt.ids + prompt.reference_ids) >= vocabulary:
            raise CoverageLabError(
                f"{example.source or example.task}: the prompt has tokens beyond the model's vocabulary of "
                f"{vocabulary}; its tokenizer belongs to another model"
            )
        requests.append(_Request(f"{example.task}-{example.index:05d}", example, prompt))
    twice = [name for name, count in Counter(request.id for request in requests).items() if count > 1]
    if twice:
        raise CoverageLabError(f"the data set has two requests named {twice[0]}; rename one of its files")
    if not requests:
        raise CoverageLabError(f"dataset {options.dataset!r} gave no prompts")
    return requests


def _run(options: CollectOptions, described: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """Everything that decides the bytes of the trace."""
    keep = {
        key: value
        for key, value in vars(options).items()
        # The data set is described by its files and their sha256, wherever they lie.
        if key not in ("output", "model", "dtype", "device", "data_dir")
    }
    keep["dataset"] = {"name": options.dataset, **described}
    return {
        **keep,
        "model": loaded.identity,
        "versions": {
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name()
            if loaded.identity["device"] == "cuda"
            else platform.machine(),
            "git": _git_commit(),
            "coverage-lab": __version__,
            **{name: version(name) for name in ("torch", "transformers", "polars")},
        },
    }


def _git_commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _facts(options: CollectOptions, loaded: LoadedModel) -> dict[str, Any]:
    return {
        "geometry": loaded.geometry(),
        "share_rounding": 0.0 if options.record == "counts" else ROUNDING[options.share_dtype],
        "shares": "softmax of the log masses over the row's pages per query head, mean over the group",
        "learned_sinks_in_shares": False,
    }


def _record(
    options: CollectOptions,
    loaded: LoadedModel,
    dataset: Dataset,
    requests: Sequence[_Request],
    writer: TraceWriter,
    reporter: Reporter | None,
) -> None:
    done = {request.id for request in requests if writer.done(request.id)}
    if reporter:
        reporter.begin(len(requests), len(done), _plan(options, requests))
    stop_ids = _stop_ids(loaded)
    # Tokens that were fed are no answer of the model.
    scorer = None if options.decode == "forced" else Scorer(dataset, loaded.tokenizer, stop_ids)
    stop_ids = frozenset() if options.ignore_eos else stop_ids
    for batch in _batches(requests, options.batch_size):
        # A batch is decoded whole even when some of it is done, so that a resumed run computes the same.
        if all(request.id in done for request in batch):
            continue
        start = time.perf_counter()
        recorded = _record_batch(options, loaded, batch, stop_ids, scorer)
        for request, (line, rows, tensors) in zip(batch, recorded, strict=True):
            writer.write(line, rows, tensors)
            if reporter and request.id not in done:
                reporter.request(line, (time.perf_counter() - start) / len(batch))


def _plan(options: CollectOptions, requests: Sequence[_Request]) -> str:
    lengths = [len(request.prompt.ids) for request in requests]
    chat = sum(request.prompt.chat for request in requests)
    scored = max((request.example.answer_tokens or 0 for request in requests), default=0)
    cut = f"; scores take answers of up to {scored} tokens" if options.steps < scored else ""
    template = {0: "no chat template", len(requests): "in the model's chat template"}
    tokens = f"{min(lengths):,}" + (f" to {max(lengths):,}" if max(lengths) > min(lengths) else "")
    return (
        f"{counted(len(requests), 'prompt')} of {tokens} tokens "
        f"({template.get(chat, f'{chat} in the chat template')}), up to {options.steps} steps each{cut}"
    )


def _batches(requests: Sequence[_Request], size: int) -> Iterator[Sequence[_Request]]:
    for first in range(0, len(requests), size):
        yield requests[first : first + size]


def _stop_ids(loaded: LoadedModel) -> frozenset[int]:
    config = getattr(loaded.model, "generation_config", None)
    held = getattr(config, "eos_token_id", None)
    ids = set(held) if isinstance(held, list) else {held}
    return frozenset(i for i in ids | {loaded.tokenizer.eos_token_id} if i is not None)


_Recorded = tuple[dict[str, Any], pl.DataFrame | None, bytes | None]


def _record_batch(
    options: CollectOptions,
    loaded: LoadedModel,
    batch: Sequence[_Request],
    stop_ids: frozenset[int],
    scorer: Scorer | None,
) -> list[_Recorded]:
    names = options.estimators[1:]
    longest = max(len(request.prompt.ids) for request in batch)
    recorders = [
        RequestRecorder(
            options.page_size,
            {name: estimators.get(name)() for name in names},
            longest - len(request.prompt.ids),
            options.tensor_steps if options.record == "tensors" else (),
        )
        for request in batch
    ]
    assemblers = [_Assembler(options, loaded, request) for request in batch]

    def after_step() -> None:
        for recorder, assembler in zip(recorders, assemblers, strict=True):
            if recorder.bytes > _BUFFER_BYTES // len(batch):
                assembler.add(recorder.take())

    references = [request.prompt.reference_ids for request in batch] if options.decode == "forced" else None
    try:
        decoded = decode_batch(
            loaded, [r.prompt.ids for r in batch], recorders, options.steps, references, stop_ids, after_step
        )
    except torch.OutOfMemoryError:
        raise CoverageLabError(
            f"out of memory at {batch[0].id} ({longest} prompt tokens x {len(batch)}); "
            "give a smaller --batch-size, or free the device and run the same command again: "
            "finished requests are kept"
        ) from None
    recorded: list[_Recorded] = []
    for request, recorder, assembler, result in zip(batch, recorders, assemblers, decoded, strict=True):
        assembler.add(recorder.take())
        score = scorer(request.example, result.ids) if scorer and not result.error else None
        line = _request_line(options, request, result, score)
        if result.error:
            recorded.append((line, None, None))
            continue
        tensors = safetensors.torch.save(recorder.tensors) if recorder.tensors else None
        recorded.append((line, assembler.frame(), tensors))
    return recorded


class _Assembler:
    """Collects the rows of one request, buffer after buffer."""

    def __init__(self, options: CollectOptions, loaded: LoadedModel, request: _Request) -> None:
        self._format = RowFormat(
            options.page_size, options.estimators, options.gammas, options.record, options.share_dtype
        )
        self._request = request
        self._windows = {layer.layer: layer.window for layer in loaded.layers}
        self._frames: list[pl.DataFrame] = []
        self._steps = 0

    def add(self, masses: dict[int, list[torch.Tensor]]) -> None:
        if not masses:
            return
        for layer in sorted(masses):
            self._frames.append(
                layer_rows(
                    self._format,
                    self._request.id,
                    layer,
                    masses[layer],
                    len(self._request.prompt.ids),
                    self._steps,
                    self._windows[layer],
                )
            )
        self._steps += len(next(iter(masses.values())))

    def frame(self) -> pl.DataFrame | None:
        if not self._frames:
            return None
        return pl.concat(self._frames).sort("layer", "kv_head", "step")


def _request_line(
    options: CollectOptions, request: _Request, result: Decoded, score: float | None
) -> dict[str, Any]:
    return {
        "request_id": request.id,
        "dataset": options.dataset,
        "task": request.example.task,
        "prompt_tokens": len(request.prompt.ids),
        "dropped_tokens": request.prompt.dropped,
        "steps": 0 if result.error else len(result.ids),
        "decode_start": len(request.prompt.ids),
        "stop": result.stop,
        "status": "failed" if result.error else "ok",
        "error": result.error,
        "answers": list(request.example.answers),
        "score": score,
        "prompt_ids": request.prompt.ids,
        "decoded_ids": result.ids,
    }


def _summary(output: Path, seconds: float, complete_before: bool) -> CollectSummary:
    from coverage_lab.trace import Trace

    trace = Trace(output)
    table = trace.requests
    failed = table.filter(pl.col("status") == "failed")
    return CollectSummary(
        output=output,
        requests=dict(table["status"].value_counts().sort("status", descending=True).iter_rows()),
        errors=tuple(f"{name}: {error}" for name, error in failed.select("request_id", "error").iter_rows()),
        empty=table.filter(pl.col("status") == "ok", pl.col("steps") == 0).height,
        rows=sum(file.get("rows", 0) for file in trace.manifest["files"] if file["path"].startswith("rows/")),
        steps=int(table["steps"].sum()),
        bytes=sum(file["bytes"] for file in trace.manifest["files"]),
        seconds=seconds,
        complete_before=complete_before,
    )
