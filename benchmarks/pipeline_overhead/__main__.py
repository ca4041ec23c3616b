"""`python -m benchmarks.pipeline_overhead`."""

from benchmarks.pipeline_overhead.main import main

raise SystemExit(main())
