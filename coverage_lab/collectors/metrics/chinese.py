"""Chinese text in pieces, without a word list.

LongBench cuts words with jieba. Here a piece is one character, or a number or a run of letters that are
not Chinese. Characters agree more easily than words, so that F1 and ROUGE-L come out higher: compare
these scores with each other, not with published ones.
"""

import re
import unicodedata
from collections.abc import Iterable

# Letters and digits that are written without spaces stand alone; others go in runs.
_PIECE = re.compile(r"\d+(?:\.\d+)+|[^\W_\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+|\S")


def segments(text: str) -> list[str]:
    """Return the pieces of a text, without white space."""
    return _PIECE.findall(text)


def bare(pieces: Iterable[str]) -> list[str]:
    """Return the pieces in lower case, without those that are punctuation or signs."""
    return [piece.lower() for piece in pieces if unicodedata.category(piece[0])[0] not in "PS"]
