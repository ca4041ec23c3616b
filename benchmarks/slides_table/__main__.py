"""`python -m benchmarks.slides_table`."""

from benchmarks.slides_table.main import main

raise SystemExit(main())
