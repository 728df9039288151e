"""FlashAttention-3 with rows in buckets of a power of two, one launch a bucket."""

import torch
from torch import Tensor

from coverage_lab.kernels.baselines import baselines, fa3_op, page_sets
from coverage_lab.kernels.baselines.fa3_varlen import Fa3Varlen


@baselines.register("fa3-buckets")
class Fa3Buckets(Fa3Varlen):
    """Rows are filled up to the next power of two.

    Which rows are in a bucket, and how FA3 splits them, the host would have to know before every launch;
    neither is timed. Rows are sorted by bucket, and one gather puts the results back in order.
    """

    title = "FA3, buckets of a power of two"

    def prepare(self) -> None:
        wanted = page_sets.power_of_two(self.counts)
        self.pages, self.counts = page_sets.extended(self.cache, self.pages, self.counts, wanted)
        views = page_sets.rows_as_pool(self.cache)
        assert views is not None
        cache = self.cache
        counts, order = self.counts.flatten().sort(stable=True)
        query = self.query.reshape(cache.rows, -1, cache.head_dim)[order]
        places = page_sets.row_places(cache, self.pages, self.counts)[order]
        tokens = page_sets.list_tokens(cache, self.counts).flatten()[order]
        self._found = torch.empty_like(query)
        self._back = order.argsort()
        self._buckets = []
        sizes, rows = counts.unique_consecutive(return_counts=True)
        for size, part in zip(sizes.tolist(), torch.arange(cache.rows).split(rows.tolist()), strict=True):
            place = slice(int(part[0]), int(part[-1]) + 1)
            bucket = fa3_op.Sequences(
                query[place], *views, places[place, :size], tokens[place], self.scale, self._found[place]
            )
            bucket.schedule()
            self._buckets.append(bucket)

    def run(self) -> Tensor:
        for bucket in self._buckets:
            bucket.run()
        return self._found[self._back].view(self.query.shape)
