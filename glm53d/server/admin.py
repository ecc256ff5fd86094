"""Admin: calls that change the server's course: cancel, abort, flush, pause, continue, log level. [R15] [R48]

All but cancel and abort go to the ranks and answer when these have done it, or fail with 503 at a deadline.
"""

import logging
from typing import Literal

import msgspec
from aiohttp import web

from glm53d.errors import InvalidRequest
from glm53d.obs import log as logs
from glm53d.server import body, exchange
from glm53d.server.exchange import SERVICE

log = logging.getLogger(__name__)


class AbortBody(msgspec.Struct):
    """Which requests to end."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(msgspec.Struct):
    """What becomes of the running requests: they keep their pages, give them back and wait, or end."""

    mode: Literal["in_place", "retract", "abort"] | None = None


class LoggingBody(msgspec.Struct):
    """The least severe line that is written from now on, by every process."""

    log_level: logs.Level


_ABORT = msgspec.json.Decoder(AbortBody)
_PAUSE = msgspec.json.Decoder(PauseBody)
_LOGGING = msgspec.json.Decoder(LoggingBody)


async def cancel(request: web.Request) -> web.Response:
    """Handle POST /v1/requests/{id}/cancel: end a request by its rid, or by the id of its answer. [R48]"""
    id = request.match_info["id"]
    cancelled = exchange.abort_by_id(request.app[SERVICE].engine, id)
    return body.json_response(body.encode({"id": id, "cancelled": cancelled}))


async def abort_request(request: web.Request) -> web.Response:
    """Handle POST /abort_request {"rid": ...} or {"abort_all": true}; answers how many were ended. [R12]"""
    req = await _read(request, _ABORT)
    if not req.rid and not req.abort_all:
        raise InvalidRequest("Either `rid` or `abort_all` is required.", "rid")
    aborted = request.app[SERVICE].engine.abort_rid(None if req.abort_all else req.rid)
    return body.json_response(body.encode({"aborted": aborted}))


async def flush_cache(request: web.Request) -> web.Response:
    """Handle /flush_cache: cached pages that no request uses are dropped; answers how many."""
    pages = await request.app[SERVICE].engine.control.flush_cache()
    log.info("cache flushed: %d pages dropped", pages)
    return body.json_response(body.encode({"success": True, "pages": pages}))


async def pause_generation(request: web.Request) -> web.Response:
    """Handle POST /pause_generation {"mode": ...}: no step is begun; answers how many requests wait for it.

    What comes meanwhile is queued. Streams stay open, with their keep-alives.
    """
    engine, req = request.app[SERVICE].engine, await _read(request, _PAUSE)
    if req.mode == "abort":
        engine.abort_rid(None)
    requests = await engine.control.pause(retract=req.mode == "retract")
    log.info("generation paused: %d requests wait", requests)
    return body.json_response(body.encode({"status": "paused", "requests": requests}))


async def continue_generation(request: web.Request) -> web.Response:
    """Handle POST /continue_generation: steps go on; does nothing when they do."""
    requests = await request.app[SERVICE].engine.control.resume()
    log.info("generation continues: %d requests", requests)
    return body.json_response(body.encode({"status": "running", "requests": requests}))


async def configure_logging(request: web.Request) -> web.Response:
    """Handle POST /configure_logging {"log_level": ...}, for main and every rank."""
    req = await _read(request, _LOGGING)
    number = logs.number_of(req.log_level)
    await request.app[SERVICE].engine.control.set_log_level(number)
    logs.set_level(number)
    log.info("log level: %s", req.log_level)
    return body.json_response(body.encode({"log_level": req.log_level}))


async def _read(request: web.Request, decoder: msgspec.json.Decoder[body.T]) -> body.T:
    """The body; none at all is an empty object."""
    raw, _ = await body.read(request, request.app[SERVICE].config.server.body_timeout_s)
    return body.decode(decoder, raw or b"{}")
