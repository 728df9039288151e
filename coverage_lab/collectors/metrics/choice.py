"""Which letter of a multiple-choice question an answer names."""

import re

_SAID = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def chosen(text: str) -> str | None:
    """Return the letter in the first "The correct answer is (C)", with or without brackets, or None.

    Asterisks are left out first (LongBench v2's rule).
    """
    plain = text.replace("*", "")
    return next((match[1] for said in _SAID if (match := said.search(plain))), None)
