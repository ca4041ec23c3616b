"""BERT-large on 64 ranks: data parallelism against pipelines with data parallelism."""
