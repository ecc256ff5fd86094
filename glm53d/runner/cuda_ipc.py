"""The mailbox on GPUs, by CUDA IPC; and a step's arrays from host memory to the device. [R11]

    each rank     one plain cudaMalloc | ids' rooms | KV pools |, exported once at start: the handle goes with signals
    the others    open the handle once; a page copy is then a gather that reads over NVLink

A handle names a whole allocation, so the memory is not the caching allocator's, which hands out parts of larger ones.
The exporter must outlive who has opened its handle: at the end all close what they opened, meet, and free what is
theirs. If a rank has died there is no such end; the world ends, and the driver frees what dead processes had.
"""

import logging
import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from glm53d.errors import EngineError, Glm53dError, StartError
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.runner.mailbox import Signal, meet

log = logging.getLogger(__name__)

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
CLOSE_TIMEOUT_S = 2.0  # the others' end may be a collective that never ends, because we are the one that fails
PAGE = os.sysconf("SC_PAGE_SIZE")
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class DriverRefusal(Exception):
    """The driver does not do what it was asked for, here: why, in its words."""


class Driver(Protocol):
    """The few calls that need a GPU. Addresses are the driver's; what it cannot do raises DriverRefusal."""

    def malloc(self, num_bytes: int) -> int:
        """Plain memory of our device."""
        ...

    def free(self, address: int) -> None:
        """Give back what malloc gave."""
        ...

    def export(self, address: int) -> bytes:
        """64 bytes by which other processes open what malloc gave."""
        ...

    def open(self, handle: bytes) -> int:
        """The memory behind another process's handle. A process's own handle is refused."""
        ...

    def close(self, address: int) -> None:
        """Give back what open gave."""
        ...

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """The memory as uint8 on our device, wherever it lies."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory, of whole pages, so that the device copies from it directly."""
        ...

    def unregister(self, address: int) -> None:
        """Undo register, before the memory is unmapped."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Pinned host memory of our own, uint8."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """A copy on the device, which what is launched from now on finds there; host stays as it is until settle."""
        ...

    def settle(self) -> None:
        """Wait for all uploads, and for nothing else that is queued."""
        ...

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        ...


class CudaDriver:
    """The real one: cupy for memory handles, torch for what it has itself."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def malloc(self, num_bytes: int) -> int:
        """See Driver."""
        return self._call("malloc", num_bytes)

    def free(self, address: int) -> None:
        """See Driver."""
        self._call("free", address)

    def export(self, address: int) -> bytes:
        """See Driver."""
        return bytes(self._call("ipcGetMemHandle", address))

    def open(self, handle: bytes) -> int:
        """See Driver."""
        return self._call("ipcOpenMemHandle", handle, LAZY_PEER_ACCESS)

    def close(self, address: int) -> None:
        """See Driver."""
        self._call("ipcCloseMemHandle", address)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """See Driver."""
        cupy = _cupy()
        # Ours by declaration: torch would take a peer's memory for the peer's device, and run its kernels there.
        memory = cupy.cuda.UnownedMemory(address, num_bytes, self, self._device.index)
        array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return torch.from_dlpack(array)

    def register(self, address: int, num_bytes: int) -> None:
        """See Driver."""
        self._call("hostRegister", address, num_bytes, PORTABLE_MAPPED)  # torch's own leaves a refusal behind

    def unregister(self, address: int) -> None:
        """See Driver."""
        self._call("hostUnregister", address)

    def pinned(self, num_bytes: int) -> Tensor:
        """See Driver."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor) -> Tensor:
        """See Driver."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            copy = host.to(self._device, non_blocking=True)
        copy.record_stream(computing)
        computing.wait_stream(self._copies)
        return copy

    def settle(self) -> None:
        """See Driver."""
        self._copies.synchronize()

    def synchronize(self) -> None:
        """See Driver."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DriverRefusal(str(error)) from None

    def _call(self, name: str, *args: int | bytes) -> int:
        cupy = _cupy()
        try:
            with cupy.cuda.Device(self._device.index):
                return getattr(cupy.cuda.runtime, name)(*args)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DriverRefusal(f"{name}: {error}") from None


def _cupy():  # type: ignore[no-untyped-def]  # cupy is there on GPU machines only
    try:
        import cupy
    except ImportError:
        raise StartError('ranks on GPUs need cupy: install glm53d with its extra "cuda12" or "cuda13"') from None
    return cupy


def refuse_expandable_segments(environment: Mapping[str, str]) -> None:
    """Raise StartError when torch's allocator is set to memory that no handle can be made of."""
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise StartError(
                f"{name} asks for expandable_segments, and memory that is mapped piece by piece cannot be shared "
                "between ranks by CUDA IPC: take expandable_segments out of it"
            )


