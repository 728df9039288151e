"""FlashAttention-3 as it is, with one list for all KV heads of a request: the union of theirs."""

from torch import Tensor

from coverage_lab.kernels.baselines import Baseline, baselines, fa3_op, page_sets
from coverage_lab.kernels.cache import PagedCache


@baselines.register("fa3-shared")
class Fa3Shared(Baseline):
    """What an existing paged kernel can do with lists per KV head (paper, appendix C)."""

    title = "FA3, one list per layer"

    @classmethod
    def missing(cls, cache: PagedCache) -> str | None:
        return fa3_op.missing(cache)

    def prepare(self) -> None:
        cache = self.cache
        union = page_sets.to_set(cache, self.pages, self.counts).any(1, keepdim=True)
        pages, counts = page_sets.to_lists(union)
        self.pages, self.counts = (
            pages.expand(-1, cache.kv_heads, -1),
            counts.expand(-1, cache.kv_heads),
        )
        assert cache.table is not None
        table = cache.table.gather(1, pages[:, 0, : int(counts.max())].long())
        tokens = page_sets.list_tokens(cache, counts[:, 0])
        key, value = page_sets.token_major(cache)
        self._sequences = fa3_op.Sequences(self.query, key, value, table, tokens, self.scale)

    def run(self) -> Tensor:
        self._sequences.schedule()
        return self._sequences.run()
