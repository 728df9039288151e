"""Estimators that keep keys, rounded or a few of them: against float64, key by key."""

import math

import pytest
import torch
from torch import Tensor

from coverage_lab.policies.estimators import estimators

HEADS, GROUP, PAGES, SIZE, DIM = 2, 3, 5, 16, 32


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return scaled queries `[heads, G, D]` and keys `[heads, P, S, D]` with channels of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    query = 0.2 * torch.randn(HEADS, GROUP, DIM, generator=generator)
    keys = torch.randn(HEADS, PAGES, SIZE, DIM, generator=generator)
    return query, keys * (0.2 + 3 * torch.rand(DIM, generator=generator)) + torch.randn(
        DIM, generator=generator
    )


def rounded(values: list[float], levels: int) -> list[float]:
    """Return values at the nearest of even steps between the least and the largest, both held in float16."""
    offset = float(torch.tensor(min(values)).half())
    step = float(torch.tensor((max(values) - offset) / levels).half())
    codes = [min(levels, max(0, round((value - offset) / step))) if step else 0 for value in values]
    return [offset + step * code for code in codes]


def log_mass(query: list[float], keys: list[list[float]], largest: bool = False) -> float:
    logits = [math.fsum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    if largest:
        return max(logits) + math.log(len(keys))
    return math.log(math.fsum(math.exp(logit - max(logits)) for logit in logits)) + max(logits)


@pytest.mark.parametrize("name", ["int4", "int2", "ffd"])
def test_log_mass_of_every_page(name: str) -> None:
    query, keys = drawn()
    estimator = estimators.get(name)()
    found = estimator.log_mass(query, estimator.summarize(keys))
    assert found.shape == (HEADS, GROUP, PAGES)
    for head in range(HEADS):
        for page in range(PAGES):
            tokens = keys[head, page].tolist()
            if name == "int4":
                kept = [rounded(token, 15) for token in tokens]
            else:
                channels = [rounded(list(channel), 3) for channel in zip(*tokens, strict=True)]
                kept = [list(token) for token in zip(*channels, strict=True)]
            for group in range(GROUP):
                wanted = log_mass(query[head, group].tolist(), kept, name == "ffd")
                # A value on the edge of a step may go either way in float32.
                assert found[head, group, page] == pytest.approx(wanted, abs=2e-2)


@pytest.mark.parametrize(("name", "levels", "axis"), [("int4", 15, -1), ("int2", 3, -2)])
def test_no_channel_is_off_by_more_than_half_a_step(name: str, levels: int, axis: int) -> None:
    _, keys = drawn(1)
    summary = estimators.get(name)().summarize(keys)
    copy = summary["codes"] * summary["step"].float() + summary["offset"].float()
    step = (keys.amax(axis, keepdim=True) - keys.amin(axis, keepdim=True)) / levels
    assert ((copy - keys).abs() <= 0.51 * step + 2e-3 * keys.abs().max()).all()
    assert summary["codes"].unique().tolist() == list(range(levels + 1))


@pytest.mark.parametrize("name", ["int4", "int2", "ffd"])
def test_keys_that_are_all_alike_are_exact(name: str) -> None:
    query = drawn()[0]
    keys = torch.full((HEADS, PAGES, SIZE, DIM), 0.75)
    estimator = estimators.get(name)()
    found = estimator.log_mass(query, estimator.summarize(keys))
    wanted = (query * 0.75).sum(-1, keepdim=True) + math.log(SIZE)
    assert torch.allclose(found, wanted.expand_as(found), atol=1e-5)


def test_more_bits_are_closer() -> None:
    """Where channels are alike: with outlying channels a scale a token loses the others."""
    query = drawn(2)[0]
    keys = torch.randn(HEADS, PAGES, SIZE, DIM, generator=torch.Generator().manual_seed(2))
    exact = (query @ keys.flatten(1, 2).mT).unflatten(-1, (PAGES, SIZE)).logsumexp(-1)
    errors = {}
    for name in ("int4", "int2", "mean"):
        estimator = estimators.get(name)()
        errors[name] = (estimator.log_mass(query, estimator.summarize(keys)) - exact).abs().mean().item()
    assert errors["int4"] < 0.5 * errors["int2"]
    assert errors["int2"] < errors["mean"]


def test_what_is_read_of_a_page_of_64_tokens_and_128_channels() -> None:
    """In values of the cache; the page has 2 * 64 * 128."""
    wanted = {"int4": 64 * 128 // 4 + 2 * 64, "int2": 64 * 128 // 8 + 2 * 128}
    assert {name: estimators.get(name)().metadata_values(128, 64) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("size", "places"), [(16, [2, 6, 10, 14]), (3, [0, 1, 2]), (1, [0]), (5, [0, 1, 3, 4])]
)
def test_sampled_keys_stand_for_equal_parts_by_norm(size: int, places: list[int]) -> None:
    query, keys = drawn(3)[0], 2 * torch.randn(HEADS, PAGES, size, DIM)
    estimator = estimators.get("sampled")()
    found = estimator.log_mass(query, estimator.summarize(keys))
    for head in range(HEADS):
        for page in range(PAGES):
            tokens = sorted(keys[head, page].tolist(), key=lambda key: math.fsum(c * c for c in key))
            chosen = [tokens[place] for place in places]
            for group in range(GROUP):
                wanted = log_mass(query[head, group].tolist(), chosen) + math.log(size / len(chosen))
                assert found[head, group, page] == pytest.approx(wanted, abs=1e-4)
    assert estimator.metadata_values(DIM, size) == len(places) * DIM
