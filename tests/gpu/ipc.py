"""CUDA IPC for real, on one GPU or several: python -m tests.gpu.ipc [processes, 2 to 4]

Each process has a KV pool of GLM-5.3's shape in device memory, exported and opened by handle. They read each other's
memory, copy pages both ways while signals order them, upload from a pinned ring, and close in order. On one card this
shows that it is right, not how fast it is: processes on one GPU take turns. Prints what it found; exit code 1 if wrong.
"""

import sys
import time

import numpy as np
import torch
import torch.multiprocessing as mp

from glm53d.ipc import mailbox
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.ipc.segment import Segment
from glm53d.model.config import GLM_5_3
from glm53d.model.kv_cache import KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.runner.cuda_ipc import CudaDriver, CudaMailbox, Upload
from glm53d.runner.mailbox import PeerPages, meet

WORLD, NUM_PAGES, START, ROUNDS = 1, 256, 512, 20


def run(rank: int, num_ranks: int, signals: Segment, memories: list[Segment], ring: Segment) -> None:
    """One process's part. An assertion ends it with 1."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    driver = CudaDriver(device)
    shape = KvShape(GLM_5_3, 64, torch.bfloat16, fp8=True)
    begun = time.monotonic()
    ends = MailboxEnds.open(signals, memories, WORLD, rank)
    box = CudaMailbox(ends, START + shape.memory_bytes(NUM_PAGES), 60.0, driver)
    opened_s = time.monotonic() - begun
    cache = KvCache(shape, box.local[START:], num_pages=NUM_PAGES, max_slots=1, max_context_len=64)
    for pages in cache.pages:
        pages.copy_(((torch.arange(NUM_PAGES) + 50 * rank) % 251).to(torch.uint8)[:, None].expand_as(pages))
    driver.synchronize()
    meet(box, rank, num_ranks)
    for other in range(num_ranks):
        pool = shape.pages(box.peer(other)[START:], NUM_PAGES)[0]
        assert pool.device == device and int(pool[3, 0]) == (3 + 50 * other) % 251, f"rank {rank} misreads rank {other}"

    copies = PeerPages(box, cache, Layout(rank, num_ranks, num_ranks, 1), START)
    everyone = np.arange(num_ranks)
    times = []
    for turn in range(ROUNDS):  # each rank takes two pages from its neighbour, all at once
        source_dp, target_dp = np.repeat((everyone + 1) % num_ranks, 2), np.repeat(everyone, 2)
        source = np.tile(np.array([turn, turn + 1]), num_ranks)
        begun = time.monotonic()
        copies.copy(source_dp, source, target_dp, source + 100)
        times.append(time.monotonic() - begun)
        expected = [(page + 50 * ((rank + 1) % num_ranks)) % 251 for page in (turn, turn + 1)]
        for pages in cache.pages:
            assert pages[[turn + 100, turn + 101], -1].tolist() == expected, f"rank {rank}: turn {turn}"

    memory = ring.array()
    upload = Upload(driver, memory)
    for turn in range(ROUNDS):
        part = memory[4096 * turn : 4096 * (turn + 1)]
        part[:] = turn
        assert (upload.put(part).cpu() == torch.from_numpy(part)).all(), f"rank {rank}: an upload differs"
        assert upload.put(np.arange(1000)).sum().item() == 499500
        upload.settle()
    pinned = upload._end > 0
    upload.close()
    meet(box, rank, num_ranks)
    del cache, copies, pool
    box.close()
    best = min(times) * 1e3
    print(f"rank {rank} on {device}: opened in {opened_s:.2f} s, ring pinned: {pinned}, two pages in {best:.2f} ms")


def main() -> int:
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    signals, memories = mailbox.create(WORLD, num_ranks)
    ring = Segment.create("ring", 1 << 20)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=run, args=(rank, num_ranks, signals, memories, ring)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    print(f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}: exit codes {codes}")
    return int(any(code != 0 for code in codes))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    sys.exit(main())
