"""The ops behind buckets, sharded losses and experts: specified in Python, compiled where a compiler was there."""

from whale_torch.ops.autograd import cross_entropy, linear_cross_entropy
from whale_torch.ops.bucket import bucket_amax, bucket_pack, bucket_unpack
from whale_torch.ops.library import backend
from whale_torch.ops.permutation import moe_chunk_sort, moe_combine, moe_combine_backward, moe_permute
from whale_torch.ops.routing import moe_positions, moe_route, moe_route_backward
from whale_torch.ops.softmax import linear_softmax_grad, linear_softmax_stats, softmax_grad, softmax_stats

__all__ = [
    "backend",
    "bucket_amax",
    "bucket_pack",
    "bucket_unpack",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_softmax_grad",
    "linear_softmax_stats",
    "moe_chunk_sort",
    "moe_combine",
    "moe_combine_backward",
    "moe_permute",
    "moe_positions",
    "moe_route",
    "moe_route_backward",
    "softmax_grad",
    "softmax_stats",
]
