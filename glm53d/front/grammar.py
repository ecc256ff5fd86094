"""GrammarCheck: whether a request's grammar can be used, known before its answer begins. [R35]

Verdicts are kept, good ones and bad ones, by what the text is: so only a text that nobody has sent costs anything, and
who sends a bad one again learns at once. The trying is done by front/checker.py, in a process of its own.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from glm53d.chat.constraint import Grammar
from glm53d.config import Grammar as GrammarConfig
from glm53d.errors import EngineError, InvalidRequest
from glm53d.front.checker import FRAME

_MAX_VERDICTS = 4096
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    "OPENBLAS_NUM_THREADS": "1",  # it forks, and so must have one thread
}
_WAIT_S = 60.0  # for a verdict, beside the CPU time it may take: the machine may be busy with something else


@dataclass(slots=True, eq=False)
class _Trial:
    """A text whose verdict is to come."""

    task: asyncio.Task[str]
    num_waiting: int = 0
    has_turn: bool = False  # the checker has it, or soon will


class GrammarCheck:
    """Used from one event loop."""

    def __init__(self, tokenizer: Path, eos_ids: Sequence[int], config: GrammarConfig):
        self._tokenizer, self._eos_ids, self._config = tokenizer, eos_ids, config
        self._verdicts: dict[bytes, str] = {}  # by the text's hash, least recently used first; "": it is good
        self._trials: dict[bytes, _Trial] = {}
        self._turns = asyncio.Semaphore(config.processes)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[str]] = {}  # by number of the text
        self._num_asked = 0
        self._sending = asyncio.Lock()  # one text goes whole before the next

    def start(self) -> None:
        """Start the checker, which takes a second for a large vocabulary. Needs a running loop."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = [os.getpid(), theirs.fileno(), self._tokenizer, ",".join(map(str, self._eos_ids))]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "glm53d.front.checker", *map(str, arguments), f"{self._config.compile_s}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        self._socket = ours
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def close(self) -> None:
        """End the checker, and whoever waits for it."""
        if self._reader is not None:
            self._reader.cancel()
        for trial in self._trials.values():
            trial.task.cancel()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._process = None

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest, naming the field that asks for it, when a grammar cannot be compiled as it should."""
        text = grammar.text.encode()
        key = blake2b(text, digest_size=16).digest()
        if (verdict := self._verdicts.pop(key, None)) is None:
            verdict = await self._verdict(key, text)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.pop(next(iter(self._verdicts)))
        if verdict:
            raise InvalidRequest(verdict, grammar.param or None)

    async def _verdict(self, key: bytes, text: bytes) -> str:
        """Of a text that has none. Others may wait for it too: whoever is cancelled leaves alone.

        Whoever is the last takes along a text that has not had its turn: those who leave must cost nobody time.
        """
        if (trial := self._trials.get(key)) is None:
            task = asyncio.get_running_loop().create_task(self._try(key, text))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
            trial = self._trials[key] = _Trial(task)
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and not trial.has_turn:
                del self._trials[key]
                trial.task.cancel()

    async def _try(self, key: bytes, text: bytes) -> str:
        async with self._turns:
            self._trials[key].has_turn = True
            try:
                return await self._ask(text)
            finally:
                del self._trials[key]

    async def _ask(self, text: bytes) -> str:
        loop = asyncio.get_running_loop()
        if self._process is None:
            self.start()
        self._num_asked += 1
        number = self._num_asked % (1 << 32)
        answer = self._answers[number] = loop.create_future()
        try:
            async with self._sending:
                await loop.sock_sendall(self._socket, FRAME.pack(number, len(text)) + text)
            return await asyncio.wait_for(answer, self._config.compile_s + _WAIT_S)
        except (TimeoutError, OSError):
            raise EngineError("The grammar could not be compiled: the process that does it gives no answer.") from None
        finally:
            del self._answers[number]

    async def _receive(self) -> bytes:
        """What comes next; nothing any more when the checker is gone."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
        except ConnectionError:
            return b""

    async def _read(self) -> None:
        """Hand out verdicts as they come. When the checker has ended, the next text starts another."""
        data = b""
        while more := await self._receive():
            data += more
            while len(data) >= FRAME.size:
                number, size = FRAME.unpack_from(data)
                if len(data) < FRAME.size + size:
                    break
                said, data = data[FRAME.size : FRAME.size + size], data[FRAME.size + size :]
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result(said.decode())
        assert self._process is not None
        self._process.wait()
        self._process = None
        self._socket.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineError("The grammar could not be compiled: the process that does it ended."))
