"""App: the routes, who may call them, what happens to every error, start and stop of the HTTP side. [R14] [R15]"""

import asyncio
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from glm53d.config import Config, Server
from glm53d.errors import ConfigError
from glm53d.front.engine import Engine
from glm53d.obs.metrics import Metrics
from glm53d.server import (
    admin,
    anthropic,
    body,
    cors,
    exchange,
    info,
    native_api,
    openai_chat,
    openai_completions,
    openapi,
    responses,
    shapes,
    text_api,
)
from glm53d.server.auth import Access, Keys
from glm53d.server.connection import listen, load_certificate, tls_context
from glm53d.server.openapi import Handler, Route

# Time that handlers have to write their last event once stop() is called.
_LAST_WORDS_S = 0.5

ROUTES = (
    Route("POST", "/v1/chat/completions", openai_chat.chat_completions, body=openai_chat.ChatBody),
    Route("POST", "/v1/completions", openai_completions.completions, body=openai_completions.CompletionBody),
    Route("POST", "/v1/responses", responses.responses, body=responses.ResponsesBody),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel),
    Route("POST", "/v1/messages", anthropic.messages, body=anthropic.MessagesBody),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, body=anthropic.MessagesBody),
    Route("POST", "/generate", native_api.generate, body=native_api.GenerateBody),
    Route("POST", "/tokenize", text_api.tokenize, body=text_api.TokenizeBody),
    Route("POST", "/detokenize", text_api.detokenize, body=text_api.DetokenizeBody),
    Route("GET", "/v1/models", info.models),
    Route("GET", "/v1/models/{model}", info.model),
    Route("GET", "/server_info", info.server_info),
    Route("GET", "/get_server_info", info.server_info),
    Route("GET", "/model_info", info.model_info),
    Route("GET", "/get_model_info", info.model_info),
    Route("GET", "/version", info.version),
    Route("GET", "/openapi.json", openapi.openapi),
    Route("GET", "/get_loads", info.get_loads),
    Route("GET", "/v1/loads", info.v1_loads),
    Route("GET", "/get_load", info.get_load),
    Route("GET", "/metrics", info.prometheus),
    Route("GET", "/health", info.health, Access.OPEN),
    Route("GET", "/health_generate", info.health_generate, Access.OPEN),
    Route("GET", "/ready", info.ready, Access.OPEN),
    Route("GET", "/live", info.live, Access.OPEN),
    Route("HEAD", "/", info.root, Access.OPEN),
    Route("POST", "/v1/requests/{id}/cancel", admin.cancel),
    Route("POST", "/abort_request", admin.abort_request, Access.ADMIN, admin.AbortBody),
    Route("POST", "/flush_cache", admin.flush_cache, Access.ADMIN),
    Route("GET", "/flush_cache", admin.flush_cache, Access.ADMIN),
    Route("POST", "/pause_generation", admin.pause_generation, Access.ADMIN, admin.PauseBody),
    Route("POST", "/continue_generation", admin.continue_generation, Access.ADMIN),
    Route("POST", "/configure_logging", admin.configure_logging, Access.ADMIN, admin.LoggingBody),
)

_ACCESS = web.AppKey("access", dict[str, Access])  # by the route's pattern


def make_app(engine: Engine, config: Config) -> web.Application:
    """The application: every route, bound to one engine. Raises ConfigError for keys that cannot be had."""
    app = web.Application(client_max_size=config.server.max_body_bytes, middlewares=[_edge])
    metrics = Metrics(engine.models[0], config.kv.page_size, engine.loads, engine.text_stats)
    app[exchange.SERVICE] = exchange.Service(engine, config, metrics, Keys(config.server))
    app[openapi.DOCUMENT] = openapi.document(ROUTES)
    app[_ACCESS] = {route.path: route.access for route in ROUTES}
    if config.server.open_metrics:
        app[_ACCESS]["/metrics"] = Access.OPEN
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(_watched_loop)
    return app


