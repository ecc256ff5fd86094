"""Memory that ranks share: ids of a step, pages from pool to pool, and what happens when a peer is gone. [R11]"""

import os
import threading

import numpy as np
import pytest
import torch

from glm53d.errors import EngineError, PeerGone, StartError
from glm53d.ipc import mailbox
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.ipc.segment import Segment
from glm53d.model.layout import Layout
from glm53d.runner.mailbox import IdExchange, ShmMailbox
from glm53d.runner.torch_runner import TorchRunner
from tests.model.synthetic import make_checkpoint
from tests.model.test_parallel import config_of

WORLD = 3


def attach(segment: Segment) -> Segment:
    """As another process would: a mapping of its own."""
    return Segment.attach(os.dup(segment.fd))


def mailboxes(num_ranks: int, num_bytes: int) -> list[ShmMailbox]:
    """One of each rank, each made in a thread, as they wait for each other."""
    signals, memories = mailbox.create(WORLD, num_ranks)
    made: list[ShmMailbox | None] = [None] * num_ranks

    def make(rank: int) -> None:
        ends = MailboxEnds.open(attach(signals), [attach(memory) for memory in memories], WORLD, rank)
        made[rank] = ShmMailbox(ends, num_bytes, 60.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [box for box in made if box is not None]


def test_each_rank_reads_what_another_has_written_and_told():
    first, second = mailboxes(2, 4096)
    assert first.local.shape == (4096,) and not first.local.any()
    first.local[100:200] = 7
    first.signal(1).tell()
    second.signal(0).wait()
    assert second.peer(0)[99:201].tolist() == [0, *[7] * 100, 0]
    assert second.peer(1).data_ptr() == second.local.data_ptr()


def test_a_peer_that_says_nothing_is_an_error_in_time_and_one_that_is_gone_at_once():
    first, second = mailboxes(2, 64)
    with pytest.raises(EngineError, match=r"rank 1 did not answer within 0\.01 s"):
        first.signal(1).wait(timeout_s=0.01)
    second.signal(0).tell()
    second.close()
    with pytest.raises(PeerGone):
        first.signal(1).wait()


def test_more_memory_than_there_is_is_refused_before_any_rank_takes_its_own(monkeypatch):
    """It was taken, all of it, and the kernel killed processes until there was room."""
    monkeypatch.setattr("glm53d.runner.mailbox.available_bytes", lambda: 10_000)
    signals, memories = mailbox.create(WORLD, 2)
    refused: list[str] = []

    def make(rank: int) -> None:
        try:
            ShmMailbox(MailboxEnds.open(attach(signals), [attach(m) for m in memories], WORLD, rank), 6_000, 60.0)
        except StartError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2 and "KV of 6000 bytes for each of 2 ranks does not fit the 10000 bytes" in refused[0]
    assert all(attach(memory).size == 0 for memory in memories)
    assert all(box.local.shape == (5_000,) for box in mailboxes(2, 5_000))  # just what there is


@pytest.mark.parametrize(("attn_dp_size", "owners"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_ids_reach_every_rank_in_order_of_group(attn_dp_size, owners):
    """Many rounds, each rank as fast as it can: no round reads another's."""
    size = 4
    found: list[list[list[int]]] = [[] for _ in range(size)]
    boxes = mailboxes(size, IdExchange.room_bytes(9))

    def run(rank: int) -> None:
        layout = Layout(rank, size, attn_dp_size, 1)
        exchange = IdExchange(boxes[rank], layout, 9)
        for turn in range(50):
            counts = [(turn + dp) % 10 for dp in range(attn_dp_size)]
            mine = torch.arange(counts[layout.attn_dp_rank]) + 1000 * turn + 100 * layout.attn_dp_rank
            shared = exchange.share_ids(mine if layout.owns_rows else mine[:0], counts)
            found[rank].append(shared.tolist())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [
        [1000 * turn + 100 * dp + i for dp in range(attn_dp_size) for i in range((turn + dp) % 10)]
        for turn in range(50)
    ]
    assert found == [expected] * size


def fill(runner: TorchRunner) -> None:
    """Each page of each layer says whose and which it is."""
    for layer, pages in enumerate(runner.cache.pages):
        numbers = torch.arange(len(pages)) + 10 * runner.layout.attn_dp_rank + layer
        pages.copy_((numbers % 251).to(torch.uint8)[:, None].expand_as(pages))


def copy(runner: TorchRunner, copies: list[np.ndarray]) -> None:
    runner.peer_pages.copy(*copies)


def numbers(runner: TorchRunner) -> list[list[int]]:
    """[layer][page]; every byte of a page says the same."""
    assert all((pages == pages[:, :1]).all() for pages in runner.cache.pages)
    return [pages[:, 0].tolist() for pages in runner.cache.pages]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_pages_go_from_pool_to_pool_whole_and_the_others_stay(ranks, tmp_path, kv_dtype):
    """Both ways at once, every layer, latents and index keys; a group's ranks each get their own copy."""
    make_checkpoint(tmp_path, 1)
    for attn_dp_size in (2, ranks.size):
        ranks.load(config_of(tmp_path, ranks.size, attn_dp_size, 1, kv_dtype), 6, 50)
        ranks.call(fill)
        before = ranks.call(numbers)
        source_dp, source = np.array([0, 0, 1]), np.array([3, 9, 4])
        target_dp, target = np.array([1, 1, 0]), np.array([60, 5, 63])
        ranks.call(copy, [source_dp, source, target_dp, target])
        after = ranks.call(numbers)
        group = ranks.size // attn_dp_size
        expected = [[list(layer) for layer in pools] for pools in before]
        for from_dp, page, to_dp, to in zip(source_dp, source, target_dp, target, strict=True):
            for place in range(group):
                for layer in range(len(before[0])):
                    theirs = before[from_dp * group + place][layer][page]
                    expected[to_dp * group + place][layer][to] = theirs
        assert after == expected
