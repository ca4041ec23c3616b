"""`python -m benchmarks.replica`."""

from benchmarks.harness import run
from benchmarks.replica.main import main

raise SystemExit(run(main))
