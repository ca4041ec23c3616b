"""What `import whale_torch` costs: torch, and nothing that takes as long again."""

from __future__ import annotations

import subprocess
import sys

_LATE = ("torch._dynamo", "torch.distributed.fsdp", "transformers", "safetensors", "rich", "matplotlib")
_LOADED = f"import sys, whale_torch, whale_torch.moe; print(*sorted(set({_LATE}) & set(sys.modules)))"


def test_what_a_part_needs_is_imported_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == []
