"""Write the tables of the README and of docs/ from the committed results.

    python benchmarks/tables.py [--check | --figures]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; `--check` changes nothing and fails
where a page differs; `--figures` draws the figures of docs/images that come from results.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from replay_tables import TABLES as REPLAY_TABLES
from replay_tables import draw_divergence
from table_text import ROOT, load, markdown, percent

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    if options.figures:
        draw()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = fill(before)
        if options.check and after != before:
            sys.exit(f"{page.relative_to(ROOT)} is not what `python benchmarks/tables.py` writes")
        page.write_text(after, encoding="utf-8")


def draw() -> None:
    """Draw attention time against the spread of list lengths, and divergence against reads."""
    from coverage_lab.analyses import attend_time

    draw_divergence().savefig(ROOT / "docs" / "images" / "replay.png", dpi=160)
    result = load("attend_h200")
    geometry = result["geometry"]
    title = (
        f"Attention, one layer on an {result['machine']['device']}: {geometry['kv_heads']} KV heads, "
        f"{geometry['group']} query heads each, D {geometry['head_dim']}, "
        f"{geometry['page_size']}-token pages, {geometry['dtype']}"
    )
    figure = attend_time.figure(attend_time.to_frame(result["records"]), title)
    figure.savefig(ROOT / "docs" / "images" / "attend_h200.png", dpi=160)


def fill(text: str) -> str:
    """Return the text with every table made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + TABLES[match[2]]() + match[3],
        text,
        flags=re.DOTALL,
    )


def guarantee() -> str:
    rows = [
        [
            f"`{line['policy']}`",
            percent(line["reads"]),
            f"{line['tokens_over_oracle']:.2f} ({line['ci_low']:.2f}-{line['ci_high']:.2f})",
        ]
        for line in load("longbench_smollm2_policies")["records"]
        if line["table"] == "same_guarantee" and line["policy"].startswith(("exact", "mvar"))
    ]
    return markdown(["policy", "reads", "tokens over the oracle set (95%)"], rows)


def reads() -> str:
    rows = [
        [
            f"`{line['policy']}`",
            percent(line["reads"]),
            f"{line['coverage_mean']:.3f}",
            f"{line['coverage_p5']:.3f}",
            f"{percent(line['rows_below_target'])} ({percent(line['ci_low'])}-{percent(line['ci_high'])})",
            "" if line["note"] == "anchor" else points(line["vs_anchor_low"], line["vs_anchor_high"]),
        ]
        for line in load("longbench_smollm2_policies")["records"]
        if line["table"] == "same_reads" and line["policy"].startswith(("exact", "mvar"))
    ]
    below = ["rows below 0.95 (95%)", "points more than the first (95%)"]
    return markdown(["policy", "reads", "mean coverage", "p5", *below], rows)


def points(low: float, high: float) -> str:
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def variation() -> str:
    longbench = load("longbench_smollm2_variation")["records"]
    docs = load("docs6000_smollm2_variation")["records"]
    rows = [
        [
            line["quantity"],
            f"{line['value']:.2f} ({line['ci_low']:.2f}-{line['ci_high']:.2f})",
            f"{other['value']:.2f}",
            line["paper"],
        ]
        for line, other in zip(longbench, docs, strict=True)
    ]
    header = ["quantity", "64 LongBench prompts (95%)", "2 `docs` of 6,000 tokens", "paper, Llama-3.1-8B"]
    return markdown(header, rows)


def costs() -> str:
    recording, policies = load("recording"), load("policies")
    sizes = policies["compare_rows"]
    rows = [
        [
            "time of a recorded decode step (exact and mvar) over a plain one",
            recording["recorded_over_plain"],
        ],
        ["the same for eager attention with `output_attentions`", recording["output_attentions_over_plain"]],
        ["peak memory of `collect` over `generate`", recording["memory_over_generate"]],
        ["time of 20 gammas over one", policies["twenty_gammas_over_one"]],
        [
            f"peak memory of `compare-policies` on {sizes['large']:,} rows over {sizes['small']:,}",
            policies["memory_large_over_small"],
        ],
    ]
    counts = [
        ["rows a second, one coverage policy, 100 pages a row", policies["rows_per_second"]],
        ["the same, files read and unpacked too", policies["rows_per_second_from_files"]],
    ]
    return markdown(
        ["what", "measured"],
        [[what, f"{value:.2f}"] for what, value in rows] + [[what, f"{value:,}"] for what, value in counts],
    )


