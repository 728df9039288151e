"""Dense attention with FlashAttention-3 over the page pool."""

from torch import Tensor

from coverage_lab.kernels.baselines import Baseline, baselines, fa3_op, page_sets
from coverage_lab.kernels.cache import PagedCache


@baselines.register("fa3-dense")
class Fa3Dense(Baseline):
    """Every page of every request; the split is made once a step for all layers, so it is not timed."""

    title = "FA3, dense"
    dense = True

    @classmethod
    def missing(cls, cache: PagedCache) -> str | None:
        return fa3_op.missing(cache)

    def prepare(self) -> None:
        self.pages, self.counts = page_sets.every_page(self.cache)
        key, value = page_sets.token_major(self.cache)
        assert self.cache.table is not None
        self._sequences = fa3_op.Sequences(
            self.query, key, value, self.cache.table, self.cache.lengths, self.scale
        )
        self._sequences.schedule()

    def run(self) -> Tensor:
        return self._sequences.run()
