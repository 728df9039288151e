"""Lists that are drawn as far as they are asked for."""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Growing(Generic[T]):
    """A stream that remembers, so that a longer start begins with the shorter one."""

    def __init__(self, stream: Iterator[T]) -> None:
        self._stream = stream
        self._drawn: list[T] = []

    def first(self, count: int) -> list[T]:
        """Return the first items."""
        self._drawn.extend(islice(self._stream, max(0, count - len(self._drawn))))
        return self._drawn[:count]
