"""Connection: a client's connection, where what is not HTTP/1.1 at all is refused; and the listening socket. [R14]"""

import asyncio
import logging
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from glm53d.config import Server
from glm53d.errors import ConfigError, HeadersTooLarge, InvalidRequest, RequestError
from glm53d.server import body, shapes

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16384
"""Of the request line, and of each header. Agents send large ones, nobody sends such."""

# Longer than common proxies keep an idle connection: they close first and lose no request to a race. It is also how
# long a client may take to send its headers.
_KEEPALIVE_TIMEOUT_S = 75.0


class Connection(web.RequestHandler):
    """One connection. The library answers what it cannot parse in plain text, with a traceback in the log, and waits
    for ever for who does not read.
    """

    __slots__ = ("_send_timeout_s", "_send_timer")

    def __init__(self, manager: web.Server, *, send_timeout_s: float, **options: Any):
        super().__init__(manager, **options)
        self._send_timeout_s = send_timeout_s
        self._send_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client does not take what it is sent: its time begins."""
        super().pause_writing()
        self._send_timer = self._loop.call_later(self._send_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        self._end_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone, whatever the reason."""
        self._end_timer()
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _give_up(self) -> None:
        log.info("a client is cut off: it has taken nothing for %g s (server.send_timeout_s)", self._send_timeout_s)
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Tell a client in JSON that its bytes are no request; the connection is closed after it."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has left in the middle of a write: the library closes, and has nothing to log
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)  # a failure of ours
        error = _refusal(exc)
        log.debug("not a request, from %s: %s", request.remote, error.message)
        response = body.error_response(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. What the library refuses before any handler runs, an Expect, comes here in its own words."""
        if isinstance(resp, web.HTTPException):
            resp = shapes.refusal(request.path, resp)
        return await super().finish_response(request, resp, start_time)


async def listen(web_server: web.Server, server: Server, tls: ssl.SSLContext | None) -> asyncio.Server:
    """Accept connections at server.host and server.port. Raises ConfigError."""
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(
            web_server,
            loop=loop,
            access_log=None,  # the library's own way to say none
            auto_decompress=False,  # a small body that grows without bound is an attack that nobody needs
            keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
            send_timeout_s=server.send_timeout_s,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    try:
        return await loop.create_server(connection, server.host, server.port, ssl=tls, backlog=1024)
    except OSError as exc:
        where = f"{server.host}:{server.port}"
        raise ConfigError(f"Cannot listen on server.host and server.port ({where}): {exc.strerror or exc}.") from None


def tls_context(server: Server) -> ssl.SSLContext | None:
    """What makes TLS of connections, where it is configured. Raises ConfigError."""
    if not server.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, server)
    return context


def load_certificate(context: ssl.SSLContext, server: Server) -> None:
    """Read the certificate and its key; connections from now on have it. Raises ConfigError."""
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"server.tls_cert and server.tls_key cannot be used: {error}") from None


def _refusal(exc: HttpProcessingError) -> RequestError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge(f"The request line or a header is over the limit of {MAX_HEADER_BYTES} bytes.")
    if "Pause on PRI" in exc.message:
        return InvalidRequest("HTTP/2 is not spoken here; use HTTP/1.1.")
    # The rest of the parser's message is a picture of the bytes.
    return InvalidRequest(f"This is no HTTP/1.1 request: {exc.message.partition(chr(10))[0].rstrip(':')}.")
