"""A GPU's driver without a GPU: what CUDA refuses is refused, and what would be a fault on a device fails a check."""

import itertools
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm53d.runner.cuda_ipc import DriverRefusal


@dataclass
class Node:
    """What all processes of a machine have in common: allocations by handle, and who has them open."""

    memory: dict[bytes, Tensor] = field(default_factory=dict)
    opened: dict[bytes, set[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))


class FakeDriver:
    """Of one process. Host memory plays the device; what is uploaded must not change before settle."""

    def __init__(self, node: Node, process: int, *, memory_bytes: int = 1 << 30, can_register: bool = True):
        self.node, self.process = node, process
        self.memory_bytes, self.can_register = memory_bytes, can_register
        self.mine: dict[int, bytes] = {}  # address -> handle
        self.theirs: dict[int, bytes] = {}
        self.registered: dict[int, int] = {}
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.sources: list[int] = []  # host addresses that were uploaded from
        self.calls: list[str] = []

    def malloc(self, num_bytes: int) -> int:
        self.calls.append("malloc")
        if num_bytes > self.memory_bytes:
            raise DriverRefusal("malloc: cudaErrorMemoryAllocation: out of memory")
        with self.node.lock:
            number = next(self.node.numbers)
        handle = number.to_bytes(64, "little")
        self.node.memory[handle] = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)  # cudaMalloc does not clear
        self.node.opened[handle] = set()
        self.mine[number << 32] = handle
        return number << 32

    def free(self, address: int) -> None:
        self.calls.append("free")
        handle = self.mine.pop(address)
        assert not self.node.opened[handle], "freed while others have it open"
        del self.node.memory[handle]

    def export(self, address: int) -> bytes:
        self.calls.append("export")
        return self.mine[address]

    def open(self, handle: bytes) -> int:
        self.calls.append("open")
        if handle in self.mine.values():
            raise DriverRefusal("ipcOpenMemHandle: cudaErrorDeviceUninitialized: a process's own handle")
        assert handle not in self.theirs.values(), "opened once for each process"
        with self.node.lock:
            address = next(self.node.numbers) << 32
        self.theirs[address] = handle
        self.node.opened[handle].add(self.process)
        return address

    def close(self, address: int) -> None:
        self.calls.append("close")
        self.node.opened[self.theirs.pop(address)].remove(self.process)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        memory = self.node.memory[self.mine.get(address) or self.theirs[address]]
        assert len(memory) == num_bytes
        return memory

    def register(self, address: int, num_bytes: int) -> None:
        assert address % 4096 == 0 and num_bytes % 4096 == 0, "whole pages"
        if not self.can_register:
            raise DriverRefusal("cudaHostRegister: error 801")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, host: Tensor) -> Tensor:
        copy = host.clone()
        self.pending.append((host, copy))
        self.sources.append(host.data_ptr())
        return copy

    def settle(self) -> None:
        for host, copy in self.pending:
            assert torch.equal(host, copy), "host memory changed before it was copied"
        self.pending.clear()

    def synchronize(self) -> None:
        self.settle()
