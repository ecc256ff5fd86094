"""KV events on the wire: numbered batches in msgpack, one socket per attention-DP rank, missed ones on request."""

import msgspec
import numpy as np
import pytest
import zmq

from glm53d.config import KvEvents as KvEventsConfig
from glm53d.errors import StartError
from glm53d.kv.events import KvEvents
from glm53d.worker.kv_events import KvPublisher
from tests.helpers.daemon import free_port

HASHES = np.array([[2**63 + 5, 1], [6, 2], [7, 3]], np.uint64)
TOKENS = np.arange(6, dtype=np.int32)
TIMEOUT_MS = 20_000


def events_of(*steps) -> KvEvents:
    events = KvEvents(2, 2)
    events.take()  # that nothing is cached
    for name, *args in steps:
        getattr(events, name)(*args)
    return events


@pytest.fixture
def wire():
    """A publisher, and one who has subscribed to rank 1."""
    first_port, replay = free_port(2), free_port(2)
    first, again = f"tcp://127.0.0.1:{first_port}", f"tcp://127.0.0.1:{replay}"
    config = KvEventsConfig(endpoint=first, replay_endpoint=again, topic="kv", buffer_batches=3)
    publisher, context = KvPublisher(config, 2), zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (subscriber, asker):
        socket.rcvtimeo = TIMEOUT_MS
    subscriber.connect(f"tcp://127.0.0.1:{first_port + 1}")
    subscriber.subscribe("kv")
    asker.connect(f"tcp://127.0.0.1:{replay + 1}")
    yield publisher, subscriber, asker
    publisher.close()
    context.destroy(linger=0)


def test_what_is_said_first_is_that_nothing_is_cached():
    assert [(rank, msgspec.to_builtins(events)) for rank, events in KvEvents(2, 4).take()] == [
        (0, [{"type": "AllBlocksCleared"}]),
        (1, [{"type": "AllBlocksCleared"}]),
    ]


def test_events_have_every_key_in_the_order_that_consumers_know():
    """63 bits for a hash; what is there already, in front, is named as the parent only."""
    events = events_of(("stored", 0, HASHES, 1, TOKENS), ("removed", 0, HASHES[:1]), ("removed", 0, HASHES[:0]))
    ((rank, found),) = events.take()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert rank == 0 and decoded == [
        {
            "type": "BlockStored", "block_hashes": [6, 7], "parent_block_hash": 5, "token_ids": [2, 3, 4, 5],
            "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
    ]  # fmt: skip
    assert list(decoded[0]) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ]  # fmt: skip
    assert events.take() == []


def test_a_subscriber_gets_numbered_batches_and_asks_for_those_it_missed(wire):
    publisher, subscriber, asker = wire
    batch = events_of(("stored", 1, HASHES, 0, TOKENS)).take()
    numbers = []
    while not numbers:  # until the subscription has arrived there
        publisher.publish(batch)
        if subscriber.poll(20):
            topic, number, payload = subscriber.recv_multipart()
            numbers.append(int.from_bytes(number))
    time, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank, events[0]["type"]) == (b"kv", 1, "BlockStored") and time > 1.7e9
    publisher.publish(batch)
    while subscriber.poll(200):
        numbers.append(int.from_bytes(subscriber.recv_multipart()[1]))
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1

    asker.send_multipart([b"", (0).to_bytes(8)])
    answers = [asker.recv_multipart() for _ in range(min(3, numbers[-1] + 1) + 1)]
    last = [int.from_bytes(answer[2]) for answer in answers[:-1]]
    assert last == list(range(numbers[-1] + 1))[-3:], "those that are kept"
    assert answers[0][:2] == [b"", b"kv"] and msgspec.msgpack.decode(answers[0][3])[1:] == [events, 1]
    assert answers[-1] == [b"", b"", b"\xff" * 8, b""]


def test_a_question_that_is_none_is_not_answered_and_harms_nobody(wire):
    publisher, _, asker = wire
    publisher.publish(events_of(("stored", 1, HASHES, 0, TOKENS)).take())
    asker.send_multipart([b"", b"what?"])
    asker.send(b"")
    asker.send_multipart([b"", (9).to_bytes(8)])
    assert asker.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


def test_a_port_that_is_taken_is_a_reason_not_to_start():
    port = free_port()
    config = KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}")
    first = KvPublisher(config, 1)
    with pytest.raises(StartError, match=f"cannot bind tcp://127.0.0.1:{port}: Address already in use"):
        KvPublisher(config, 1)
    first.close()
    KvPublisher(config, 1).close()
