"""`python -m benchmarks.moe_layer`."""

from benchmarks.moe_layer.main import main

raise SystemExit(main())
