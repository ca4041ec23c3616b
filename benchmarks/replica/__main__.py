"""`python -m benchmarks.replica`."""

from benchmarks.replica.main import main

raise SystemExit(main())
