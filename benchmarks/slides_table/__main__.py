"""`python -m benchmarks.slides_table`."""

from benchmarks.harness import run
from benchmarks.slides_table.main import main

raise SystemExit(run(main))
