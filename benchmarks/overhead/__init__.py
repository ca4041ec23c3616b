"""What the library itself costs a step in CPU time, against the same collectives written by hand."""
