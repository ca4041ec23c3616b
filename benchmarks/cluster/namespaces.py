"""Nodes as anonymous network namespaces, joined by veth pairs to a bridge, each link shaped in both directions.

    node 0: eth0 --tbf--> port0 \\
                                  bridge, in a namespace of its own
    node 1: eth0 <--tbf-- port1 /

A namespace here has no name: it lives as long as a descriptor or a process holds it. So clusters side by side cannot
collide, and when the owner dies, however it dies, the kernel takes namespaces, veth pairs and bridge down with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "INTERFACE",
    "Namespace",
    "bits_per_second",
    "build_network",
    "die_with_parent",
    "measure_rate",
    "node_address",
    "refusal",
    "sent_bytes",
]

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_QUEUE_SECONDS = 0.4  # how long a packet may wait in a link's queue before it is dropped
_BURST_SECONDS = 0.0025  # what a link that was idle may send at once
_LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Lets the kernel kill this process when its parent dies; ends at once if the parent is gone already."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


class Namespace:
    """One network namespace, held by a descriptor of this process. OSError where the process may not make one."""

    def __init__(self) -> None:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _checked(_LIBC.unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
            self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            _checked(_LIBC.setns(home, _CLONE_NEWNET), "setns")
        finally:
            os.close(home)
        self.inode = os.fstat(self.fd).st_ino

    @property
    def path(self) -> str:
        """A path by which `ip` finds the namespace while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def enter(self) -> None:
        """Moves the calling thread into the namespace for good."""
        _checked(_LIBC.setns(self.fd, _CLONE_NEWNET), "setns")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Moves the calling thread into the namespace and back."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.enter()
            yield
        finally:
            _checked(_LIBC.setns(home, _CLONE_NEWNET), "setns")
            os.close(home)

    def close(self) -> None:
        """Lets go of the namespace; the kernel removes it once no process is inside."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def refusal() -> tuple[str, str] | None:
    """None where an emulated cluster can run, else (what is missing, the fix)."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux only, this is {sys.platform}", "run it on Linux, as root"
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=_SEARCH) is None:
            return f"the command `{tool}` is not on the path", "install iproute2 (`apt-get install iproute2`)"
    if os.geteuid() != 0:
        return f"network namespaces need root, this process has uid {os.geteuid()}", "run it with sudo"
    try:
        Namespace().close()
    except OSError as error:
        return f"the kernel refused a network namespace: {error}", "give the container CAP_SYS_ADMIN and CAP_NET_ADMIN"
    return None


def bits_per_second(rate: str) -> float:
    """`400mbit` -> 4e8. Raises ValueError for anything but a number followed by bit, kbit, mbit or gbit."""
    number, unit = rate.rstrip("abcdefghijklmnopqrstuvwxyz"), rate.lstrip("0123456789.")
    if unit not in _UNITS or not number:
        raise ValueError(f"rate {rate!r} is not a number followed by one of {', '.join(_UNITS)}")
    return float(number) * _UNITS[unit]


def node_address(node: int) -> str:
    """The IPv4 address of a node's interface."""
    return f"10.77.{node // 250}.{node % 250 + 1}"


def build_network(nodes: int, rate: str) -> tuple[Namespace, list[Namespace]]:
    """Makes the bridge's namespace and one for each node, joined by links of `rate` (tc's spelling, as `400mbit`).

    Raises CalledProcessError with the text of `ip` or `tc` where the kernel lacks veth, bridge or tbf.
    """
    with contextlib.ExitStack() as undo:
        switch, members = Namespace(), [Namespace() for _ in range(nodes)]
        for namespace in (switch, *members):
            undo.callback(namespace.close)
        _join(switch, members)
        shape_links(switch, members, rate)
        undo.pop_all()
    return switch, members


def shape_links(switch: Namespace, members: Sequence[Namespace], rate: str) -> None:
    """Gives every link the rate, in both directions; what is queued on one is lost and sent again."""
    bits = bits_per_second(rate)
    burst = max(int(bits / 8 * _BURST_SECONDS), 16 << 10)
    queue = max(int(bits / 8 * _QUEUE_SECONDS), 1 << 20)
    shape = f"root tbf rate {int(bits)}bit burst {burst} limit {queue}"
    _batch("tc", switch, [f"qdisc replace dev port{index} {shape}" for index in range(len(members))])
    for node in members:
        _batch("tc", node, [f"qdisc replace dev {INTERFACE} {shape}"])


def _join(switch: Namespace, members: Sequence[Namespace]) -> None:
    lines = ["link add switch type bridge", "link set switch up"]
    for index, node in enumerate(members):
        lines += [
            f"link add port{index} type veth peer name {INTERFACE} netns {node.path}",
            f"link set port{index} master switch addrgenmode none up",
        ]
    _batch("ip", switch, lines)
    for index, node in enumerate(members):
        lines = ["link set lo up", f"link set {INTERFACE} addrgenmode none", f"link set {INTERFACE} up"]
        _batch("ip", node, [*lines, f"addr add {node_address(index)}/16 dev {INTERFACE}"])


def _batch(tool: str, namespace: Namespace, lines: Sequence[str]) -> None:
    command = [shutil.which(tool, path=_SEARCH) or tool, "-batch", "-"]
    with namespace.entered():
        done = subprocess.run(
            command, input="\n".join(lines) + "\n", text=True, capture_output=True, timeout=60, check=False
        )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


def sent_bytes() -> int:
    """Bytes that the calling thread's node has put on its link, headers included; 0 outside a cluster."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def _seconds_a_byte(stream: socket.socket, skip: int) -> float:
    """Of what comes after the first `skip` bytes, up to the last byte that comes."""
    skipped, counted, start, seconds, buffer = 0, 0, 0.0, 0.0, bytearray(1 << 18)
    while size := stream.recv_into(buffer):
        if skipped < skip:
            skipped, start = skipped + size, time.perf_counter()
        else:
            counted, seconds = counted + size, time.perf_counter() - start
    return seconds / counted


def measure_rate(source: Namespace, target: Namespace, target_node: int, num_bytes: int) -> float:
    """Bit/s of payload that one TCP stream gets from one node to another, the first burst left out."""
    address, ready, seconds, failures = (node_address(target_node), 5201), threading.Event(), [0.0], []

    def guarded(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except OSError as error:
            failures.append(error)
            ready.set()

    def receive() -> None:
        target.enter()
        with socket.create_server(address) as server:
            server.settimeout(30)
            ready.set()
            stream, _ = server.accept()
            with stream:
                stream.settimeout(30)
                seconds[0] = _seconds_a_byte(stream, num_bytes // 4)

    def send() -> None:
        source.enter()
        with socket.create_connection(address, timeout=30) as stream:
            stream.sendall(bytes(num_bytes))

    receiver = threading.Thread(target=guarded, args=(receive,))
    receiver.start()
    ready.wait(30)
    sender = threading.Thread(target=guarded, args=(send,))
    sender.start()
    sender.join()
    receiver.join()
    if failures:
        raise failures[0]
    return 8 / seconds[0]
