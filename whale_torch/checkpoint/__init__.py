"""checkpoint: what a job knows, written to files and read back into any plan."""
