"""The ops behind gradient buckets, sharded losses and memory that ranks share.

They are specified in Python, and compiled where a compiler was there.
"""

from whale_torch.ops.autograd import cross_entropy, linear_cross_entropy
from whale_torch.ops.bucket import bucket_amax, bucket_pack, bucket_unpack
from whale_torch.ops.library import backend
from whale_torch.ops.shared import await_flags, copy_blocks, post_flag
from whale_torch.ops.softmax import linear_softmax_grad, linear_softmax_stats, softmax_grad, softmax_stats

__all__ = [
    "await_flags",
    "backend",
    "bucket_amax",
    "bucket_pack",
    "bucket_unpack",
    "copy_blocks",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_softmax_grad",
    "linear_softmax_stats",
    "post_flag",
    "softmax_grad",
    "softmax_stats",
]
