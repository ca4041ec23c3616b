"""`python -m benchmarks.classifier_split`."""

from benchmarks.classifier_split.main import main
from benchmarks.harness import run

raise SystemExit(run(main))
