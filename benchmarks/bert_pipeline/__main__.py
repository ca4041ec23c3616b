"""`python -m benchmarks.bert_pipeline`."""

from benchmarks.bert_pipeline.main import main
from benchmarks.harness import run

raise SystemExit(run(main))
