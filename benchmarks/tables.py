"""Write the tables of the README from the committed results.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; `--check` changes nothing and fails
where the README differs.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    after = fill(before)
    if options.check:
        sys.exit("README.md is not what `python benchmarks/tables.py` writes" if after != before else 0)
    README.write_text(after, encoding="utf-8")


def fill(text: str) -> str:
    """Return the text with every table made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + TABLES[match[2]]() + match[3],
        text,
        flags=re.DOTALL,
    )


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


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


TABLES: dict[str, Callable[[], str]] = {
    "guarantee": guarantee,
    "reads": reads,
    "variation": variation,
    "costs": costs,
}


if __name__ == "__main__":
    main()
