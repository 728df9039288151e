"""Intervals by resampling requests."""

import math

import numpy as np
import pytest

from coverage_lab.bootstrap import RESAMPLES, interval, ratio_interval, resample_weights


def draw(generator: np.random.Generator, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of requests of different lengths whose expected ratio is 0.3."""
    lengths = generator.integers(50, 200, requests).astype(float)
    return lengths * generator.beta(3, 7, requests), lengths


def test_weights_are_draws_with_replacement() -> None:
    weights = resample_weights(7)
    assert weights.shape == (RESAMPLES, 7)
    assert (weights == weights.round()).all()
    assert (weights >= 0).all()
    assert (weights.sum(1) == 7).all()
    assert weights.mean(0) == pytest.approx(np.ones(7), abs=0.1)
    # Of a request in seven draws: binomial, with variance 7 * 1/7 * 6/7.
    assert weights.var(0) == pytest.approx(np.full(7, 6 / 7), abs=0.1)


def test_weights_follow_the_seed() -> None:
    assert (resample_weights(5, 1) == resample_weights(5, 1)).all()
    assert (resample_weights(5, 1) != resample_weights(5, 2)).any()
    assert resample_weights(3, 0, 10).shape == (10, 3)


def test_the_interval_is_the_central_part() -> None:
    assert interval(range(1001)) == pytest.approx((25, 975))
    assert interval([3.0]) == (3.0, 3.0)


def test_values_that_are_no_numbers_do_not_count() -> None:
    assert interval([*range(1001), math.nan, math.inf, -math.inf]) == pytest.approx((25, 975))
    assert all(map(math.isnan, interval([math.nan, math.inf])))
    assert all(map(math.isnan, interval([])))


@pytest.mark.parametrize("requests", [0, 1])
def test_fewer_than_two_requests_have_no_interval(requests: int) -> None:
    assert all(map(math.isnan, ratio_interval([1.0] * requests, [2.0] * requests)))


def test_a_ratio_that_does_not_vary_has_no_width() -> None:
    assert ratio_interval([1, 2, 3], [4, 8, 12]) == pytest.approx((0.25, 0.25))


def test_it_is_the_ratio_of_sums_and_not_the_mean_of_ratios() -> None:
    # One long request of ratio 0, many short ones of ratio 1: the ratio of sums is near 0.
    low, high = ratio_interval([0.0] + [1.0] * 20, [1e6] + [1.0] * 20)
    assert low < 1e-4
    assert high == 1.0  # resamples without the long request


def test_requests_without_a_denominator_do_no_harm() -> None:
    low, high = ratio_interval([0, 1, 1, 2], [0, 2, 2, 4])
    assert (low, high) == pytest.approx((0.5, 0.5))


def test_it_follows_the_seed_and_the_scale() -> None:
    top, bottom = draw(np.random.default_rng(0), 12)
    found = ratio_interval(top, bottom, 5)
    assert found == ratio_interval(top, bottom, 5)
    assert found != ratio_interval(top, bottom, 6)
    assert ratio_interval(10 * top, bottom, 5) == pytest.approx([10 * end for end in found])


def test_it_contains_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        low, high = ratio_interval(*draw(generator, 40), seed)
        hits += low <= 0.3 <= high
    assert 180 <= hits <= 198  # 95% of 200 is 190, give or take three standard deviations


def test_it_narrows_with_the_root_of_the_requests() -> None:
    generator = np.random.default_rng(1)
    width = {
        requests: np.mean([np.diff(ratio_interval(*draw(generator, requests), seed)) for seed in range(20)])
        for requests in (20, 80, 320)
    }
    assert width[20] / width[80] == pytest.approx(2, rel=0.15)
    assert width[80] / width[320] == pytest.approx(2, rel=0.15)
