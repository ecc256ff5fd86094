"""Shapes: in which dialect's words a path answers with an error, also where no handler of ours has run. [R14]"""

from aiohttp import web

from glm53d.errors import RequestError
from glm53d.server import body
from glm53d.server.anthropic import MessagesError
from glm53d.server.body import ErrorBody, ErrorShape


def shape_of(path: str) -> type[ErrorShape]:
    """The shape of errors at a path, served or not."""
    return MessagesError if path == "/v1/messages" or path.startswith("/v1/messages/") else ErrorBody


def refusal(path: str, exc: web.HTTPException) -> web.Response:
    """What the library itself refuses, with its headers: no such route, a wrong method, an unknown Expect."""
    error = RequestError("There is no such route." if exc.status == 404 else f"{exc.reason}.")
    error.status, error.code = exc.status, (exc.reason or "error").lower().replace(" ", "_")
    response = body.error_response(error, shape_of(path))
    if "Allow" in exc.headers:
        response.headers["Allow"] = exc.headers["Allow"]
    return response
