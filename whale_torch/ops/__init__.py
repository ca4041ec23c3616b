"""The ops behind buckets, sharded losses, experts, memory that ranks share and checksums.

They are specified in Python, and compiled where a compiler was there.
"""

from whale_torch.ops.activation import moe_activate, moe_activate_backward
from whale_torch.ops.autograd import cross_entropy, linear_cross_entropy
from whale_torch.ops.bucket import bucket_amax, bucket_pack, bucket_unpack
from whale_torch.ops.checksum import crc32c, crc32c_chunks, crc32c_combine
from whale_torch.ops.library import backend
from whale_torch.ops.node_rows import moe_collect, moe_scatter, moe_scatter_backward
from whale_torch.ops.permutation import moe_chunk_sort, moe_combine, moe_combine_backward, moe_permute
from whale_torch.ops.routing import moe_positions, moe_route, moe_route_backward
from whale_torch.ops.shared import await_flags, copy_blocks, post_flag
from whale_torch.ops.softmax import linear_softmax_grad, linear_softmax_stats, softmax_grad, softmax_stats

__all__ = [
    "await_flags",
    "backend",
    "bucket_amax",
    "bucket_pack",
    "bucket_unpack",
    "copy_blocks",
    "crc32c",
    "crc32c_chunks",
    "crc32c_combine",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_softmax_grad",
    "linear_softmax_stats",
    "moe_activate",
    "moe_activate_backward",
    "moe_chunk_sort",
    "moe_collect",
    "moe_combine",
    "moe_combine_backward",
    "moe_permute",
    "moe_positions",
    "moe_route",
    "moe_route_backward",
    "moe_scatter",
    "moe_scatter_backward",
    "post_flag",
    "softmax_grad",
    "softmax_stats",
]
