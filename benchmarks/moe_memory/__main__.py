"""`python -m benchmarks.moe_memory`."""

from benchmarks.harness import run
from benchmarks.moe_memory.main import main

raise SystemExit(run(main))
