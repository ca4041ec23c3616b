"""`python -m benchmarks.checkpoint`."""

from benchmarks.checkpoint.main import main
from benchmarks.harness import run

raise SystemExit(run(main))
