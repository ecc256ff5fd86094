"""/openapi.json says what the code does: same routes, same bodies, same keys. [R15]"""

import json

import msgspec
import pytest

from glm53d.config import Config
from glm53d.server import openapi
from glm53d.server.app import ROUTES, make_app
from glm53d.server.auth import Access
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http import client_of_fake_engine

DOCUMENT = json.loads(openapi.document(ROUTES))


def operations() -> dict[tuple[str, str], dict]:
    return {(verb.upper(), path): op for path, verbs in DOCUMENT["paths"].items() for verb, op in verbs.items()}


def test_it_has_exactly_the_routes_that_are_served():
    app = make_app(FakeEngine(Config()), Config())
    served = {(route.method, route.resource.canonical) for route in app.router.routes()}
    described = set(operations())
    with_head = {("HEAD", path) for verb, path in described if verb == "GET"}
    assert served == described | with_head


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_route_is_described_with_its_body_and_its_key(route):
    operation = operations()[route.method, route.path]
    assert operation["summary"] and not operation["summary"].startswith("Handle")
    assert (operation["security"] == []) == (route.access is Access.OPEN)
    assert ("requestBody" in operation) == (route.body is not None)
    if route.body is not None:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        properties = DOCUMENT["components"]["schemas"][name]["properties"]
        assert set(properties) == {field.encode_name for field in msgspec.structs.fields(route.body)}


def test_every_reference_leads_somewhere_and_no_operation_is_named_twice():
    names = [op["operationId"] for op in operations().values()]
    assert len(names) == len(set(names))
    text = json.dumps(DOCUMENT)
    for part in text.split('"$ref": "')[1:]:
        target = part.partition('"')[0]
        at = DOCUMENT
        for key in target.removeprefix("#/").split("/"):
            at = at[key]


def test_a_field_that_is_not_served_says_so():
    schema = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]["modalities"]
    assert schema["description"].startswith("Not served")


async def test_it_is_served():
    async with client_of_fake_engine() as client:
        assert (await client.get("/openapi.json")).json == DOCUMENT
