"""CORS: which web pages of other origins may call us from a browser. Off unless server.cors_origins names some."""

from aiohttp import hdrs, web

_MAX_AGE_S = 600


def preflight(request: web.Request, origins: tuple[str, ...]) -> web.Response | None:
    """The answer to a browser's question what it may send; None when it is no such question."""
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    if request.method != hdrs.METH_OPTIONS or wanted is None or _allowed(request, origins) is None:
        return None
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST",
        hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
    }
    # SDKs send headers of their own, and "*" does not cover Authorization: what is asked for is allowed.
    if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
    return web.Response(status=204, headers=headers)


def add_headers(request: web.BaseRequest, response: web.StreamResponse, origins: tuple[str, ...]) -> None:
    """Let the page that sent the request read the response."""
    if (origin := _allowed(request, origins)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "X-Request-Id, Retry-After"
        if origin != "*":
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)


def _allowed(request: web.BaseRequest, origins: tuple[str, ...]) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
