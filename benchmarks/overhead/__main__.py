"""`python -m benchmarks.overhead`."""

from benchmarks.overhead.main import main

raise SystemExit(main())
