"""Pages of KV in files: one page a file, named by its hash, whole or not at all; and the threads that move them. [R32]

A file is a head of 32 bytes (magic, the page's length, CRC-32 of its hash and its bytes), then the page. It is written
under another name and renamed, so a crash leaves no half of one; what a disk or a power cut has damaged is found by the
checksum when it is read, and deleted. Nothing is synced: the worst is a page that must be computed again.
"""

import contextlib
import logging
import os
import queue
import re
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from glm53d.ipc.records import MoveKind

log = logging.getLogger(__name__)

HEAD = struct.Struct("<8sQQQ")
MAGIC = b"glm53dkv"
SUFFIX, UNFINISHED = ".kv", ".new"
_NAME = re.compile(r"([0-9a-f]{16})([0-9a-f]{16})\.kv")  # of a page: the high and the low half of its hash


class PageFiles:
    """The files of one folder. The ranks of a world share it; the leader's numbers say who reads and writes what."""

    def __init__(self, folder: Path, page_bytes: int):
        self._folder = folder
        self._page_bytes = page_bytes

    def scan(self) -> np.ndarray:
        """Hashes [n, 2] uint64 of all pages there are, least recently used first.

        Deletes what no start can read any more: files that were not finished, or of pages of another length. What has
        a name that no page has is not ours, and stays.
        """
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(UNFINISHED):
                    _unlink(entry.path)
                elif (name := _NAME.fullmatch(entry.name)) is not None:
                    stat = entry.stat(follow_symlinks=False)
                    if stat.st_size == HEAD.size + self._page_bytes:
                        found.append((stat.st_mtime_ns, int(name[2], 16), int(name[1], 16)))
                    else:
                        _unlink(entry.path)
        found.sort()
        return np.array([(lo, hi) for _, lo, hi in found], np.uint64).reshape(-1, 2)

    def write(self, lo: int, hi: int, page: memoryview) -> None:
        """Raises OSError, and then there is no file."""
        path = self._path(lo, hi)
        unfinished = f"{path}.{os.getpid()}{UNFINISHED}"
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                head = HEAD.pack(MAGIC, len(page), _checksum(lo, hi, page), 0)
                done = os.writev(fd, [head, page])
                while done < len(head) + len(page):
                    done += os.write(fd, head[done:] or page[done - len(head) :])
            finally:
                os.close(fd)
            os.rename(unfinished, path)
        except OSError:
            _unlink(unfinished)
            raise

    def read(self, lo: int, hi: int, page: memoryview) -> None:
        """Fill page, which is now last used. Raises OSError, or ValueError when the file is not what was written."""
        fd = os.open(self._path(lo, hi), os.O_RDONLY)
        try:
            head = bytearray(HEAD.size)
            done = count = os.readv(fd, [head, page])
            while count and done < len(head) + len(page):
                count = os.readv(fd, [page[done - len(head) :]]) if done >= len(head) else 0
                done += count
            if done < len(head) + len(page) or os.fstat(fd).st_size != done:
                raise ValueError(f"{self._path(lo, hi)}: not as long as a page")
            if HEAD.unpack(head) != (MAGIC, len(page), _checksum(lo, hi, page), 0):
                raise ValueError(f"{self._path(lo, hi)}: damaged")
            os.utime(fd)
        finally:
            os.close(fd)

    def remove(self, lo: int, hi: int) -> None:
        """Also one that is not there."""
        _unlink(self._path(lo, hi))

    def _path(self, lo: int, hi: int) -> str:
        return f"{self._folder}/{hi:016x}{lo:016x}{SUFFIX}"


def _checksum(lo: int, hi: int, page: memoryview) -> int:
    return zlib.crc32(page, zlib.crc32(struct.pack("<QQ", lo, hi)))


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class FileMoves:
    """One rank's moves between host pages and files, beside the steps: one thread writes and deletes, one reads."""

    def __init__(self, files: PageFiles, pages: np.ndarray):
        """pages: [num_host_pages, page_bytes] uint8, the host pool."""
        self._files = files
        self._pages = pages
        self._ended: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._num_reads = 0  # on their way
        self._stopping = False
        self._said = False
        self._error: Exception | None = None  # what has ended a thread
        self._queues: list[queue.SimpleQueue[np.void | Callable[[], None] | None]] = []
        self._threads = []
        for name in ("page-write", "page-read"):
            jobs: queue.SimpleQueue[np.void | Callable[[], None] | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            self._threads.append(threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True))
            self._threads[-1].start()

    def submit(self, moves: np.ndarray, ready: Callable[[], None]) -> None:
        """Do these STOREs, FETCHes and DROPs once ready() has returned, which is called in a thread."""
        is_read = moves["kind"] == MoveKind.FETCH
        for jobs, part in zip(self._queues, (moves[~is_read], moves[is_read]), strict=True):
            if len(part):
                jobs.put(ready)
                for move in part:
                    jobs.put(move.copy())
        self._num_reads += int(np.count_nonzero(is_read))

    def ended(self, wait_us: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of moves that have ended since the last call: done, failed. While any is being read, waits for one.

        Raises what has ended a thread: nothing that it had to do would ever end.
        """
        if self._error is not None:
            raise self._error
        done: list[int] = []
        failed: list[int] = []
        timeout_s = wait_us / 1e6 if self._num_reads else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                move_id, good = self._ended.get(timeout=timeout_s) if timeout_s else self._ended.get_nowait()
                (done if good else failed).append(abs(move_id) - 1)
                self._num_reads -= move_id < 0
                timeout_s = 0.0
        return np.array(done, np.int32), np.array(failed, np.int32)

    def close(self) -> None:
        """What is not begun is left undone."""
        self._stopping = True
        for jobs, thread in zip(self._queues, self._threads, strict=True):
            jobs.put(None)
            thread.join()

    def _work(self, jobs: "queue.SimpleQueue[np.void | Callable[[], None] | None]") -> None:
        try:
            while (job := jobs.get()) is not None:
                if self._stopping:
                    continue
                if callable(job):
                    job()
                else:
                    self._do(job)
        except Exception as error:
            self._error = error

    def _do(self, move: np.void) -> None:
        kind, lo, hi, move_id = int(move["kind"]), int(move["hash_lo"]), int(move["hash_hi"]), int(move["id"]) + 1
        try:
            if kind == MoveKind.DROP:
                self._files.remove(lo, hi)
            elif kind == MoveKind.STORE:
                self._files.write(lo, hi, memoryview(self._pages[move["source"]]))
                self._ended.put((move_id, True))
            else:
                self._files.read(lo, hi, memoryview(self._pages[move["target"]]))
                self._ended.put((-move_id, True))
        except (OSError, ValueError) as error:
            if not self._said:  # a full or dying disk would say so for every page
                self._said = True
                log.warning("a page of KV is computed again, as its file is no use, and so are any others: %s", error)
            if kind == MoveKind.FETCH:
                self._files.remove(lo, hi)
            self._ended.put((-move_id if kind == MoveKind.FETCH else move_id, False))
