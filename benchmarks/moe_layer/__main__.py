"""`python -m benchmarks.moe_layer`."""

from benchmarks.harness import run
from benchmarks.moe_layer.main import main

raise SystemExit(run(main))
