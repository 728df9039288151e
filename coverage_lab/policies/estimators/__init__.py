"""Estimates of the attention mass of a page. A new one is a new file with a registered class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from coverage_lab.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Summary:
    """What an estimator keeps of full pages.

    Parameters
    ----------
    page_size : int
        Tokens a page.
    parts : dict of str to Tensor
        Named tensors `[heads, P, ...]`, all of the same number of pages P.
    """

    page_size: int
    parts: dict[str, Tensor]

    def __getitem__(self, part: str) -> Tensor:
        return self.parts[part]

    @property
    def n_pages(self) -> int:
        """Number of pages."""
        return next(iter(self.parts.values())).shape[1]

    def pages(self, start: int, stop: int) -> Summary:
        """Return the summary of pages `start` to `stop - 1`."""
        return Summary(self.page_size, {name: part[:, start:stop] for name, part in self.parts.items()})

    def append(self, other: Summary) -> Summary:
        """Return the summary of these pages followed by those of `other`."""
        import torch

        return Summary(
            self.page_size, {name: torch.cat([part, other[name]], 1) for name, part in self.parts.items()}
        )

    def rounded(self, dtype: torch.dtype) -> Summary:
        """Return the summary with float32 parts rounded to a type; what it can't hold becomes its largest."""
        import torch

        most = torch.finfo(dtype).max
        return Summary(
            self.page_size,
            {
                name: part.clamp(-most, most).to(dtype).float() if part.dtype == torch.float32 else part
                for name, part in self.parts.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Base class of estimators.

    Attributes
    ----------
    title : str
        What it does, in a few words.
    source : str
        Where it comes from.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    def summarize(self, keys: Tensor) -> Summary:
        """Return the summary of full pages; `keys` is `[heads, P, S, D]` float32."""
        raise NotImplementedError

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        """Return the log mass of each summarised page.

        `query` is `[heads, G, D]`, scaled already; the result is `[heads, G, P]`.
        """
        raise NotImplementedError

    def pool(self, logits: Tensor) -> Tensor:
        """Return the log mass of pages whose logits are known: `[..., P, S]` to `[..., P]`.

        A place without a key has the logit minus infinity. The sink and the current page are pooled so.
        """
        return logits.logsumexp(-1)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        """Return how many values are read a page; the page itself has `2 * page_size * head_dim`."""
        raise NotImplementedError


estimators: Registry[Estimator] = Registry("estimator", __name__)
register = estimators.register
