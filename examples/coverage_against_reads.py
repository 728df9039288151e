"""Draw the mass that policies keep against the pages that they read: the rule and the estimate apart.

python examples/coverage_against_reads.py TRACE curves.png
"""

import sys

import matplotlib.pyplot as plt
import seaborn

from coverage_lab import Policy, Trace, evaluate

if len(sys.argv) != 3:
    sys.exit(__doc__)
trace, picture = Trace(sys.argv[1]), sys.argv[2]
families = {
    "exact/coverage": [0.8, 0.9, 0.95, 0.98, 0.99],
    "exact/proportional": [0.1, 0.2, 0.3, 0.45, 0.6],
    "mvar/coverage": [0.8, 0.9, 0.95, 0.98, 0.99],
    "mvar/proportional": [0.1, 0.2, 0.3, 0.45, 0.6],
}
policies = [Policy.parse(f"{name}:{value}") for name, values in families.items() for value in values]
result = evaluate(trace, policies)
reads = result.kept.sum(0) / result.pages.sum()
short = 1 - result.covered.sum(0) / result.rows.sum()

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
first = 0
for colour, (name, values) in zip(seaborn.color_palette("colorblind"), families.items(), strict=False):
    part = slice(first, first + len(values))
    style = "-" if name.startswith("exact") else "--"
    ax.plot(100 * reads[part], 100 * short[part], f"o{style}", color=colour, label=name)
    first += len(values)
ax.set(xlabel="pages read, % of the context", ylabel="rows that keep less than 95% of their mass, %")
ax.legend(frameon=False)
seaborn.despine(ax=ax)
figure.savefig(picture, dpi=160)
