"""`python -m benchmarks.all2all`."""

from benchmarks.all2all.main import main
from benchmarks.harness import run

raise SystemExit(run(main))
