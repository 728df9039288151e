"""FlashAttention-3 with a sequence of its own for every (request, KV head)."""

from torch import Tensor

from coverage_lab.kernels.baselines import Baseline, baselines, fa3_op, page_sets
from coverage_lab.kernels.cache import PagedCache


@baselines.register("fa3-varlen")
class Fa3Varlen(Baseline):
    """The given lists, exactly; FA3 splits long rows on the device, in every layer and step."""

    title = "FA3, varlen"

    @classmethod
    def missing(cls, cache: PagedCache) -> str | None:
        return fa3_op.missing(cache) or (
            None if page_sets.rows_as_pool(cache) else "needs a pool whose KV heads are whole pages (HND)"
        )

    def prepare(self) -> None:
        views = page_sets.rows_as_pool(self.cache)
        assert views is not None
        cache, group = self.cache, self.query.shape[1] // self.cache.kv_heads
        width = int(self.counts.max())
        self._sequences = fa3_op.Sequences(
            self.query.reshape(cache.rows, group, cache.head_dim),
            *views,
            page_sets.row_places(cache, self.pages[..., :width], self.counts),
            page_sets.list_tokens(cache, self.counts).flatten(),
            self.scale,
        )

    def run(self) -> Tensor:
        self._sequences.schedule()
        return self._sequences.run().view(self.query.shape)
