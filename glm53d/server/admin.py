"""Admin: what the server says about itself, and /abort_request. None of it waits for a rank but /health_generate."""

import time
from typing import Any

import msgspec
from aiohttp import web

from glm53d.errors import InvalidRequest
from glm53d.obs import metrics
from glm53d.server import body
from glm53d.server.exchange import SERVICE


class AbortBody(msgspec.Struct):
    """Which requests to end."""

    rid: str | None = None
    abort_all: bool | None = None


_ABORT = msgspec.json.Decoder(AbortBody)
_STARTED = int(time.time())


async def root(request: web.Request) -> web.Response:
    """Handle HEAD /: some clients look for a server before their first request. (F-J2)"""
    return web.Response()


async def models(request: web.Request) -> web.Response:
    """Handle GET /v1/models."""
    service = request.app[SERVICE]
    engine = service.engine
    card: dict[str, Any] = {
        "object": "model",
        "created": _STARTED,
        "owned_by": "glm53d",
        "root": engine.models[0],
        "max_model_len": engine.limits.max_context_len or None,  # null until the ranks have said what fits [R3]
    }
    if service.config.engine.kind == "sim":
        card["description"] = "simulated: no model is asked, answers are scripted"
    elif service.config.model.path == "nano":
        card["description"] = "untrained: the nano model's weights are random, its answers mean nothing"
    return _json({"object": "list", "data": [{"id": name, **card} for name in engine.models]})


async def health(request: web.Request) -> web.Response:
    """Handle GET /health: whether the ranks live and step. [R4]"""
    good, state = request.app[SERVICE].engine.health()
    return _json(state, 200 if good else 503)


async def health_generate(request: web.Request) -> web.Response:
    """Handle GET /health_generate: one token through everything. [R4]"""
    await request.app[SERVICE].engine.health_generate()
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Handle GET /ready: whether work is accepted; with phase and percent while loading. [R4]"""
    good, state = request.app[SERVICE].engine.ready()
    return _json(state, 200 if good else 503)


async def live(request: web.Request) -> web.Response:
    """Handle GET /live: the loop turns. [R4]"""
    return _json({"status": "ok"})


async def server_info(request: web.Request) -> web.Response:
    """Handle GET /server_info."""
    return _json(request.app[SERVICE].engine.server_info())


async def get_loads(request: web.Request) -> web.Response:
    """Handle GET /get_loads: a row per attention-DP rank. [R8]"""
    return _json(request.app[SERVICE].engine.loads())


async def abort_request(request: web.Request) -> web.Response:
    """Handle POST /abort_request {"rid": ...} or {"abort_all": true}; answers how many were ended. [R12]"""
    service = request.app[SERVICE]
    raw, _ = await body.read(request, service.config.server.body_timeout_s)
    req = body.decode(_ABORT, raw)
    if not req.rid and not req.abort_all:
        raise InvalidRequest("Either `rid` or `abort_all` is required.", "rid")
    return _json({"aborted": service.engine.abort_rid(None if req.abort_all else req.rid)})


async def prometheus(request: web.Request) -> web.Response:
    """Handle GET /metrics."""
    text = request.app[SERVICE].metrics.render()
    return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})


def _json(value: Any, status: int = 200) -> web.Response:
    return body.json_response(body.encode(value), status)
