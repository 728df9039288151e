"""F1 of words, as SQuAD and LongBench count it."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from coverage_lab.collectors.metrics.chinese import bare, segments

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, each as often as it comes up."""
    same = (Counter(prediction) & Counter(reference)).total()
    return 2 * same / (len(prediction) + len(reference)) if same else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 of two English answers: case, ASCII punctuation and articles do not count."""
    return f1(_words(prediction), _words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Return the F1 of two Chinese answers, over characters; see `chinese` for what LongBench does."""
    return f1(bare(segments(prediction)), bare(segments(reference)))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
