"""The mailbox's form for GPUs on a driver that is none: who allocates, exports, opens, closes and frees. [R11]"""

import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from glm53d.config import Cache, Config, Kv
from glm53d.errors import StartError
from glm53d.ipc import mailbox
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.ipc.segment import Segment
from glm53d.model.config import GLM_5_3
from glm53d.model.kv_cache import KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.runner.cuda_ipc import PAGE, CudaDriver, CudaMailbox, Upload, refuse_expandable_segments
from glm53d.runner.mailbox import PeerPages
from glm53d.runner.torch_runner import TorchRunner
from tests.helpers.fake_driver import FakeDriver, Node
from tests.model.drive import Driver
from tests.model.test_mailbox import attach

WORLD = 4


def of_each_rank(num_ranks: int, run: Callable[[int], None]) -> None:
    """In a thread each, as ranks wait for each other. Raises what the first of them raises."""
    errors: dict[int, BaseException] = {}

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        raise errors[rank]


def open_all(drivers: list[FakeDriver], num_bytes: int, timeout_s: float = 60.0) -> list[CudaMailbox]:
    num_ranks = len(drivers)
    signals, memories = mailbox.create(WORLD, num_ranks)
    boxes: dict[int, CudaMailbox] = {}

    def make(rank: int) -> None:
        ends = MailboxEnds.open(attach(signals), [attach(memory) for memory in memories], WORLD, rank)
        boxes[rank] = CudaMailbox(ends, num_bytes, timeout_s, drivers[rank])

    of_each_rank(num_ranks, make)
    assert all(memory.size == 0 for memory in memories)  # the pools are the GPUs'
    return [boxes[rank] for rank in range(num_ranks)]


def test_memory_is_exported_once_opened_once_by_each_other_and_freed_when_nobody_has_it_open():
    node = Node()
    drivers = [FakeDriver(node, rank) for rank in range(3)]
    boxes = open_all(drivers, 4096)
    for rank, box in enumerate(boxes):
        assert not box.local.any() and box.peer(rank) is box.local
        box.local.fill_(rank + 1)
    assert [[int(box.peer(rank)[0]) for rank in range(3)] for box in boxes] == [[1, 2, 3]] * 3
    of_each_rank(3, lambda rank: boxes[rank].close())
    for driver in drivers:
        assert driver.calls[:2] == ["malloc", "export"] and sorted(driver.calls[2:4]) == ["open", "open"]
        assert driver.calls[4:] == ["close", "close", "free"]
    assert not node.memory


def test_memory_that_a_dead_rank_may_have_open_is_not_freed(caplog):
    node = Node()
    drivers = [FakeDriver(node, rank) for rank in range(2)]
    boxes = open_all(drivers, 64)
    boxes[1]._ends.signals.close()  # as main marks it when the process is dead
    boxes[0].close()
    assert "free" not in drivers[0].calls and "stays until this process ends" in caplog.text


def test_memory_that_cannot_be_had_is_a_refusal_with_its_size():
    with pytest.raises(StartError, match=r"rank 0 cannot share 2000 bytes of its GPU: malloc: .*out of memory"):
        open_all([FakeDriver(Node(), 0, memory_bytes=1000)], 2000)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_the_setting_s_name(name, monkeypatch):
    refuse_expandable_segments({name: "max_split_size_mb:64,expandable_segments:False"})
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(StartError, match=f"{name} asks for expandable_segments"):
        open_all([FakeDriver(Node(), 0)], 64)


def test_page_copies_go_through_opened_memory():
    """The same copy as on the CPU, over pools that each rank has in its own device memory."""
    shape = KvShape(GLM_5_3, 2, torch.bfloat16, fp8=True)
    start, num_pages = 512, 6
    node = Node()
    boxes = open_all([FakeDriver(node, rank) for rank in range(2)], start + shape.memory_bytes(num_pages))
    found: dict[int, KvCache] = {}

    def run(rank: int) -> None:
        cache = KvCache(shape, boxes[rank].local[start:], num_pages=num_pages, max_slots=1, max_context_len=4)
        for pages in cache.pages:
            pages[:] = (torch.arange(num_pages) + 10 * rank).to(torch.uint8)[:, None]
        found[rank] = cache
        copies = PeerPages(boxes[rank], cache, Layout(rank, 2, 2, 1), start)
        copies.copy(np.array([0, 1]), np.array([2, 5]), np.array([1, 0]), np.array([0, 1]))

    of_each_rank(2, run)
    for pages in found[0].pages:
        assert pages[:, 0].tolist() == [0, 15, 2, 3, 4, 5]
    for pages in found[1].pages:
        assert pages[:, -1].tolist() == [2, 11, 12, 13, 14, 15]


