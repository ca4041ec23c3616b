"""The ops behind gradient buckets and sharded losses: specified in Python, compiled where a compiler was there."""

from whale_torch.ops.autograd import cross_entropy, linear_cross_entropy
from whale_torch.ops.bucket import bucket_amax, bucket_pack, bucket_unpack
from whale_torch.ops.library import backend
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
    "softmax_grad",
    "softmax_stats",
]
