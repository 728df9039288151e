"""How alike two lines of code are."""

from difflib import SequenceMatcher


def code_similarity(prediction: str, reference: str) -> float:
    """Return the similarity of an answer's first line of code to the right one, in whole percent.

    Lines with a backtick, `#` or `//` are taken for comments and passed over. The ratio is difflib's,
    as in the package fuzzywuzzy, which LongBench uses, where python-Levenshtein is not installed.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100
