"""Quest's bound on the largest logit of a page."""

from dataclasses import dataclass

from torch import Tensor

from coverage_lab.kernels.estimate.reference import quest_log_mass
from coverage_lab.kernels.summarize.reference import page_box
from coverage_lab.policies.estimators import Estimator, Summary, register


@register("quest")
@dataclass(frozen=True, kw_only=True)
class Quest(Estimator):
    """Bound the logits of a page by the per-channel box of its keys, and take every key at the bound.

    Quest itself only ranks pages by the bound, per query head; as a mass it lets the other budgets use it.
    """

    title = "upper bound from the box of the keys"
    source = "Quest (Tang et al., 2024); paper, 2.1.2"

    def summarize(self, keys: Tensor) -> Summary:
        lowest, highest = page_box(keys)
        return Summary(keys.shape[-2], {"lowest": lowest, "highest": highest})

    def log_mass(self, query: Tensor, summary: Summary) -> Tensor:
        return quest_log_mass(query, summary["lowest"], summary["highest"], summary.page_size)

    def metadata_values(self, head_dim: int, page_size: int) -> int:
        return 2 * head_dim
