"""Score what a model said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coverage_lab.collectors.datasets import Dataset, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scorer:
    """A data set's scoring, over tokens.

    Parameters
    ----------
    dataset : Dataset
    tokenizer : PreTrainedTokenizerBase
    stop_ids : frozenset of int
        End-of-sequence tokens: what comes after one is no part of the answer.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids

    def __call__(self, example: Example, ids: Sequence[int]) -> float | None:
        """Return the score of the answer within what was decoded, or None if the data set has no scoring."""
        end = next((place for place, token in enumerate(ids) if token in self._stop_ids), len(ids))
        answer = list(ids[:end])[: example.answer_tokens]
        return self._dataset.score(example, str(self._tokenizer.decode(answer, skip_special_tokens=True)))