# Lists of the attention table, and its methods from left to right.
LISTS = ("0", "0.5", "1", "1.2", "trace")
METHODS = {
    "attend": "ours",
    "fa3-varlen": "FA3 varlen",
    "fa3-padded": "FA3 padded",
    "fa3-buckets": "FA3 buckets",
    "fa3-shared": "FA3, one list a layer",
    "flashinfer": "FlashInfer",
}


def attention() -> str:
    records = load("attend_h200")["records"]
    of = {(line["shape"], line["lists"], line["method"]): line for line in records}
    rows = []
    for shape in dict.fromkeys(line["shape"] for line in records):
        for listed in LISTS:
            ours = of[shape, listed, "attend"]
            name = f"{shape}, {'trace' if listed == 'trace' else f'CV {listed}'}"
            rows.append(
                [
                    name,
                    percent(ours["kept"]),
                    *(f"{of[shape, listed, method]['us']:.0f}" for method in METHODS),
                    f"{of[shape, listed, 'flashinfer']['plan_us']:.0f}",
                    *(f"{of[shape, 'all', method]['us']:.0f}" for method in ("fa3-dense", "sdpa")),
                    f"{ours['over_floor']:.2f}",
                ]
            )
    header = [
        "lists",
        "kept",
        *METHODS.values(),
        "its host plan",
        "FA3 dense",
        "SDPA dense",
        "ours over the floor",
    ]
    return markdown(header, rows)


def selection() -> str:
    records = load("select_h200")["records"]
    of = {(line["shape"], line["stage"]): line for line in records}
    rows = []
    for shape in dict.fromkeys(line["shape"] for line in records):
        first = of[shape, "estimate"]
        stages = ("estimate", "select", "estimate+select", "sort")
        times = [f"{of[shape, stage]['us']:.1f}" for stage in stages]
        rows.append([shape, str(first["pages"]), percent(first["kept"]), f"{first['cv']:.2f}", *times])
    header = ["shape", "pages", "kept", "CV", "Estimate", "Select", "both", "a rule that sorts"]
    return markdown(header, rows)


# Attention path over FA3 (paper 5.5.4 and Table 4), and the aim of this project.
PATHS = {"8kx32": ("1.70", 1.9), "32kx16": ("2.5", 2.6), "64kx8": ("3.9", 4.4), "131kx4": ("4.19", 4.7)}


def path() -> str:
    records = load("path_h200")["records"]
    of = {(line["shape"], line["stage"]): line for line in records}
    rows = []
    for shape in dict.fromkeys(line["shape"] for line in records):
        whole = of[shape, "path"]
        stages = ("estimate+select", "attend+merge", "path", "fa3-dense", "sdpa")
        times = [f"{of[shape, stage]['us']:.0f}" for stage in stages]
        ratio = f"{whole['dense_over']:.2f}"
        rows.append([shape, percent(whole["kept"]), f"{whole['cv']:.2f}", *times, ratio, PATHS[shape][0]])
    times = ["Estimate, Select", "Attend, Merge", "path", "FA3 dense", "SDPA dense"]
    header = ["shape", "kept", "CV", *times, "FA3 over path", "paper"]
    return markdown(header, rows)


def aims() -> str:
    attended = load("attend_h200")["records"]
    ours = [line for line in attended if line["method"] == "attend" and line["lists"] != "trace"]
    shapes = list(dict.fromkeys(line["shape"] for line in ours))
    rows = []
    for shape in shapes:
        over = [line["over_floor"] for line in ours if line["shape"] == shape]
        aim = 1.20 if shape == shapes[0] else 1.08
        name = f"Attend over the floor, {shape}"
        rows.append([name, f"at most {aim:.2f}", f"{min(over):.2f}-{max(over):.2f}"])
    for shape in shapes:
        times = [line["us"] for line in ours if line["shape"] == shape]
        name = f"slowest over fastest CV, {shape}"
        rows.append([name, "at most 1.05", f"{max(times) / min(times):.2f}"])
    for line in load("select_h200")["records"]:
        if line["stage"] == "estimate+select":
            name = f"Estimate and Select, us, {line['shape']}"
            rows.append([name, "at most 15", f"{line['us']:.1f}"])
    for line in load("path_h200")["records"]:
        if line["stage"] == "path":
            name = f"FA3 dense over the path, {line['shape']}"
            rows.append([name, f"at least {PATHS[line['shape']][1]}", f"{line['dense_over']:.2f}"])
    return markdown(["what", "aim", "measured"], rows)


