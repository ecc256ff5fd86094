"""Control: calls that change the ranks' course. A record goes down the request ring, a result with its id comes up.

flush_cache() ─► begin ─► send ═══ request ring ═══▶ leader, between two steps
      ◀──── future ◀── answered() ◀═══ output ring ═══
"""

import asyncio
from collections.abc import Callable

import numpy as np

from glm53d.errors import EngineError, NotReady
from glm53d.ipc.records import CONTROL, CONTROL_RESULT, ControlOp


class Control:
    """The calls in flight of one world. Used on the loop's thread alone.

    Every call raises NotReady when the ranks do not answer in time or are gone, EngineError when they could not do it.
    """

    def __init__(self, send: Callable[[bytes], None], timeout_s: float):
        """`send` puts a record into the request ring, now or as soon as there is room."""
        self._send = send
        self._timeout_s = timeout_s
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self.is_paused = False

    async def flush_cache(self) -> int:
        """Drop all cached pages that no running request uses; how many there were."""
        return await self._call(ControlOp.FLUSH_CACHE)

    async def pause(self, *, retract: bool) -> int:
        """Begin no further step, until resume(); how many requests then wait or stand still.

        retract: running requests give back their pages, which stay cached until others need them.
        """
        return await self._call(ControlOp.PAUSE, int(retract))

    async def resume(self) -> int:
        """Take up the steps again; how many requests go on."""
        return await self._call(ControlOp.CONTINUE)

    async def set_log_level(self, number: int) -> None:
        """The least severe line that ranks write, as a number of the logging module."""
        await self._call(ControlOp.LOG_LEVEL, number)

    def shut_down(self) -> None:
        """Ask the leader to end the world. Nobody waits for the answer: the end is seen by the supervisor."""
        self._send(self._record(ControlOp.SHUTDOWN, 0))

    def answered(self, payload: bytes) -> None:
        """A result record has come. One behind its caller's deadline tells of a change as well."""
        result = np.frombuffer(payload, CONTROL_RESULT, 1)[0]
        if result["op"] in (ControlOp.PAUSE, ControlOp.CONTINUE):
            self.is_paused = bool(result["op"] == ControlOp.PAUSE)
        future = self._waiting.pop(int(result["call_id"]), None)
        if future is not None and not future.done():
            future.set_result(int(result["value"]))

    def fail_all(self, error: EngineError) -> None:
        """The ranks are gone: no answer will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    async def _call(self, op: ControlOp, arg: int = 0) -> int:
        record = self._record(op, arg)
        call_id = self._last_id
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(record)
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            raise NotReady(f"The ranks have not answered {op.name} within {self._timeout_s:g} s.") from None
        finally:
            self._waiting.pop(call_id, None)

    def _record(self, op: ControlOp, arg: int) -> bytes:
        self._last_id += 1
        record = np.zeros(1, CONTROL)
        record["call_id"], record["op"], record["arg"] = self._last_id, op, arg
        return record.tobytes()
