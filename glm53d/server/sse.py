"""SSE: one response of server-sent events, from its headers to its last chunk. [R41] [R47]

Frames are whole events already, built where no Python runs per token; here they go to the transport with a chunk
header, one write per wake. Not through aiohttp's write(): that is a coroutine, and the pump's callback cannot await.
"""

import asyncio
from collections.abc import Sequence

from aiohttp import HttpVersion11, web

from glm53d.front.engine import Stream

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would gather frames
}


class EventStream:
    """The writing side of one stream. Owned by its handler, used on the loop's thread alone.

    A slow client: when the transport holds more than its high-water mark (64 KiB), the engine is told and merges the
    frames of its streams until the transport has drained. What is buffered is thus bounded by the mark and one frame.
    """

    def __init__(self, request: web.Request, streams: Sequence[Stream], keepalive_s: float, keep_alive: bytes):
        self._request = request
        self._streams = streams
        self._keepalive_s = keepalive_s  # silence after which keep_alive is sent, an event or a comment
        self._keep_alive_event = keep_alive
        self._loop = asyncio.get_running_loop()
        self._response = web.StreamResponse(headers=_HEADERS)
        self._chunked = request.version >= HttpVersion11
        self._draining: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self, first: bytes) -> None:
        """Send the headers and, behind them, the first events. Raises ConnectionError when the client has left."""
        if self._chunked:
            self._response.enable_chunked_encoding()
        else:
            self._response.force_close()  # HTTP/1.0: the end of the connection is the end of the body
        writer = await self._response.prepare(self._request)  # the headers leave here, not with the first write
        transport = self._request.transport
        if writer is None or transport is None:
            raise ConnectionResetError("The client has left.")
        self._writer = writer
        self._transport = transport
        self._protocol = self._request.protocol
        self._last_write = self._loop.time()
        self._timer = self._loop.call_later(self._keepalive_s, self._keep_alive)
        if first:
            self.write(first)

    def write(self, events: bytes) -> None:
        """Send whole events. Returns at once; after the client has left it does nothing."""
        transport = self._transport
        if self._closed or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._last_write = self._loop.time()
        if self._draining is None and self._protocol.writing_paused:
            self._set_slow(True)
            self._draining = self._loop.create_task(self._until_drained())

    async def close(self, last: bytes) -> web.StreamResponse:
        """Send the last events and the end of the body in one write; waits for a slow client to take them."""
        self.cut()
        await self._response.write_eof(last)
        return self._response

    def cut(self) -> None:
        """Write nothing more, whatever still comes: the handler ends. Does nothing the second time."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def _until_drained(self) -> None:
        # Never cancelled: the future it waits for belongs to the connection, and close() may wait for it too. It ends
        # when the transport has drained or the connection is lost.
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # the handler is being cancelled and aborts the stream
        self._draining = None
        if not self._closed:
            self._set_slow(False)

    def _set_slow(self, slow: bool) -> None:
        for stream in self._streams:
            stream.set_slow(slow)

    def _keep_alive(self) -> None:
        silent = self._loop.time() - self._last_write
        if silent >= self._keepalive_s and not self._protocol.writing_paused:
            self.write(self._keep_alive_event)
            silent = 0.0
        wait = self._keepalive_s - silent
        self._timer = self._loop.call_later(wait if wait > 0 else self._keepalive_s, self._keep_alive)
