"""The fully reshardable format of the distributed optimizer saves the wrong slices behind a padded bucket.

The gathered tensors leave padding out, while the parameters' places count it. A bucket is padded before others where
the embedding's copy on a later pipeline stage has a bucket of its own:

    bucket 0: a a a . .    bucket 1: b b      gathered: a a a b b      place of b: 5 to 7; should be 3 to 5
"""

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any


def without_gaps(state_of: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedOptimizer.sharded_param_state_fully_reshardable`, with places that leave padding out."""

    @functools.wraps(state_of)
    def state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        maps = [buffer.param_index_map for buffer in optimizer.buffers]
        for buffer in optimizer.buffers:
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            gaps = list(accumulate(padding, initial=0))
            buffer.param_index_map = {
                parameter: (start - gaps[bucket], end - gaps[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        try:
            return state_of(optimizer, *args, **kwargs)
        finally:
            for buffer, index_map in zip(optimizer.buffers, maps, strict=True):
                buffer.param_index_map = index_map

    return state
