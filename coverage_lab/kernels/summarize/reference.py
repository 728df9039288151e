"""Page summaries in plain torch; the specification of the kernel."""

import torch
from torch import Tensor


def page_moments(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the per-channel mean and variance of the keys of each page (paper 3.1).

    Parameters
    ----------
    keys : Tensor
        `[..., P, S, D]`, P full pages of S keys.

    Returns
    -------
    mean, variance : Tensor
        `[..., P, D]`; the variance is over the S keys (population).
    """
    mean = keys.mean(-2)
    variance = (keys - mean.unsqueeze(-2)).square().mean(-2)
    return mean, variance


def page_box(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the per-channel minimum and maximum of the keys of each page (Quest).

    Parameters
    ----------
    keys : Tensor
        `[..., P, S, D]`, P full pages of S keys.

    Returns
    -------
    lowest, highest : Tensor
        `[..., P, D]`.
    """
    lowest, highest = torch.aminmax(keys, dim=-2)
    return lowest, highest
