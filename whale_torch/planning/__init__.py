"""Plan: annotations and a description of the cluster in, one frozen plan out. Nothing here communicates."""
