"""Bodies: the bytes of a request to a typed struct, an error to bytes, in OpenAI's shape or another dialect's. [R14]"""

import asyncio
import re
import time
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from glm53d.chat.conversation import Json
from glm53d.errors import (
    EngineError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    Unauthorized,
)

T = TypeVar("T")

MAX_DEPTH = 64
"""Levels of a client's free-form JSON. What renders it may recurse: the bound lies far below the interpreter's."""

MAX_VALUES = 100_000
"""Values of one piece of free-form JSON. What renders it holds the interpreter for as long as it takes."""

LARGE = 1 << 20  # bytes: what a smaller body can be made of keeps nobody waiting for long
MAX_PARTS = {b'"': 1 << 19, b"{": 1 << 19, b"[": 1 << 19, b",": 1 << 22}
"""How many of these a large body may have: text has them seldom, and lists of ids nothing but the last. A body of small
values alone takes two hundred times as long to read as one of text, and as much memory."""

# "Expected `str`, got `int` - at `$.messages[0].role`": how msgspec says what is wrong and where.
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>.+)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


async def read(request: web.Request, timeout_s: float) -> tuple[bytes, int]:
    """The whole body, and the time its last byte was read (CLOCK_MONOTONIC, ns).

    Raises PayloadTooLarge, before reading where Content-Length tells, RequestTimeout, and InvalidRequest for a
    compressed body or one of too many parts. What breaks off in a bad chunk ends as RequestTimeout: the HTTP parser
    does not tell the reader.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidRequest("Content-Encoding is not supported; send the body as it is.")
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(f"The body has {request.content_length} bytes, the limit is {limit}.")
    try:
        async with asyncio.timeout(None if request.content.is_eof() else timeout_s):  # a timer only for what lacks
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise PayloadTooLarge(f"The body is over the limit of {limit} bytes.") from None
    except TimeoutError:
        raise RequestTimeout(f"The body was not complete within {timeout_s:g} s.") from None
    received_ns = time.monotonic_ns()
    if len(body) > LARGE:
        await asyncio.to_thread(_check_parts, body)  # it lets go of the GIL
    return body, received_ns


def _check_parts(body: bytes) -> None:
    """Raise InvalidRequest for a body that is made of too many values, before any of them is. [F-G4]"""
    data = np.frombuffer(body, np.uint8)
    for mark, most in MAX_PARTS.items():
        number = np.count_nonzero(data == ord(mark))
        if mark == b'"' and number > most:  # those that text has are escaped
            number -= np.count_nonzero((data[1:] == ord(mark)) & (data[:-1] == ord("\\")))
        if number > most:
            raise InvalidRequest(f"The body has {number} of `{mark.decode()}`; the limit is {most}.")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw | str, at: str = "") -> T:
    """The typed value of a JSON text; `at` is the path it stands at in the request.

    msgspec refuses NaN, Infinity, numbers beyond a double, lone surrogates, bad UTF-8 and trailing text by itself. Of a
    key that comes twice the last value counts. Raises InvalidRequest with the path of the wrong field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _wrong_field(str(exc), at) from None
    except msgspec.DecodeError as exc:
        what = f"`{at}` is" if at else "The body is"
        raise InvalidRequest(f"{what} not valid JSON: {exc}.", at or None) from None
    except RecursionError:
        raise InvalidRequest(f"JSON is nested too deeply; the limit is {MAX_DEPTH} levels.", at or None) from None


def convert(kind: type[T], value: Json, at: str) -> T:
    """The typed form of a value that was decoded as free-form JSON, and stands at a path. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise _wrong_field(str(exc), at) from None


def check_size(value: Json, path: str) -> None:
    """Raise InvalidRequest when free-form JSON is deeper than MAX_DEPTH or has over MAX_VALUES. Does not recurse."""
    level: list[Any] = [value]
    number = 0
    for _ in range(MAX_DEPTH):
        number += len(level)
        if number > MAX_VALUES:
            raise InvalidRequest(f"JSON has too many values; the limit is {MAX_VALUES}.", path)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise InvalidRequest(f"JSON is nested too deeply; the limit is {MAX_DEPTH} levels.", path)


def join(parent: str, child: str) -> str:
    """The path of a field below another: `a` and `b` give `a.b`, `a` and `[0]` give `a[0]`."""
    if not parent or not child:
        return parent or child
    return f"{parent}{child}" if child.startswith("[") else f"{parent}.{child}"


def _wrong_field(message: str, at: str) -> InvalidRequest:
    found = _WHERE.match(message)
    assert found is not None  # every part of the pattern may be empty
    path = join(at, found["path"] or "")
    if missing := _MISSING.search(found["what"]):
        path = join(path, missing["field"])
        return InvalidRequest(f"`{path}` is required.", path)
    if unknown := _UNKNOWN.search(found["what"]):
        path = join(path, unknown["field"])
        return InvalidRequest(f"`{path}` is not known.", path)
    what = found["what"][:1].lower() + found["what"][1:]
    return InvalidRequest(f"`{path}`: {what}." if path else f"The body: {what}.", path or None)


class ErrorInfo(msgspec.Struct):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every error, and the data of a stream's error event."""

    error: ErrorInfo

    @classmethod
    def of(cls, exc: RequestError | EngineError) -> "ErrorBody":
        return cls(ErrorInfo(exc.message, _kind(exc.status), getattr(exc, "param", None), exc.code))


class ErrorShape(Protocol):
    """A struct that tells of an error in a dialect's words, as ErrorBody does in OpenAI's."""

    @classmethod
    def of(cls, exc: RequestError | EngineError) -> msgspec.Struct: ...


def error_response(exc: RequestError | EngineError, shape: type[ErrorShape] = ErrorBody) -> web.Response:
    """The response that tells a client of an error, before anything else was sent."""
    response = json_response(encode(shape.of(exc)), status=exc.status)
    if isinstance(exc, Overloaded | NotReady):
        response.headers["Retry-After"] = str(exc.retry_after_s)
    if isinstance(exc, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exc, RequestTimeout | PayloadTooLarge):
        response.force_close()  # the rest of the body may still come
    return response


def json_response(body: bytes, status: int = 200) -> web.Response:
    """A response of encoded JSON."""
    return web.Response(body=body, status=status, content_type="application/json")


encode = msgspec.json.Encoder().encode


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
