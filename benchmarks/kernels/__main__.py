"""`python -m benchmarks.kernels`."""

from benchmarks.kernels.main import main

main()
