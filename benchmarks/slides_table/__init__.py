"""The published table: ResNet-50 with 100 000 classes on 8 to 64 V100, split classifier against data parallelism."""
