"""An emulated cluster on one machine: real processes and sockets, one network namespace a node, shaped links."""

from benchmarks.cluster.cluster import Cluster, ClusterError
from benchmarks.cluster.compute import ModelledLayer
from benchmarks.cluster.namespaces import refusal, sent_bytes
from benchmarks.cluster.scale import Scale

__all__ = ["Cluster", "ClusterError", "ModelledLayer", "Scale", "refusal", "sent_bytes"]