def test_what_lies_in_the_ring_goes_from_there_and_the_rest_by_staging():
    driver = FakeDriver(Node(), 0)
    ring = Segment.create("ring", 2 * PAGE + 100).array()
    upload = Upload(driver, ring)
    assert driver.registered == {ring.ctypes.data: 3 * PAGE}
    inside = ring[PAGE : PAGE + 40].view(np.int32)
    inside[:] = range(10)
    outside = np.arange(10, dtype=np.int64)
    assert upload.put(inside).tolist() == list(range(10)) and upload.put(outside).tolist() == list(range(10))
    assert driver.sources[0] == inside.ctypes.data and driver.sources[1] != outside.ctypes.data
    outside[:] = 0  # staged, so it is the caller's again at once
    upload.settle()
    upload.close()
    assert not driver.registered


def test_a_ring_that_cannot_be_pinned_is_staged_and_said_once(caplog):
    driver = FakeDriver(Node(), 0, can_register=False)
    ring = Segment.create("ring", PAGE).array()
    upload = Upload(driver, ring)
    assert upload.put(ring[:8]).tolist() == [0] * 8
    ring[:8] = 1
    upload.settle()
    upload.close()
    assert caplog.text.count("cannot be pinned") == 1


def test_staging_is_not_written_again_before_it_is_copied():
    """More in one step than staging holds, and one array larger than all of it: settle would see a changed byte."""
    upload = Upload(FakeDriver(Node(), 0), None)
    arrays = [np.full(300_000, i, np.uint8) for i in range(9)] + [np.arange(3 << 20, dtype=np.int64)]
    copies = [upload.put(array) for array in arrays]
    upload.settle()
    assert all(np.array_equal(copy.numpy(), array) for copy, array in zip(copies, arrays, strict=True))


def test_a_runner_whose_steps_are_uploaded_answers_as_one_that_reads_them_in_place():
    outputs = []
    for driver in (None, FakeDriver(Node(), 0)):
        runner = TorchRunner(Config(kv=Kv(page_size=16, num_pages=64)), 0, 4, 2036)
        runner._driver = driver
        drive = Driver(runner, random.Random(1))
        requests = [drive.request(list(range(3, 40))), drive.request(list(range(9, 20)), temperature=0.7, seed=3)]
        drive.run_until(requests, 6, max_chunk=20)
        outputs.append([request.outputs for request in requests])
        runner.close()
        assert driver is None or (driver.sources and not driver.pending)
    assert outputs[0] == outputs[1]


def test_the_host_pool_is_pinned_where_it_lies_and_no_larger_than_its_pages():
    driver = FakeDriver(Node(), 0)
    runner = TorchRunner(Config(kv=Kv(page_size=16, num_pages=64), cache=Cache(host_bytes=5 << 20)), 0, 4, 2036)
    runner._driver = driver
    loaded = runner.load(lambda phase, percent: None)
    [num_bytes] = driver.registered.values()
    assert 0 <= num_bytes - loaded.num_host_pages * loaded.page_file_bytes < PAGE
    runner.close()
    assert not driver.registered


def test_a_host_pool_that_cannot_be_pinned_is_refused_at_start():
    runner = TorchRunner(Config(kv=Kv(page_size=16, num_pages=64), cache=Cache(host_bytes=5 << 20)), 0, 4, 2036)
    runner._driver = FakeDriver(Node(), 0, can_register=False)
    with pytest.raises(StartError, match=r"cache\.host_bytes"):
        runner.load(lambda phase, percent: None)
    runner.close()


def test_without_cupy_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not there
    driver = CudaDriver.__new__(CudaDriver)  # a stream of its own needs a GPU
    driver._device = torch.device("cuda", 0)
    with pytest.raises(StartError, match='its extra "cuda12" or "cuda13"'):
        driver.malloc(64)
