"""Log masses against loops in float64, and what the estimates promise."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coverage_lab.kernels.estimate.reference import (
    exact_log_mass,
    group_shares,
    mean_log_mass,
    mvar_log_mass,
    quest_log_mass,
)
from coverage_lab.kernels.summarize.reference import page_box, page_moments


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def log_sum_exp(logits: list[float]) -> float:
    top = max(logits)
    return top + math.log(sum(math.exp(logit - top) for logit in logits))


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "group": st.sampled_from([1, 3, 4, 7]),
        "dim": st.sampled_from([1, 8, 64]),
        "scale": st.sampled_from([0.1, 1.0, 4.0]),
    }
)


class TestExact:
    @given(
        shape=shapes,
        tokens=st.integers(1, 70),
        page_size=st.sampled_from([1, 4, 16, 64]),
        offset=st.integers(0, 63),
        softcap=st.sampled_from([None, 2.0, 30.0]),
    )
    def test_equals_loops(
        self, shape: dict[str, Any], tokens: int, page_size: int, offset: int, softcap: float | None
    ):
        offset %= page_size
        query = draw(shape["seed"], 2, shape["group"], shape["dim"], scale=shape["scale"])
        keys = draw(shape["seed"] + 1, 2, tokens, shape["dim"])
        masses = exact_log_mass(query, keys, page_size, offset, softcap)
        pages = math.ceil((offset + tokens) / page_size)
        assert masses.shape == (2, shape["group"], pages)
        assert masses.dtype == torch.float32
        q, k = query.double().numpy(), keys.double().numpy()
        for head in range(2):
            for g in range(shape["group"]):
                logits = [float(q[head, g] @ k[head, token]) for token in range(tokens)]
                if softcap is not None:
                    logits = [softcap * math.tanh(logit / softcap) for logit in logits]
                for page in range(pages):
                    inside = [
                        logits[token] for token in range(tokens) if (offset + token) // page_size == page
                    ]
                    assert float(masses[head, g, page]) == pytest.approx(
                        log_sum_exp(inside), abs=2e-4, rel=1e-5
                    )

    def test_survives_large_logits(self):
        query = torch.full((1, 1, 4), 300.0)
        keys = torch.tensor([[[1.0] * 4, [-1.0] * 4, [1.0] * 4]])
        assert exact_log_mass(query, keys, 2).tolist() == [[[1200.0, 1200.0]]]

    def test_inputs_are_left_alone(self):
        query, keys = draw(0, 1, 2, 4), draw(1, 1, 9, 4)
        before = query.clone(), keys.clone()
        exact_log_mass(query, keys, 4, 3, 1.0)
        assert torch.equal(query, before[0])
        assert torch.equal(keys, before[1])

    def test_runs_in_float64(self):
        query, keys = draw(0, 1, 2, 4).double(), draw(1, 1, 9, 4).double()
        assert exact_log_mass(query, keys, 4).dtype == torch.float64


class TestEstimates:
    @given(shape=shapes, pages=st.integers(1, 9), page_size=st.sampled_from([1, 4, 16]))
    def test_equal_float64(self, shape: dict[str, Any], pages: int, page_size: int):
        query = draw(shape["seed"], 2, shape["group"], shape["dim"], scale=shape["scale"])
        keys = draw(shape["seed"] + 1, 2, pages, page_size, shape["dim"])
        mean, variance = page_moments(keys)
        lowest, highest = page_box(keys)
        ours = {
            "mean": mean_log_mass(query, mean, page_size),
            "mvar": mvar_log_mass(query, mean, variance, page_size),
            "quest": quest_log_mass(query, lowest, highest, page_size),
        }
        q, k = query.double().numpy(), keys.double().numpy()
        size = math.log(page_size)
        for head in range(2):
            for g in range(shape["group"]):
                for page in range(pages):
                    held, x = k[head, page], q[head, g]
                    first = size + float(x @ held.mean(0))
                    bound = sum(max(x[d] * held[:, d].min(), x[d] * held[:, d].max()) for d in range(len(x)))
                    expected = {
                        "mean": first,
                        "mvar": first + 0.5 * float(x**2 @ held.var(0)),
                        "quest": size + float(bound),
                    }
                    for name, value in expected.items():
                        assert ours[name].shape == (2, shape["group"], pages)
                        assert float(ours[name][head, g, page]) == pytest.approx(value, abs=1e-3, rel=1e-5), (
                            name
                        )

    @given(shape=shapes, page_size=st.sampled_from([1, 2, 16, 64]))
    def test_quest_bounds_every_logit_and_the_mass(self, shape: dict[str, Any], page_size: int):
        query = draw(shape["seed"], 1, shape["group"], shape["dim"], scale=shape["scale"])
        keys = draw(shape["seed"] + 1, 1, 5, page_size, shape["dim"])
        bound = quest_log_mass(query, *page_box(keys), page_size)
        logits = query @ keys.flatten(1, 2).mT
        largest = logits.unflatten(-1, (5, page_size)).amax(-1)
        slack = 1e-3 + 1e-5 * largest.abs()
        assert (bound - math.log(page_size) >= largest - slack).all()
        assert (bound >= exact_log_mass(query, keys.flatten(1, 2), page_size) - slack).all()

    @given(shape=shapes, page_size=st.sampled_from([1, 4, 64]))
    def test_identical_keys_are_estimated_exactly(self, shape: dict[str, Any], page_size: int):
        query = draw(shape["seed"], 1, shape["group"], shape["dim"], scale=shape["scale"])
        keys = draw(shape["seed"] + 1, 1, 3, 1, shape["dim"]).expand(1, 3, page_size, shape["dim"])
        exact = exact_log_mass(query, keys.flatten(1, 2), page_size)
        mean, variance = page_moments(keys)
        for estimate in (
            mean_log_mass(query, mean, page_size),
            mvar_log_mass(query, mean, variance, page_size),
            quest_log_mass(query, *page_box(keys), page_size),
        ):
            torch.testing.assert_close(estimate, exact, atol=1e-3, rtol=1e-5)

    @given(seed=st.integers(0, 2**20))
    def test_mean_is_a_lower_bound_and_variance_adds(self, seed: int):
        """Jensen: the mean alone never overestimates; the second term of Eq. 2 is never negative."""
        query, keys = draw(seed, 1, 3, 16), draw(seed + 1, 1, 6, 8, 16)
        mean, variance = page_moments(keys)
        low = mean_log_mass(query, mean, 8)
        assert (low <= exact_log_mass(query, keys.flatten(1, 2), 8) + 1e-4).all()
        assert (mvar_log_mass(query, mean, variance, 8) >= low).all()

    def test_mvar_is_close_for_gaussian_keys(self):
        """What Eq. 2 assumes: over many Gaussian keys the estimate comes to the exact mass."""
        query, keys = draw(0, 1, 4, 16, scale=0.4), draw(1, 1, 4, 4096, 16)
        exact = exact_log_mass(query, keys.flatten(1, 2), 4096)
        mvar = mvar_log_mass(query, *page_moments(keys), 4096)
        mean = mean_log_mass(query, page_moments(keys)[0], 4096)
        assert (mvar - exact).abs().max() < 0.2
        assert (mvar - exact).abs().mean() < 0.1 * (mean - exact).abs().mean()


class TestShares:
    @given(seed=st.integers(0, 2**20), pages=st.integers(1, 40), scale=st.sampled_from([0.1, 3.0, 50.0]))
    def test_mean_of_the_heads_softmax(self, seed: int, pages: int, scale: float):
        masses = draw(seed, 2, 3, pages, scale=scale)
        shares = group_shares(masses)
        powers = np.exp(masses.double().numpy() - masses.double().numpy().max(-1, keepdims=True))
        expected = (powers / powers.sum(-1, keepdims=True)).mean(1)
        np.testing.assert_allclose(shares.numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(shares.sum(-1).numpy(), 1, atol=1e-5)

    def test_missing_pages_have_no_share(self):
        masses = torch.tensor([[[0.0, -math.inf, 0.0], [1.0, -math.inf, 1.0]]])
        assert group_shares(masses).tolist() == [[0.5, 0.0, 0.5]]
