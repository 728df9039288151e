"""Blocks are worked on in parallel, and come back in order."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from coverage_lab.policies.parallel import in_order


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_results_come_in_order_whatever_finishes_first() -> None:
    assert list(in_order(lambda n: time.sleep(0.002 * (5 - n % 5)) or n * n, range(20))) == [
        n * n for n in range(20)
    ]


@pytest.mark.usefixtures("four_threads")
def test_workers_use_one_core_each_and_the_caller_keeps_its_own() -> None:
    seen = list(in_order(lambda n: (torch.get_num_threads(), threading.get_ident()), range(8)))
    assert {threads for threads, _ in seen} == {1}
    assert threading.get_ident() not in {ident for _, ident in seen}
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            yield n

    results = in_order(lambda n: n, items())
    assert next(results) == 0
    assert len(taken) <= 6
    results.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_an_error_in_a_worker_reaches_the_caller() -> None:
    def work(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    with pytest.raises(ValueError, match="three"):
        list(in_order(work, range(50)))
    assert torch.get_num_threads() == 4
