"""The mean key of a page."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.kernels.estimate.reference import mean_log_mass
from coverage_lab.policies.estimators import Estimator, Summary, register


@register("mean")
@dataclass(frozen=True, kw_only=True)
class Mean(Estimator):
    """Put all keys of a page at their mean; misses pages with a few outlying keys (paper, appendix A)."""

    title = "mean key"
    source = "paper, Eq. 2, first and last term"

    def summarize(self, keys: Tensor) -> Summary:
        return Summary(keys.shape[-2], {"mean": keys.mean(-2)})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        return mean_log_mass(query, summary["mean"], summary.page_size)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        return head_dim
