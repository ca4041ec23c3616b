"""`python -m benchmarks.overhead`."""

from benchmarks.harness import run
from benchmarks.overhead.main import main

raise SystemExit(run(main))
