"""KvPublisher: KV events to whoever subscribes, by ZeroMQ. Off unless configured. [R31]

    PUB, a port per attention-DP rank       topic, number of the batch (8 bytes, big-endian), msgpack
    ROUTER, likewise, if a replay endpoint  "", first number wanted ─► each batch kept since, then the number -1
        is configured

A batch is [time, [event ...], attention-DP rank]. The leader's thread publishes; ZeroMQ's own thread sends, and drops
what a subscriber does not take. A subscriber sees by the numbers what it has missed, and asks for it. A thread of ours
answers such questions from the last batches.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from threading import Lock, Thread

import msgspec
import zmq

from glm53d.config import KvEvents as KvEventsConfig
from glm53d.config import split_endpoint
from glm53d.errors import StartError
from glm53d.kv.events import KvEvent

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 100_000  # batches that wait for a slow subscriber
END = b"\xff" * 8
POLL_MS = 100


@dataclass(slots=True, eq=False)
class _Feed:
    """Of one attention-DP rank."""

    publisher: zmq.Socket
    replay: zmq.Socket | None
    kept: deque[tuple[bytes, bytes]]  # (number, payload)
    number: int = 0
    lock: Lock = field(default_factory=Lock)  # guards kept


class KvPublisher:
    """Sockets of all attention-DP ranks, in rank 0."""

    def __init__(self, config: KvEventsConfig, attn_dp_size: int):
        """Binds. Raises StartError when an endpoint cannot be had."""
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._stopping = False
        self._feeds = [
            _Feed(
                self._bind(zmq.PUB, config.endpoint, rank),
                self._bind(zmq.ROUTER, config.replay_endpoint, rank) if config.replay_endpoint else None,
                deque(maxlen=config.buffer_batches),
            )
            for rank in range(attn_dp_size)
        ]
        self._thread = Thread(target=self._answer, name="kv-replay", daemon=True)
        self._thread.start()

    def publish(self, taken: list[tuple[int, list[KvEvent]]]) -> None:
        """Send what KvEvents.take() gave. Never waits."""
        for rank, events in taken:
            feed = self._feeds[rank]
            number, payload = feed.number.to_bytes(8), self._encode([time.time(), events, rank])
            feed.number += 1
            with feed.lock:
                feed.kept.append((number, payload))
            feed.publisher.send_multipart([self._topic, number, payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Give the ports back; what was not sent yet is dropped."""
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, endpoint: str, rank: int) -> zmq.Socket:
        endpoint = endpoint_of(endpoint, rank)
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER_MARK)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(f"kv_events: cannot bind {endpoint}: {error}") from None
        return socket

    def _answer(self) -> None:
        """The replay thread: questions as they come."""
        poller = zmq.Poller()
        feeds = {feed.replay: feed for feed in self._feeds if feed.replay is not None}
        for socket in feeds:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            for socket, _ in poller.poll(POLL_MS):
                self._replay(feeds[socket], socket)

    def _replay(self, feed: _Feed, socket: zmq.Socket) -> None:
        identity, *question = socket.recv_multipart()
        first = question[-1] if question else b""
        if len(first) != 8:
            log.warning("a question for KV events that is no number: %d parts", len(question))
            return
        with feed.lock:
            batches = [batch for batch in feed.kept if batch[0] >= first]
        for number, payload in batches:
            socket.send_multipart([identity, b"", self._topic, number, payload], zmq.NOBLOCK)
        socket.send_multipart([identity, b"", b"", END, b""], zmq.NOBLOCK)


def endpoint_of(endpoint: str, rank: int) -> str:
    """An attention-DP rank's endpoint: the port goes up with the rank."""
    host, port = split_endpoint(endpoint)
    return f"tcp://{host}:{port + rank}"
