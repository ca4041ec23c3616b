"""`python -m benchmarks.pipeline_bubble`."""

from benchmarks.harness import run
from benchmarks.pipeline_bubble.main import main

raise SystemExit(run(main))
