"""The merge of partial attention in plain torch; the specification of the kernel."""

from torch import Tensor


def merge(parts: Tensor, log_sums: Tensor) -> Tensor:
    """Return the attention over all keys from that over disjoint parts of them.

    Parameters
    ----------
    parts : Tensor
        `[..., parts, D]`, attention over each part.
    log_sums : Tensor
        `[..., parts]`, log-sum-exp of the logits of each part; minus infinity for an empty one.

    Returns
    -------
    Tensor
        `[..., D]`.
    """
    weights = log_sums.softmax(-1)
    return (weights.unsqueeze(-1) * parts.masked_fill((weights == 0).unsqueeze(-1), 0)).sum(-2)
