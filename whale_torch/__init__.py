"""whale_torch: hybrid-parallel training in PyTorch from a few annotations on an ordinary model."""

from whale_torch.errors import (
    AnnotationError,
    CheckpointError,
    CommError,
    LayoutError,
    LossError,
    PlanError,
    TraceError,
    WhaleError,
)

__version__ = "0.1.0"

__all__ = [
    "AnnotationError",
    "CheckpointError",
    "CommError",
    "LayoutError",
    "LossError",
    "PlanError",
    "TraceError",
    "WhaleError",
]
