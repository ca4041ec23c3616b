"""`python -m benchmarks.recording`."""

from benchmarks.recording.main import main

raise SystemExit(main())
