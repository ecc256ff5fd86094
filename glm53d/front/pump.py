"""The native output pump, on main's event loop: its wake is a file descriptor that the loop watches. [R41]"""

import asyncio
from collections.abc import Callable

from glm53d._native import ByteVocab, Pump
from glm53d.ipc.segment import Segment
from glm53d.text.vocab import Vocab


class OutputPump:
    """Turns the output ring into events, in a native thread. Used on the loop's thread.

    open, close, set_slow, take and stats are the native pump's own, called once per request, wake or scrape.
    """

    def __init__(self, outputs: Segment, world_id: int, vocab: Vocab, max_slots: int):
        """Take the ring's reading end. Raises IpcError when it is taken, AbiMismatch for another world's segment, and
        CheckpointError when the tokenizer lacks a token that output is known by.
        """
        tokens = ByteVocab(vocab.token_bytes, vocab.special)
        begin, end = vocab.control_id("<think>"), vocab.think_end
        pieces = [id_ for id_ in vocab.added.values() if not vocab.special[id_]]
        self._pump = Pump(outputs, world_id, tokens, max_slots, begin, end, pieces)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.open = self._pump.open
        self.close = self._pump.close
        self.set_slow = self._pump.set_slow
        self.take = self._pump.take
        self.stats = self._pump.stats

    def start(self, on_wake: Callable[[], None]) -> None:
        """Begin, once. The running loop calls on_wake whenever take() has something, and when no more will come."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pump.fileno(), on_wake)
        self._pump.start()

    def stop(self) -> None:
        """End the thread; no wake comes after. Does nothing the second time."""
        if self._loop is not None:
            self._loop.remove_reader(self._pump.fileno())
            self._loop = None
        self._pump.stop()

    @property
    def corrupt(self) -> bool:
        """No more output will come, because what lies in the ring cannot be read."""
        return self._pump.corrupt
