"""The machine that is simulated: every number by name, with where it is from; and how long an exchange takes on it.

Exchanges are counted in steps, each of a latency and of bytes over a bandwidth. Those of the device are NCCL's, by a
tree; those of the host are gloo's, which sums and gathers in a ring, tells in a binomial tree, and collects at the
first rank from everyone.
"""

from __future__ import annotations

import math
from typing import Literal

from ampwise.hardware import gpu_named

__all__ = ["CLUSTER", "Basis", "Known", "Machine", "hops"]

Basis = Literal["datasheet", "assumed", "measured here"]
GPU = gpu_named("H200 SXM 141GB")


class Known(float):
    """A number in a unit, and where it is from."""

    unit: str
    basis: Basis
    what: str

    def __new__(cls, value: float, unit: str, basis: Basis, what: str) -> Known:
        known = super().__new__(cls, value)
        known.unit, known.basis, known.what = unit, basis, what
        return known


def hops(count: int) -> int:
    """From one to all of so many, where all who know tell another.

    >>> [hops(count) for count in (1, 2, 5, 8)]
    [0, 1, 3, 3]
    """
    return math.ceil(math.log2(count)) if count > 1 else 0


class Machine:
    """Nodes of GPUs on a network, with one file system; another one is a class of its own, with other numbers."""

    # Computing
    flops = Known(GPU.peak_flops["bf16"], "FLOP/s", "datasheet", "BF16, dense, of an H200")
    memory = Known(float(GPU.memory_bytes or 0), "bytes", "datasheet", "of an H200")
    utilisation = Known(0.4, "", "assumed", "of the peak, in training")
    tokens = Known(8192, "tokens", "assumed", "a rank and step, as long as all ranks have no more than:")
    batch = Known(2**24, "tokens", "assumed", "a step, at most")
    # Among devices
    per_node = Known(8, "ranks", "assumed", "in a node")
    launch_s = Known(10e-6, "s", "assumed", "an exchange of the device, before anything moves")
    nvlink_s = Known(2e-6, "s", "assumed", "a step between two GPUs of a node")
    network_s = Known(10e-6, "s", "assumed", "a step between two nodes, from GPU to GPU")
    network = Known(50e9, "bytes/s", "datasheet", "400 Gbit/s a GPU (ConnectX-7)")
    # Among hosts
    tcp_s = Known(30e-6, "s", "assumed", "a step of gloo between two nodes: TCP, and a thread that wakes")
    message_s = Known(5e-6, "s", "assumed", "one more message, where one rank has to do with all")
    tcp = Known(3e9, "bytes/s", "assumed", "a TCP connection")
    store_calls = Known(1e5, "calls/s", "assumed", "of the store in which ranks find each other")
    store = Known(1e9, "bytes/s", "assumed", "of the same")
    descriptors = Known(1024, "files", "assumed", "a process may have open: Linux's soft limit, unless raised")
    # Disks
    rank_disk = Known(1e9, "bytes/s", "assumed", "a rank writes or reads")
    disk = Known(500e9, "bytes/s", "assumed", "all of them together")
    names = Known(2e4, "operations/s", "assumed", "files made, renamed or looked up in one folder, by all ranks")
    fsync_s = Known(10e-3, "s", "assumed", "an fsync")
    # Python, on one core
    sha256 = Known(1.5e9, "bytes/s", "measured here", "SHA-256")
    piece_s = Known(55e-6, "s", "measured here", "a rank's piece of a tensor, planned and merged by the first rank")
    own_s = Known(16e-3, "s", "measured here", "a rank's own Python in a checkpoint, however small")
    piece = Known(1400, "bytes", "measured here", "of memory for it, there")
    answer_s = Known(30e-6, "s", "measured here", "a rank's word in an exchange of objects, on every rank")
    row_s = Known(15e-6, "s", "measured here", "a step of a record, read")
    row = Known(700, "bytes", "measured here", "of memory for it")
    census_s = Known(18e-6, "s", "measured here", "a tensor in a sample of a record, read")
    census = Known(1700, "bytes", "measured here", "of memory for it")
    row_on_disk = Known(71, "bytes", "measured here", "of a step in a record")
    census_on_disk = Known(180, "bytes", "measured here", "of a tensor in a sample of a record")
    plain = Known(24_000, "bytes", "measured here", "of a rank's plain file: nearly all the state of random numbers")
    planned = Known(72, "bytes", "measured here", "of a piece in what a rank has")
    shared = Known(98, "bytes", "measured here", "of a piece in what a rank is told to write")
    told = Known(180, "bytes", "measured here", "of what a rank has written, and is told of the checkpoint")
    word = Known(16, "bytes", "measured here", "of a short answer")
    address = Known(
        154, "bytes", "measured here", "that a rank says of itself to make a gloo group, and 8 for each other"
    )

    def every(self) -> dict[str, Known]:
        """By name, in their order."""
        return {name: known for name, known in vars(Machine).items() if isinstance(known, Known)}

    # Steps

    def fits(self, parameters: int, ranks: int) -> bool:
        """Weights, gradients and Adam's moments in FP32, sharded, with a fifth of the memory for all else."""
        return 16 * parameters / ranks < 0.8 * self.memory

    def step_s(self, parameters: int, ranks: int) -> float:
        """6 operations a parameter and token."""
        tokens = min(self.tokens, self.batch / ranks)
        return 6 * parameters * tokens / (self.flops * self.utilisation)

    # Exchanges

    def device_all_reduce_s(self, ranks: int, size: int) -> float:
        if ranks == 1:
            return 0.0
        nodes = math.ceil(ranks / self.per_node)
        inside = hops(min(ranks, int(self.per_node))) * self.nvlink_s
        return self.launch_s + 2 * (inside + hops(nodes) * self.network_s) + 2 * size / self.network

    def all_reduce_s(self, ranks: int, size: int) -> float:
        """Twice around the ring, a share of a rank at a time."""
        return 2 * (ranks - 1) * (self.tcp_s + size / ranks / self.tcp)

    def all_gather_s(self, ranks: int, size: int) -> float:
        """Once around the ring."""
        return (ranks - 1) * (self.tcp_s + size / self.tcp)

    def gather_s(self, ranks: int, size: int) -> float:
        """All of it through the first rank's connection; the same the other way round, to scatter."""
        return self.tcp_s + (ranks - 1) * (self.message_s + size / self.tcp)

    def broadcast_s(self, ranks: int, size: int) -> float:
        return hops(ranks) * (self.tcp_s + size / self.tcp)

    def exchange_s(self, kind: str, ranks: int, size: int) -> float:
        """Of one collective of the host."""
        if ranks == 1:
            return 0.0
        forms = {
            "all_reduce": self.all_reduce_s,
            "all_gather": self.all_gather_s,
            "gather": self.gather_s,
            "scatter": self.gather_s,
            "broadcast": self.broadcast_s,
        }
        return forms[kind](ranks, size)


CLUSTER = Machine()
