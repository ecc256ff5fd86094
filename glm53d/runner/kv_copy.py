"""A rank's host pool of KV pages, and the moves of a batch: between it, the device pool, files and other ranks. [R32]

    step's stream   │ SAVEs of k │ rows of k ─────────────────── │ SAVEs of k+1 │ rows of k+1 ──
    copies' stream               │ LOADs of k ────── │ (k+1 waits for their end)

On the CPU there are no streams: all that a batch carries is done before its rows. Copies between ranks are done in the
step's stream, by all ranks at once. What threads do with files waits for the copies of the batch that carries it, and
so for all before.

A page lies in one piece in the host pool, and in a piece per layer on the device. It goes through a buffer there: one
copy a page over the bus, then one kernel a layer.
"""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm53d.errors import StartError
from glm53d.ipc.records import MoveKind
from glm53d.model.kv_cache import KvCache
from glm53d.model.layout import Layout
from glm53d.runner.cuda_ipc import PAGE, Driver, DriverRefusal
from glm53d.runner.mailbox import PeerPages
from glm53d.runner.page_files import FileMoves, PageFiles

BUFFER_PAGES = 16  # of each direction's buffer on a GPU


class KvCopies:
    """Owned by one runner, beside its cache."""

    def __init__(
        self, cache: KvCache, num_host_pages: int, storage: Path | None, peers: PeerPages | None, layout: Layout,
        driver: Driver | None,
    ):  # fmt: skip
        """storage: the folder of page files; None: there are none. driver: of the device; None: it is the CPU.

        Raises StartError when the memory is not there, or cannot be pinned.
        """
        self._cache, self._peers, self._layout = cache, peers, layout
        self._ends = np.cumsum([pages.shape[1] for pages in cache.pages]).tolist()
        page_bytes, device = self._ends[-1], cache.pages[0].device
        self._on_gpu = device.type == "cuda"
        num_bytes = num_host_pages * page_bytes
        try:
            host = _whole_pages(num_bytes)
            if driver is not None and num_bytes:
                driver.register(host.data_ptr(), len(host))
        except (OSError, OverflowError, DriverRefusal) as error:
            raise StartError(f"cache.host_bytes: {num_bytes} bytes of host memory cannot be had: {error}") from None
        self._host = host[:num_bytes].view(num_host_pages, page_bytes)
        self._pinned_by = driver if num_bytes else None
        self._files = None
        if storage is not None:
            self._files = FileMoves(PageFiles(storage, page_bytes), self._host.numpy())
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._loaded: torch.cuda.Event | None = None
            self._buffers = [
                torch.empty(BUFFER_PAGES if num_host_pages else 0, page_bytes, dtype=torch.uint8, device=device)
                for _ in ("saves", "loads")
            ]

    def begin_step(self, moves: np.ndarray) -> None:
        """Queue what a batch carries; called before its rows are, for batches without moves too."""
        if self._on_gpu and self._loaded is not None:
            torch.cuda.current_stream().wait_event(self._loaded)
            self._loaded = None
        if not len(moves):
            return
        mine = moves[moves["dp_rank"] == self._layout.attn_dp_rank]
        kind = mine["kind"]
        for part in _chunks(mine[kind == MoveKind.SAVE]):
            self._save(part)
        self._copy_from_peers(moves[moves["kind"] == MoveKind.PEER])
        loads = mine[kind == MoveKind.LOAD]
        if not self._on_gpu:
            for part in _chunks(loads):
                self._load(part)
        elif len(mine):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for part in _chunks(loads):
                    self._load(part)
                self._loaded = torch.cuda.Event()
                self._loaded.record(self._stream)
        if self._files is not None:
            is_file = kind == MoveKind.FETCH
            if self._layout.owns_rows:  # of a group, one writes; each has a pool of its own to read into
                is_file = kind >= MoveKind.STORE
            self._files.submit(mine[is_file], self._ready())

    def ended(self, wait_us: int) -> tuple[np.ndarray, np.ndarray]:
        """As FileMoves.ended."""
        if self._files is None:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        return self._files.ended(wait_us)

    def close(self) -> None:
        """Stop the threads, and give the pinned memory back."""
        if self._files is not None:
            self._files.close()
        if self._pinned_by is not None:
            self._pinned_by.unregister(self._host.data_ptr())
            self._pinned_by = None

    def _save(self, moves: np.ndarray) -> None:
        sources, targets = self._index(moves["source"]), moves["target"].tolist()
        buffer = self._buffer(0, len(moves))
        for pages, part in zip(self._cache.pages, self._by_layer(buffer), strict=True):
            part.copy_(pages.index_select(0, sources))
        for page, target in zip(buffer, targets, strict=True):
            self._host[target].copy_(page, non_blocking=True)

    def _load(self, moves: np.ndarray) -> None:
        targets, sources = self._index(moves["target"]), moves["source"].tolist()
        buffer = self._buffer(1, len(moves))
        for page, source in zip(buffer, sources, strict=True):
            page.copy_(self._host[source], non_blocking=True)
        for pages, part in zip(self._cache.pages, self._by_layer(buffer), strict=True):
            pages.index_copy_(0, targets, part)

    def _copy_from_peers(self, moves: np.ndarray) -> None:
        """Between all ranks: each is asked with the same moves."""
        if len(moves):
            assert self._peers is not None, "pages of another rank, and no way to it"
            self._peers.copy(moves["source_rank"], moves["source"], moves["dp_rank"], moves["target"])

    def _ready(self) -> Callable[[], None]:
        """Waits, in a thread, for the copies queued up to now."""
        if not self._on_gpu:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)  # which has waited for the saves
        device = self._stream.device

        def wait() -> None:
            torch.cuda.set_device(device)  # a thread begins with the first one, and would make a context there
            event.synchronize()

        return wait

    def _buffer(self, which: int, count: int) -> Tensor:
        if self._on_gpu:
            return self._buffers[which][:count]
        return torch.empty(count, self._host.shape[1], dtype=torch.uint8)

    def _by_layer(self, buffer: Tensor) -> list[Tensor]:
        return [buffer[:, end - pages.shape[1] : end] for end, pages in zip(self._ends, self._cache.pages, strict=True)]

    def _index(self, pages: np.ndarray) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._cache.pages[0].device)


def _chunks(moves: np.ndarray) -> list[np.ndarray]:
    """As many at a time as a buffer takes."""
    return [moves[i : i + BUFFER_PAGES] for i in range(0, len(moves), BUFFER_PAGES)]


def _whole_pages(num_bytes: int) -> Tensor:
    """Zeros for so many bytes, to be pinned where they lie: torch's own pinned memory comes in powers of two, which of
    a large pool is much more.
    """
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, max(1, -(-num_bytes // PAGE)) * PAGE), np.uint8))
