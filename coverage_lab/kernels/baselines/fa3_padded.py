"""FlashAttention-3 with every list as long as the longest: a rectangular grid."""

from coverage_lab.kernels.baselines import baselines, page_sets
from coverage_lab.kernels.baselines.fa3_varlen import Fa3Varlen


@baselines.register("fa3-padded")
class Fa3Padded(Fa3Varlen):
    """Rows are filled up with pages that were not selected, which are read like the others."""

    title = "FA3, padded to the longest list"

    def prepare(self) -> None:
        longest = self.counts.max().expand_as(self.counts)
        self.pages, self.counts = page_sets.extended(self.cache, self.pages, self.counts, longest)
        super().prepare()
