"""Log masses of pages in plain torch; the specification of the kernel.

Every query here is scaled already: `query = s * q`, with the model's own s. Masses are in natural log.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def page_logits(
    query: Tensor, keys: Tensor, page_size: int, offset: int = 0, softcap: float | None = None
) -> Tensor:
    """Return the logits of each page, minus infinity where it has no key.

    Parameters
    ----------
    query : Tensor
        `[..., G, D]`, the scaled queries of the heads that share the keys.
    keys : Tensor
        `[..., T, D]`, the visible keys, oldest first.
    page_size : int
        Tokens a page.
    offset : int
        Tokens of the first page that come before the first visible key (a sliding window cut them off).
    softcap : float, optional
        The model's cap c on logits: `c * tanh(logit / c)`.

    Returns
    -------
    Tensor
        `[..., G, P, page_size]` with `P = ceil((offset + T) / page_size)`.
    """
    logits = query @ keys.transpose(-1, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    tail = -(offset + keys.shape[-2]) % page_size
    logits = F.pad(logits, (offset, tail), value=-math.inf)
    return logits.unflatten(-1, (-1, page_size))


def exact_log_mass(
    query: Tensor, keys: Tensor, page_size: int, offset: int = 0, softcap: float | None = None
) -> Tensor:
    """Return the exact log mass of each page, `log sum_{k in P} exp(query . k)`, `[..., G, P]`.

    Parameters are those of `page_logits`.
    """
    return page_logits(query, keys, page_size, offset, softcap).logsumexp(-1)


def mean_log_mass(query: Tensor, mean: Tensor, page_size: int) -> Tensor:
    """Return the log mass of pages whose keys all lie at their mean: Eq. 2 without its second term.

    `query` is `[..., G, D]`, `mean` `[..., P, D]`, the result `[..., G, P]`.
    """
    return query @ mean.transpose(-1, -2) + math.log(page_size)


def mvar_log_mass(query: Tensor, mean: Tensor, variance: Tensor, page_size: int) -> Tensor:
    """Return the log mass of pages whose keys are independent Gaussians per channel (Eq. 2).

    `query` is `[..., G, D]`, `mean` and `variance` `[..., P, D]`, the result `[..., G, P]`.
    """
    spread = 0.5 * query.square() @ variance.transpose(-1, -2)
    return mean_log_mass(query, mean, page_size) + spread


def quest_log_mass(query: Tensor, lowest: Tensor, highest: Tensor, page_size: int) -> Tensor:
    """Return `log S` plus Quest's upper bound on the largest logit of each page.

    The bound is `sum_d max(q_d lowest_d, q_d highest_d)`. `query` is `[..., G, D]`, `lowest` and
    `highest` `[..., P, D]`, the result `[..., G, P]`.
    """
    # max(q l, q h) = q h for q > 0 and q l for q < 0, so two products do.
    positive, negative = query.clamp(min=0), query.clamp(max=0)
    bound = positive @ highest.transpose(-1, -2) + negative @ lowest.transpose(-1, -2)
    return bound + math.log(page_size)


def group_shares(log_mass: Tensor) -> Tensor:
    """Return the attention shares of a group: softmax over pages per query head, then the mean over heads.

    `log_mass` is `[..., G, P]`, the result `[..., P]` (Algorithm 1, line 3).
    """
    # Head after head: a sum over an axis may round alike columns differently, and part pages that tie.
    shares = log_mass.softmax(-1).unbind(-2)
    return sum(shares[1:], shares[0]) / len(shares)
