"""What is wrong with a body is refused before anything is done, on every route that takes one. [R14]

The fields of a dialect have tables beside the rest of its tests: test_server_bodies.py, _anthropic.py, _responses.py.
"""

import json
from typing import Any

import pytest

from glm53d.server.app import ROUTES
from tests.helpers.http import Client

HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_request": {"rid": "r"},
    "/pause_generation": {"mode": "retract"},
    "/configure_logging": {"log_level": "warning"},
}
DEEP = b"[" * 100_000 + b"]" * 100_000
MALFORMED = [
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"x": NaN}',  # F-G6
    b'{"x": Infinity}',
    b'{"x": -Infinity}',
    b'{"x": "\\ud800"}',  # F-G10
    b'{"x": "\\udc00 low alone"}',
    b'{"\\ud800": 1}',
    b'{"x": ' + DEEP + b"}",  # F-G11
]
WRONG = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "hi", "messages": HI}, "prompt"),
    ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
    ("/tokenize", {"messages": HI, "add_generation_prompt": 1}, "add_generation_prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "hi"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 2**31]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 1000]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1], "skip_special_tokens": 1}, "skip_special_tokens"),
    ("/v1/messages/count_tokens", {}, "messages"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": 5}, "rid"),
    ("/abort_request", {"abort_all": 1}, "abort_all"),
    ("/pause_generation", {"mode": "later"}, "mode"),
    ("/configure_logging", {}, "log_level"),
    ("/configure_logging", {"log_level": "loud"}, "log_level"),
]


def test_every_route_that_takes_a_body_is_here():
    assert set(GOOD) == {route.path for route in ROUTES if route.body is not None}


async def refused(client: Client, path: str, body: bytes | dict[str, Any], param: str | None) -> None:
    """Check that a body is a 400 in its dialect's shape, has done nothing, and that the next one is served."""
    answer = await client.post(path, body)
    assert (answer.status, answer.headers["Content-Type"]) == (400, "application/json"), answer.body
    assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", param), answer.error
    assert answer.json.get("type") == ("error" if path.startswith("/v1/messages") else None)
    assert client.engine.jobs == client.engine.tokenized == client.engine.calls == []
    assert (await client.post(path, GOOD[path])).status == 200


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:20]))
async def test_what_is_not_a_json_object_is_refused_whole(client, path, body):
    await refused(client, path, body, None)


@pytest.mark.parametrize("path", [route.path for route in ROUTES if hasattr(route.body, "rid")])
async def test_text_that_is_no_utf_8_is_refused_in_what_is_read(client, path):
    await refused(client, path, b'{"rid": "\xff"}', None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_number_that_no_double_holds_is_refused(client, path):
    """F-G6"""
    await refused(client, path, b'{"temperature": 1e999}', "temperature")


@pytest.mark.parametrize("path", GOOD)
async def test_text_behind_the_object_is_refused(client, path):
    await refused(client, path, json.dumps(GOOD[path]).encode() + b" x", None)


@pytest.mark.parametrize("path", [path for path in GOOD if path != "/pause_generation"])
async def test_no_body_is_refused_where_one_is_needed(client, path):
    """Control calls take none as an empty object."""
    await refused(client, path, b"", {"/abort_request": "rid", "/configure_logging": "log_level"}.get(path))


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=str)
async def test_a_wrong_field_is_refused_by_its_path(client, path, body, param):
    await refused(client, path, body, param)
