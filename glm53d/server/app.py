"""App: the routes, what happens to every error, start and stop of the HTTP side. [R14] [R15]"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from glm53d.config import Config
from glm53d.errors import ConfigError
from glm53d.front.engine import Engine
from glm53d.obs.metrics import Metrics
from glm53d.server import admin, body, exchange, native_api, openai_chat, openai_completions

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Longer than common proxies keep an idle connection: they close first and lose no request to a race.
_KEEPALIVE_TIMEOUT_S = 75.0
# Time that handlers have to write their last event once stop() is called.
_LAST_WORDS_S = 0.5


def make_app(engine: Engine, config: Config) -> web.Application:
    """The application: every route, bound to one engine. Serve it with serve()."""
    app = web.Application(client_max_size=config.server.max_body_bytes, middlewares=[_edge])
    app[exchange.SERVICE] = exchange.Service(engine, config, Metrics(engine.loads))
    app.add_routes(
        [
            web.post("/v1/chat/completions", openai_chat.chat_completions),
            web.post("/v1/completions", openai_completions.completions),
            web.post("/generate", native_api.generate),
            web.get("/v1/models", admin.models),
            web.get("/health", admin.health),
            web.get("/health_generate", admin.health_generate),
            web.get("/ready", admin.ready),
            web.get("/live", admin.live),
            web.get("/server_info", admin.server_info),
            web.get("/get_loads", admin.get_loads),
            web.get("/metrics", admin.prometheus),
            web.post("/abort_request", admin.abort_request),
            web.head("/", admin.root),
        ]
    )
    return app


class HttpServer:
    """The listening side of one application. Made by serve()."""

    def __init__(self, runner: web.AppRunner, port: int):
        self._runner = runner
        self.port = port

    async def stop(self) -> None:
        """Close the port, then the connections. Whoever drains does so before: what still runs soon is cancelled."""
        await self._runner.cleanup()


async def serve(engine: Engine, config: Config) -> HttpServer:
    """Listen at server.host and server.port. Raises ConfigError when that cannot be had.

    A client that leaves cancels its handler, whatever that waits for; exchange.py aborts in `finally`. [R22]
    """
    runner = web.AppRunner(
        make_app(engine, config),
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # a small body that grows without bound is an attack that nobody needs
        keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=_LAST_WORDS_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.server.host, config.server.port, backlog=1024).start()
    except OSError as exc:
        await runner.cleanup()
        where = f"{config.server.host}:{config.server.port}"
        raise ConfigError(f"Cannot listen on server.host and server.port ({where}): {exc.strerror or exc}.") from None
    return HttpServer(runner, runner.addresses[0][1])


@web.middleware
async def _edge(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn any error into a body, count the request, name its rid."""
    metrics, endpoint = request.app[exchange.SERVICE].metrics, exchange.endpoint(request)
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        metrics.request(endpoint, 499)  # the client has left: nobody is there to be answered
        raise
    except web.HTTPException as exc:
        response = body.http_error_response(exc)
    except Exception as exc:
        response = body.error_response(exchange.visible(exc, request.get(exchange.RID)))
    metrics.request(endpoint, response.status)
    if not response.prepared and (rid := request.get(exchange.RID)) is not None:
        response.headers["X-Request-Id"] = rid
    return response
