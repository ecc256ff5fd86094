"""OpenAPI: every route and the schema of the body it takes, from the table that serves them. [R15]"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

import msgspec
from aiohttp import web

from glm53d.server.auth import Access
from glm53d.server.body import encode, json_response
from glm53d.server.shapes import shape_of
from glm53d.version import VERSION

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SCHEMAS = "#/components/schemas/{name}"
DOCUMENT = web.AppKey("openapi", bytes)


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. All routes of a path have the same access; every GET answers HEAD too."""

    method: str
    path: str
    handler: Handler
    access: Access = Access.USER
    body: type[msgspec.Struct] | None = None


async def openapi(request: web.Request) -> web.Response:
    """Handle GET /openapi.json."""
    return json_response(request.app[DOCUMENT])


def document(routes: Sequence[Route]) -> bytes:
    """The description of these routes, OpenAPI 3.1 in JSON."""
    bodies = [route.body for route in routes if route.body is not None]
    structs: list[type] = [*bodies, *dict.fromkeys(shape_of(route.path) for route in routes)]
    refs, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    ref_of: dict[type, Any] = dict(zip(structs, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, ref_of)
    return encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "glm53d", "version": VERSION},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: Route, ref_of: dict[type, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": _summary(route),
        "responses": {
            "200": {"description": "The answer; server-sent events where a stream was asked for."},
            "default": {
                "description": "What went wrong.",
                "content": {"application/json": {"schema": ref_of[shape_of(route.path)]}},
            },
        },
        "security": [] if route.access is Access.OPEN else [{"key": []}],
    }
    if names := [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref_of[route.body]}},
        }
    return operation


def _summary(route: Route) -> str:
    """The first line of the handler's docstring, without the words that only readers of the code need."""
    line = (getdoc(route.handler) or "").partition("\n")[0]
    what = re.sub(r"^Handle (GET |POST |HEAD )?\S+?[.:]? |\s*[\[(][RF]-?\w+[\])]", "", line + " ").strip()
    return what or f"{route.method} {route.path}"
