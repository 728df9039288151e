"""RULER's rule: which of the reference texts stand in the answer."""

import re
from collections.abc import Sequence
from typing import Literal

_CONTROL = re.compile(r"[\x00-\x1f]")


def contained(text: str, references: Sequence[str], match: Literal["all", "any"]) -> float:
    """Return the part of the references that the text holds, or with `any` whether it holds one of them.

    Letters of either case are alike (RULER's string_match_all and string_match_part, over one answer).
    """
    folded = text.lower()
    found = [reference.lower() in folded for reference in references]
    if not found:
        return 0.0
    return float(any(found)) if match == "any" else sum(found) / len(found)


def cleaned(text: str) -> str:
    """Return an answer as RULER compares it: control characters are line ends, none at either end."""
    return _CONTROL.sub("\n", text.strip()).strip()