class CudaMailbox:
    """The form for GPUs: see runner.mailbox.Mailbox, whose words these are."""

    def __init__(self, ends: MailboxEnds, num_bytes: int, timeout_s: float, driver: Driver):
        """Raises StartError when memory cannot be had or shared, in words."""
        refuse_expandable_segments(os.environ)
        self._ends, self._driver = ends, driver
        self._rank, self._num_ranks = ends.signals.rank, ends.signals.num_ranks
        self._signals = [Signal(ends.signals, rank, timeout_s) for rank in range(self._num_ranks)]
        self._opened: list[int] = []
        try:
            self._address = driver.malloc(num_bytes)
            local = driver.tensor(self._address, num_bytes).zero_()
            driver.synchronize()
            ends.signals.export_memory(driver.export(self._address), num_bytes)
            meet(self, self._rank, self._num_ranks)
            self._memories = [local if rank == self._rank else self._open(rank) for rank in range(self._num_ranks)]
        except DriverRefusal as error:
            raise StartError(f"rank {self._rank} cannot share {num_bytes} bytes of its GPU: {error}") from None

    def _open(self, rank: int) -> Tensor:
        exported = self._ends.signals.exported(rank)
        if exported is None:
            raise EngineError(f"rank {rank} has exported no memory")
        handle, num_bytes = exported
        self._opened.append(self._driver.open(handle))
        return self._driver.tensor(self._opened[-1], num_bytes)

    @property
    def local(self) -> Tensor:
        """See Mailbox."""
        return self._memories[self._rank]

    def peer(self, rank: int) -> Tensor:
        """See Mailbox."""
        return self._memories[rank]

    def signal(self, rank: int) -> Signal:
        """See Mailbox."""
        return self._signals[rank]

    def close(self) -> None:
        """See Mailbox. Close what is others', meet, free what is ours; tensors of it are dead then."""
        try:
            self._driver.synchronize()
            for address in self._opened:
                self._driver.close(address)
            meet(self, self._rank, self._num_ranks, CLOSE_TIMEOUT_S)
            self._driver.free(self._address)
        except (Glm53dError, DriverRefusal) as error:
            log.warning("GPU memory stays until this process ends, as others may have it open: %s", error)
        self._ends.signals.close()


class Upload:
    """A step's host arrays to the device. Those in the batch ring go from where they lie; others by pinned staging."""

    def __init__(self, driver: Driver, ring: np.ndarray | None):
        """ring: the batch ring's memory, whose pages are pinned if the driver lets us. None: this rank reads none."""
        self._driver = driver
        self._start = self._end = 0
        self._staging, self._used = driver.pinned(1 << 20), 0
        if ring is None:
            return
        start, size = ring.ctypes.data, -(-ring.nbytes // PAGE) * PAGE
        try:
            driver.register(start, size)
            self._start, self._end = start, start + size
        except DriverRefusal as error:
            log.warning("the batch ring cannot be pinned, so steps are copied once more on their way: %s", error)

    def put(self, array: np.ndarray) -> Tensor:
        """The array [n] on the device. The host's may change once settle has returned."""
        if self._start <= array.ctypes.data < self._end:
            return self._driver.upload(torch.from_numpy(array))
        if self._used + array.nbytes > len(self._staging):
            self.settle()
        if array.nbytes > len(self._staging):
            self._staging = self._driver.pinned(1 << (array.nbytes - 1).bit_length())
        room = self._staging[self._used : self._used + array.nbytes].numpy()
        self._used += -(-array.nbytes // 8) * 8
        room[:] = np.ascontiguousarray(array).view(np.uint8)
        return self._driver.upload(torch.from_numpy(room.view(array.dtype)))

    def settle(self) -> None:
        """Until every array put is on the device: then the ring's record can be popped."""
        self._driver.settle()
        self._used = 0

    def close(self) -> None:
        """Before the ring is unmapped."""
        if self._end:
            self._driver.unregister(self._start)
            self._start = self._end = 0