def division() -> str:
    rows = [
        [
            line["title"],
            f"{line['blocks']:,}",
            f"{line['reads']:.2f}",
            f"{line['over_even']:.2f}",
            "yes" if line["host"] else "no",
        ]
        for line in load("balance")["records"]
    ]
    header = ["scheme", "blocks", "pages read over selected", "time over an even division", "host must know"]
    return markdown(header, rows)


def findings() -> str:
    records = load("findings")
    traces = list(dict.fromkeys(line["trace"] for line in records))
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for line in records:
        figures.setdefault(line["figure"], {})[line["trace"]] = line
    rows = []
    for figure, of in figures.items():
        paper = next(iter(of.values()))["paper"]
        rows.append([figure, str(paper), *(_beside_the_paper(of.get(trace)) for trace in traces)])
    return markdown(["", "paper", *(trace.partition("-Instruct")[0] for trace in traces)], rows)


def _beside_the_paper(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    form = percent if line["unit"] == "share" else "{:.2f}".format
    text = form(line["ours"])
    if line["ci_low"] is not None:
        text += f" ({form(line['ci_low'])} to {form(line['ci_high'])})"
    return f"{text}, {line['note']}" if line["note"] else text


def kernels_beside() -> str:
    """Return the times of section 2.2.2, as ratios."""
    records = load("attend_h200")["records"]
    us = {(line["shape"], line["lists"], line["method"]): line["us"] for line in records}
    plan = next(
        line["plan_us"]
        for line in records
        if (line["shape"], line["lists"], line["method"]) == ("32kx16", "trace", "flashinfer")
    )

    def over(shape: str, method: str, lists: str = "trace", base: str = "trace", of: str = "attend") -> str:
        return f"{us[shape, lists, method] / us[shape, base, of]:.2f}"

    slower = "FA3 varlen, lists of CV 1.2 over lists of one length"
    rows = [
        ["buckets over our kernel, lists of a trace, 8kx32", "1.34", over("8kx32", "fa3-buckets")],
        ["the same, 32kx16", "1.40", over("32kx16", "fa3-buckets")],
        ["padded over our kernel, lists of a trace, 32kx16", "2.45", over("32kx16", "fa3-padded")],
        [f"{slower}, 8kx32", "1.23", over("8kx32", "fa3-varlen", "1.2", "0", "fa3-varlen")],
        [f"{slower}, 32kx16", "1.32", over("32kx16", "fa3-varlen", "1.2", "0", "fa3-varlen")],
        [
            "FlashInfer's host plan over its kernel, lists of a trace, 32kx16",
            "2.4",
            f"{plan / us['32kx16', 'trace', 'flashinfer']:.1f}",
        ],
    ]
    return markdown(["", "paper", "ours, H200"], rows)


def scale() -> str:
    result = load("analyses")
    rows = [
        [
            f"`{name}`",
            *(f"{of['seconds'][size]:.0f}" for size in ("middle", "large")),
            f"{of['seconds_large_over_middle']:.1f}",
            *(f"{of['peak_memory_mib'][size]:,}" for size in ("middle", "large")),
        ]
        for name, of in result["analyses"].items()
    ]
    middle, large = (f"{result['rows'][size] / 1e6:.0f}M rows" for size in ("middle", "large"))
    header = ["analysis", f"seconds, {middle}", f"seconds, {large}", "ratio"]
    return markdown([*header, f"peak MiB, {middle}", f"peak MiB, {large}"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "guarantee": guarantee,
    "reads": reads,
    "variation": variation,
    "costs": costs,
    "attention": attention,
    "selection": selection,
    "path": path,
    "aims": aims,
    "division": division,
    "findings": findings,
    "kernels_beside": kernels_beside,
    "scale": scale,
    **REPLAY_TABLES,
}


if __name__ == "__main__":
    main()
