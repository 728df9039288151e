"""Page summaries against numpy in float64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from coverage_lab.kernels.summarize.reference import page_box, page_moments


@given(
    seed=st.integers(0, 2**20),
    pages=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 16, 64]),
    dim=st.sampled_from([1, 8, 96]),
    shift=st.sampled_from([0.0, 100.0]),
)
def test_summaries_equal_numpy(seed: int, pages: int, page_size: int, dim: int, shift: float):
    """Far from zero too, where a variance from squares would lose its digits."""
    keys = shift + torch.randn(2, pages, page_size, dim, generator=torch.Generator().manual_seed(seed))
    held = keys.double().numpy()
    mean, variance = page_moments(keys)
    np.testing.assert_allclose(mean.numpy(), held.mean(2), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(variance.numpy(), held.var(2), rtol=1e-4, atol=1e-4)
    lowest, highest = page_box(keys)
    np.testing.assert_array_equal(lowest.numpy(), keys.numpy().min(2))
    np.testing.assert_array_equal(highest.numpy(), keys.numpy().max(2))


def test_float64_stays_float64():
    keys = torch.zeros(1, 1, 2, 3, dtype=torch.float64)
    assert {part.dtype for part in (*page_moments(keys), *page_box(keys))} == {torch.float64}
