"""The exact mass: what an oracle would know."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.kernels.estimate.reference import exact_log_mass
from coverage_lab.policies.estimators import Estimator, Summary, register


@register("exact")
@dataclass(frozen=True, kw_only=True)
class Exact(Estimator):
    """Read every key of the page."""

    title = "exact mass"
    source = "paper, 2.1.2"

    def summarize(self, keys: Tensor) -> Summary:
        return Summary(keys.shape[-2], {"keys": keys})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        return exact_log_mass(query, summary["keys"].flatten(-3, -2), summary.page_size)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        return page_size * head_dim
