"""What the pipeline runtime costs a step in CPU time, against torch's own 1F1B schedule."""
