"""`python -m benchmarks.classifier_split`."""

from benchmarks.classifier_split.main import main

raise SystemExit(main())