class HttpServer:
    """The listening side of one application. Made by serve()."""

    def __init__(self, runner: web.AppRunner, sockets: asyncio.Server, tls: ssl.SSLContext | None, server: Server):
        self._runner = runner
        self._sockets = sockets
        self._tls = tls
        self.port: int = sockets.sockets[0].getsockname()[1]
        host = f"[{server.host}]" if ":" in server.host else server.host
        self.url = f"{'https' if server.tls_cert else 'http'}://{host}:{self.port}"

    def reload(self, server: Server) -> None:
        """Take these keys and this certificate from now on. Raises ConfigError, with nothing changed."""
        keys = Keys(server)
        if (self._tls is None) != (not server.tls_cert):
            raise ConfigError("a port begins to speak TLS, or no longer does (server.tls_cert), by a restart alone")
        if self._tls is not None:
            tls_context(server)  # in one of its own first: half of a bad pair would stay in the one that serves
            load_certificate(self._tls, server)
        self._runner.app[exchange.SERVICE].keys = keys

    @property
    def num_open(self) -> int:
        """Requests that are being read, worked on or answered."""
        return self._runner.app[exchange.SERVICE].num_open

    async def stop(self) -> None:
        """Close the port, then the connections. Whoever drains does so before: what still runs soon is cancelled."""
        self._sockets.close()
        await self._runner.cleanup()


async def serve(engine: Engine, config: Config) -> HttpServer:
    """Listen at server.host and server.port. Raises ConfigError when that cannot be had.

    A client that leaves cancels its handler, whatever that waits for; exchange.py aborts in `finally`. [R22]
    """
    tls = tls_context(config.server)
    runner = web.AppRunner(make_app(engine, config), handler_cancellation=True, shutdown_timeout=_LAST_WORDS_S)
    await runner.setup()
    assert runner.server is not None  # from setup() on
    try:
        return HttpServer(runner, await listen(runner.server, config.server, tls), tls, config.server)
    except ConfigError:
        await runner.cleanup()
        raise


@web.middleware
async def _edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """From the head to the last byte of the answer a request is open: a drain waits for it."""
    service = request.app[exchange.SERVICE]
    service.num_open += 1
    try:
        response = await _answer(request, handler)
        if not response.prepared:  # a plain one, which aiohttp would write behind all middlewares
            await response.prepare(request)
            await response.write_eof()
        return response
    finally:
        service.num_open -= 1


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the key, turn any error into a body, count the request."""
    service, endpoint = request.app[exchange.SERVICE], exchange.endpoint(request)
    if (answer := cors.preflight(request, service.config.server.cors_origins)) is not None:
        return answer
    exchange.begin_rid(request)
    try:
        service.keys.check(request, request.app[_ACCESS].get(endpoint, Access.USER))
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        service.metrics.request(endpoint, 499)  # the client has left: nobody is there to be answered
        raise
    except web.HTTPException as exc:
        response = shapes.refusal(request.path, exc)
    except Exception as exc:
        error = exchange.visible(exc, request[exchange.RID])
        response = body.error_response(error, shapes.shape_of(request.path))
    service.metrics.request(endpoint, response.status)
    return response


async def _watched_loop(app: web.Application) -> AsyncIterator[None]:
    """While the application lives, its loop's lag is measured. [F-I6]"""
    watching = asyncio.create_task(app[exchange.SERVICE].metrics.watch_loop())
    yield
    watching.cancel()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every response carries, streams too: it is called before their first byte."""
    if (rid := request.get(exchange.RID)) is not None:  # a preflight has none
        response.headers["X-Request-Id"] = rid
    if num_cut := request.get(exchange.NUM_CUT, 0):
        response.headers["X-Prompt-Truncated"] = f"start; tokens={num_cut}"
    cors.add_headers(request, response, request.app[exchange.SERVICE].config.server.cors_origins)
