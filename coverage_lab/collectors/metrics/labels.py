"""Answers that are a label or a number: LongBench's classification, retrieval and counting."""

import re
from collections.abc import Sequence


def classification(prediction: str, reference: str, labels: Sequence[str]) -> float:
    """Return 1 over the number of labels that an answer names, or 0 if the right one is not among them.

    A label that is part of the right one, and so named with it, does not count.
    """
    named = [
        label for label in labels if label in prediction and (label == reference or label not in reference)
    ]
    return 1 / len(named) if reference in named else 0.0


def counting(prediction: str, reference: str) -> float:
    """Return the part of the numbers in an answer that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return the part of the numbers in an answer that are the number of the right paragraph.

    The reference is such as `Paragraph 7` or `段落7`.
    """
    number = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return counting(prediction, number[1]) if number else 0.0
