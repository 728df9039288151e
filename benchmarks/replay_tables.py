"""Tables of what policies did to the answers of two models on one H200."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from table_text import load, markdown, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"qwen05": "Qwen2.5-Coder-0.5B", "smollm2": "SmolLM2-135M"}
GAMMAS = ("0.9", "0.95", "0.98", "0.99", "0.995")


def _nats(value: float) -> str:
    return f"{value:.2g}"


def _with_interval(line: dict[str, Any]) -> str:
    return f"{_nats(line['kl_mean'])} ({_nats(line['ci_low'])}-{_nats(line['ci_high'])})"


def _beside(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return a line of summary of each model in every row."""
    text = [
        [name, *(cell for model in MODELS for cell in _cells(of.get(model)))] for name, of in rows.items()
    ]
    header = [""]
    for title in MODELS.values():
        header += [f"{title}: reads", "KL, nats (95%)", "rows < 0.95", "same top-1"]
    return markdown(header, text)


def _cells(line: dict[str, Any] | None) -> list[str]:
    if line is None:
        return [""] * 4
    return [
        percent(line["reads"]),
        _with_interval(line),
        percent(line["rows_below"]),
        percent(line["agreement"]),
    ]


def over_gamma() -> str:
    lines = {model: {line["policy"]: line for line in load(f"gamma_{model}")["lines"]} for model in MODELS}
    policies = ["exact/coverage:1", *(f"{name}/coverage:{g}" for name in ("exact", "mvar") for g in GAMMAS)]
    return _beside({f"`{policy}`": {model: lines[model][policy] for model in MODELS} for policy in policies})


def equal_reads() -> str:
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for model in MODELS:
        for line in load(f"equal_reads_{model}")["lines"][1:]:
            budget = line["policy"].partition(":" if "coverage" not in line["policy"] else " ")[0]
            if "profiled" in budget:
                budget = line["policy"].partition(",")[0]
            families.setdefault(f"`{budget}`", {})[model] = line
    # The rule of each estimator, then what was matched to it.
    return _beside(dict(sorted(families.items(), key=lambda item: "exact" in item[0])))


def draw_divergence() -> "Figure":
    """Draw the rule over gamma, and budgets that read as much as it, for both models side by side."""
    import matplotlib.pyplot as plt

    from coverage_lab.analyses import divergence

    figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 4.4), layout="constrained", sharey=True)
    for ax, (model, title) in zip(axes, MODELS.items(), strict=True):
        over_gamma, matched = (load(f"{name}_{model}")["lines"] for name in ("gamma", "equal_reads"))
        others = [line for line in matched if "/fixed" in line["policy"] or "/prop" in line["policy"]]
        divergence.plot(divergence.to_frame([*over_gamma, *others]), ax)
        ax.set_title(f"{title}; {ax.get_title()}", fontsize="medium")
    axes[0].get_legend().remove()
    axes[1].set_ylabel("")
    return figure


def paper_beside() -> str:
    """Return the comparisons for which the paper has a figure."""
    rows = []
    for name in ("equal_reads", "granularity", "estimators"):
        found = [load(f"{name}_{model}")["records"] for model in MODELS]
        for lines in zip(*found, strict=True):
            first = lines[0]
            if first["paper"] is None or "pages read" in first["what"] or "KL to dense" in first["what"]:
                continue
            paper = (
                first["paper"] if isinstance(first["paper"], str) else _value(first["paper"], first["unit"])
            )
            rows.append([first["what"].strip(), paper, *map(_ours, lines)])
    return markdown(["", "paper, Llama-3.1-8B", *MODELS.values()], rows)


def _value(value: float, unit: str) -> str:
    return {"share": percent, "log": lambda v: f"{v:+.1f}"}.get(unit, lambda v: f"{v:.2f}")(value)


def _ours(line: dict[str, Any]) -> str:
    text = _value(line["ours"], line["unit"])
    if line["low"] is None:
        return text
    return f"{text} ({_value(line['low'], line['unit'])} to {_value(line['high'], line['unit'])})"


