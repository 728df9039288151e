"""Variable tracking: assignments that pass a value on, hidden in noise."""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random
from typing import ClassVar, Literal

from coverage_lab.collectors.ruler.draft import Draft, Draw
from coverage_lab.collectors.ruler.fitting import fit
from coverage_lab.collectors.ruler.needles import NOISE, scattered

_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_AFTER = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {value}, they are: "
)
_EXAMPLE_TOKENS = 500  # of the worked example, its answer left out


@dataclass(frozen=True, kw_only=True)
class VariableChains:
    """RULER's `variable_tracking`: which variables have, by way of each other, a given value?

    As in RULER a worked example of up to 500 tokens stands first, with shorter names. It comes before
    the question in the same turn, with its own noise.

    Parameters
    ----------
    chains : int
        Chains of assignments; the question is about the first one.
    hops : int
        Assignments of a chain beyond the first.
    """

    answer_tokens: ClassVar[int] = 30
    match: ClassVar[Literal["all", "any"]] = "all"

    chains: int = 1
    hops: int = 4

    def draft(self, draw: Draw) -> Draft:
        shown = self._plain(draw.rng, letters=3, hops=min(10, self.hops))
        lines, _ = fit(lambda n: draw.count(_text(shown, n)), _EXAMPLE_TOKENS, shown.fewest)
        example = f"{_text(shown, lines)} {' '.join(shown.answers)}\n\n"
        asked = self._plain(draw.rng, letters=5, hops=self.hops)
        return Draft(
            answers=asked.answers,
            before=example + asked.before,
            context=asked.context,
            after=asked.after,
            prefix=asked.prefix,
            fewest=asked.fewest,
            rest=lambda lines: "\n" + NOISE,
        )

    def _plain(self, rng: Random, letters: int, hops: int) -> Draft:
        """Draw one problem."""
        names, values = _names(rng, letters), rng.sample(range(10_000, 99_999), self.chains)
        variables = [tuple(islice(names, hops + 1)) for _ in range(self.chains)]
        statements = [
            [
                f"VAR {chain[0]} = {value}",
                *(f"VAR {b} = VAR {a} " for a, b in pairwise(chain)),
            ]
            for chain, value in zip(variables, values, strict=True)
        ]
        seeds = [rng.getrandbits(64) for _ in statements]

        def context(lines: int) -> str:
            text = [NOISE] * lines
            for chain, seed in zip(statements, seeds, strict=True):
                text = scattered(chain, text, seed)
            return "\n".join(text)

        words = {"value": values[0], "count": hops + 1}
        return Draft(
            answers=variables[0],
            before=_BEFORE,
            context=context,
            after=_AFTER.format(**words),
            prefix=_PREFIX.format(**words),
            fewest=hops + 1,
        )


def _text(draft: Draft, lines: int) -> str:
    return draft.before + draft.context(lines) + draft.after + draft.prefix


def _names(rng: Random, letters: int) -> Iterator[str]:
    """Draw names of capital letters without end, none of them twice."""
    seen: set[str] = set()
    while True:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in seen:
            seen.add(name)
            yield name
