"""ROUGE-L of summaries, with the rules of the package `rouge`, which LongBench uses."""

from collections.abc import Sequence

from coverage_lab.collectors.metrics.chinese import segments


def rouge_l(prediction: str, reference: str) -> float:
    """Return ROUGE-L F of two texts, by sentences.

    As in the package: sentences end at every full stop; for each pair of sentences the words of their
    longest common subsequence are joined in one set; precision and recall divide its size by the numbers
    of different words. The package gives up on pairs of sentences that have some thousand words
    together, and LongBench then counts 0; here they are scored.
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    common: set[str] = set()
    for reference_words in wanted:
        for words in said:
            common.update(_common(reference_words, words))
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """Return ROUGE-L F of two Chinese texts, over characters; see `chinese` for what LongBench does."""
    return rouge_l(" ".join(segments(prediction)), " ".join(segments(reference)))


def _sentences(text: str) -> list[list[str]]:
    # White space between two full stops is a sentence of one empty word there, and so it is here.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(reference: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return one longest common subsequence; of several the one that stands latest in the reference."""
    lengths = [[0] * (len(words) + 1)]
    for wanted in reference:
        above, row = lengths[-1], [0]
        for place, word in enumerate(words):
            row.append(above[place] + 1 if word == wanted else max(above[place + 1], row[place]))
        lengths.append(row)
    found = []
    i, j = len(reference), len(words)
    while i and j:
        if reference[i - 1] == words[j - 1]:
            i, j = i - 1, j - 1
            found.append(words[j])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
