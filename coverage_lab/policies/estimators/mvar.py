"""The mean and the variance of the keys of a page."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.kernels.estimate.reference import mvar_log_mass
from coverage_lab.kernels.summarize.reference import page_moments
from coverage_lab.policies.estimators import Estimator, Summary, register


@register("mvar")
@dataclass(frozen=True, kw_only=True)
class MeanVariance(Estimator):
    """Treat the keys of a page as independent Gaussians per channel."""

    title = "mean and variance of the keys"
    source = "paper, Eq. 2"

    def summarize(self, keys: Tensor) -> Summary:
        mean, variance = page_moments(keys)
        return Summary(keys.shape[-2], {"mean": mean, "variance": variance})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        return mvar_log_mass(query, summary["mean"], summary["variance"], summary.page_size)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        return 2 * head_dim