def why() -> str:
    lines = [
        {line["variant"]: line for line in load(f"explain_{model}")["records"] if line["what"] == "variants"}
        for model in MODELS
    ]
    rows = [
        [
            variant,
            *(cell for of in lines for cell in (percent(of[variant]["reads"]), _nats(of[variant]["kl"]))),
        ]
        for variant in lines[0]
    ]
    header = ["lists of `mvar/coverage:0.98`"]
    for title in MODELS.values():
        header += [f"{title}: reads", "KL, nats"]
    return markdown(header, rows)


def worst_heads() -> str:
    rows = []
    for model, title in MODELS.items():
        heads = [line for line in load(f"explain_{model}")["records"] if line["what"] == "heads"]
        for line in heads[:4]:
            rows.append(
                [
                    f"{title}, layer {line['layer']}, KV head {line['kv_head']}",
                    percent(line["share"]),
                    f"{line['log_error']:+.1f}",
                    percent(line["reads"]),
                    f"{line['coverage_mean']:.3f}",
                    f"{line['coverage_low']:.3f}",
                ]
            )
    header = ["", "of the KL of all heads", "log of estimated over exact mass"]
    return markdown([*header, "reads", "mean coverage", "lowest"], rows)


def backends() -> str:
    """Return the figures of both backends, in both of the types that the kernels take."""
    rows = []
    for model, title in MODELS.items():
        results = ("replay", "reference", "fp16_replay", "fp16_reference")
        lines = [{line["policy"]: line for line in load(f"{name}_{model}")["summary"]} for name in results]
        for policy, line in lines[0].items():
            alike = line.get("equal_rows")
            rows.append(
                [
                    f"{title}, `{policy}`",
                    "" if alike is None else f"{100 * alike:.3f}%",
                    *(cell for pair in (lines[:2], lines[2:]) for cell in _apart(pair, policy)),
                ]
            )
    header = ["", "rows whose lists are alike"]
    for dtype in ("bfloat16", "float16"):
        header += [f"{dtype}: KL, kernels", "plain torch", "apart"]
    return markdown(header, rows)


def _apart(pair: Sequence[dict[str, dict[str, Any]]], policy: str) -> list[str]:
    """Return the divergence on the kernels and in plain torch, and the first over the second less one."""
    kernels, plain = (of[policy]["kl_mean"] for of in pair)
    return [f"{kernels:.3g}", f"{plain:.3g}", f"{kernels / plain - 1:+.1%}"]


def output_token() -> str:
    rows = []
    # The shape of 8B comes with either trace; that of the small model is its own.
    for result in ("tpot_smollm2", "tpot_qwen05"):
        of: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
        for line in load(result)["lines"]:
            of.setdefault((line["model"], line["tokens"], line["batch"]), {})[line["arm"]] = line
        for (model, tokens, batch), arms in of.items():
            sdpa, every, rule = (line["ms"] for line in arms.values())
            name = model.partition("-Instruct")[0]
            if model == "8B shape":
                name += f", counts of {'SmolLM2' if 'smollm2' in result else 'Qwen2.5-Coder'}"
            rows.append(
                [
                    f"{name}, {tokens:,} x {batch}",
                    percent(list(arms.values())[2]["reads"]),
                    *(f"{ms:.2f}" for ms in (sdpa, every, rule)),
                    f"{sdpa / rule:.2f}",
                    f"{every / rule:.2f}",
                ]
            )
    times = ["SDPA, dense", "kernels, every page", "kernels, the rule"]
    return markdown(["tokens x batch", "rule reads", *times, "SDPA over rule", "every page over rule"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "over_gamma": over_gamma,
    "equal_reads": equal_reads,
    "paper_beside": paper_beside,
    "why": why,
    "worst_heads": worst_heads,
    "backends": backends,
    "output_token": output_token,
}
