"""docs/api.md says of every field what the code does with it, and names every route that changes something."""

import json
from pathlib import Path

import msgspec
import pytest

from glm53d.server.anthropic_body import MessagesBody
from glm53d.server.app import ROUTES
from glm53d.server.native_api import GenerateBody, NativeSampling
from glm53d.server.openai_chat import ChatBody
from glm53d.server.openai_completions import CompletionBody
from glm53d.server.responses_body import ResponsesBody
from glm53d.server.routing import DP_RANK_HEADER, SESSION_HEADERS

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
# A column of the table -> the structs whose fields it is about.
COLUMNS = {
    "chat": (ChatBody,),
    "completions": (CompletionBody,),
    "messages": (MessagesBody,),
    "responses": (ResponsesBody,),
    "generate": (GenerateBody, NativeSampling),
}


def documented() -> dict[str, list[str]]:
    """Field -> its cells, by column."""
    lines = DOCS.partition("## Fields")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[0][1:-1] == list(COLUMNS)
    return {row[0].strip("`"): row[1:-1] for row in rows[2:]}


def served(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, str]:
    """Field -> what its cell must say, from its schema."""
    cells = {}
    for kind in kinds:
        schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        for name, field in schema.items():
            passing = field.get("description", "").removeprefix("Not served: null").split(" or ")[1:]
            # 0 and 0.0 are one number to a client.
            values = ", ".join(f"`{value}`" for value in passing if not isinstance(json.loads(value), float))
            refused = field.get("description", "").startswith("Not served")
            cells[name] = ("refused" + (f" but {values}" if values else "")) if refused else "works"
    return cells


@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_says_of_each_field_what_the_code_does_with_it(column):
    at = list(COLUMNS).index(column)
    cells = {field: row[at] for field, row in documented().items()}
    ignored = {field for field, cell in cells.items() if cell == "ignored"}
    expected = served(COLUMNS[column])
    assert not ignored & set(expected)
    assert {field: cell for field, cell in cells.items() if cell and field not in ignored} == expected


def test_the_docs_name_every_route_that_takes_a_post_and_every_header_that_routes():
    for route in ROUTES:
        if route.method == "POST":
            assert f"{route.path}`" in DOCS, route.path
    for name in (DP_RANK_HEADER, *SESSION_HEADERS):
        assert f"`{name}`" in DOCS
