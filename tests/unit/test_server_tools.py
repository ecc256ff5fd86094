"""Tools in a chat: what reaches the template and the parser, and calls in the shape and order that SDKs expect."""

import json
import re

import openai
import pytest

from glm53d.ipc.records import FinishReason
from tests.helpers.fake_engine import ADDED, THINK_END
from tests.helpers.http import Client, client_of_fake_engine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "Says it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
PING = {"name": "ping"}
TOOLS = [{"type": "function", "function": WEATHER, "x": 1}, {"type": "function", "function": PING}]
ID = re.compile(r"call_[0-9a-f]{24}")


def python(text: str) -> list[tuple[str, str | int, list[int]]]:
    """The script's pieces of a part of a turn, tags as ids; a token each."""
    parts = (part for part in re.split("(" + "|".join(map(re.escape, ADDED)) + ")", text) if part)
    return [("python", ADDED.get(part, part), [1]) for part in parts]


PARIS = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
THOUGHT = ("reasoning", "Hm.", [11, THINK_END])


@pytest.fixture
async def client():
    async with client_of_fake_engine() as client:
        client.engine.script.pieces = [THOUGHT, ("content", "Let me look. ", [12]), *python(PARIS + "B")]
        yield client


async def plain(client: Client, **fields) -> dict:
    answer = await client.post(CHAT, {"messages": HI} | fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


async def deltas(client: Client, **fields) -> tuple[list[dict], str]:
    """The deltas behind the role, and the finish reason."""
    answer = await client.post(CHAT, {"messages": HI, "stream": True} | fields)
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    return [c["choices"][0]["delta"] for c in chunks[1:-1]], chunks[-1]["choices"][0]["finish_reason"]


async def test_a_plain_answer_has_its_calls_beside_the_text(client):
    choice = await plain(client, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look. B", "Hm.")
    [call] = message["tool_calls"]
    assert ID.fullmatch(call.pop("id"))
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


async def test_a_stream_says_id_and_name_first_then_arguments_as_they_come(client):
    """F-E12: what was said before the call comes before it."""
    sent, reason = await deltas(client, tools=TOOLS)
    assert reason == "tool_calls"
    start = sent.pop(2)
    assert sent == [
        {"reasoning_content": "Hm."},
        {"content": "Let me look. "},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "Paris"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"content": "B"},
    ]
    [call] = start["tool_calls"]
    assert ID.fullmatch(call.pop("id"))
    assert call == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}


async def test_calls_are_numbered_by_appearance_and_have_ids_of_their_own(client):
    """F-E1, F-E11, F-E13: ping, the last tool, is called first, and without arguments."""
    client.engine.script.pieces = [THOUGHT, *python("<tool_call>ping</tool_call>" + PARIS)]
    sent, _ = await deltas(client, tools=TOOLS)
    calls = [call for delta in sent for call in delta.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(c["index"], c["function"]["name"]) for c in starts] == [(0, "ping"), (1, "get_weather")]
    assert len({c["id"] for c in starts}) == 2
    joined = ["".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in (0, 1)]
    assert joined == ["{}", '{"city": "Paris"}']


async def test_an_answer_of_nothing_but_calls_has_no_content(client):
    client.engine.script.pieces = [THOUGHT, *python("\n" + PARIS + "\n" + PARIS + "\n")]
    choice = await plain(client, tools=TOOLS)
    assert (choice["message"]["content"], len(choice["message"]["tool_calls"])) == (None, 2)
    sent, _ = await deltas(client, tools=TOOLS)
    assert not any("content" in delta for delta in sent)


async def test_tools_reach_the_template_as_they_came(client):
    await plain(client, tools=TOOLS)
    assert client.engine.jobs[-1].conversation.tools == TOOLS
    assert client.engine.jobs[-1].out.python_ids == (ADDED["<tool_call>"],)


async def test_function_tools_work_and_others_are_ignored_and_logged(client, caplog):
    """F-H4"""
    caplog.set_level("INFO")
    others = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "f"}}]
    choice = await plain(client, tools=[others[0], *TOOLS, others[1]])
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert client.engine.jobs[-1].conversation.tools == TOOLS
    [line] = [record.message for record in caplog.records if "ignored" in record.message]
    assert "'web_search'" in line and "'custom'" in line
    await plain(client, tools=others)
    job = client.engine.jobs[-1]
    assert (job.conversation.tools, job.out.python_ids) == (None, ())


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "auto"}, {"functions": []}]
)
async def test_without_tools_nothing_is_a_call(client, fields):
    """F-H3, F-E9"""
    client.engine.script.pieces = [THOUGHT, ("content", PARIS, [12])]
    choice = await plain(client, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS, "stop")
    assert "tool_calls" not in choice["message"]
    job = client.engine.jobs[-1]
    assert (job.conversation.tools, job.out.python_ids) == (None, ())


async def test_tool_choice_none_keeps_tools_from_the_prompt_and_markup_from_the_answer(client):
    """F-E8"""
    choice = await plain(client, tools=TOOLS, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me look. B", "stop")
    assert "tool_calls" not in choice["message"]
    assert client.engine.jobs[-1].conversation.tools is None
    sent, reason = await deltas(client, tools=TOOLS, tool_choice="none")
    assert (sent[1:], reason) == ([{"content": "Let me look. "}, {"content": "B"}], "stop")


async def test_without_parallel_calls_the_first_is_kept(client):
    client.engine.script.pieces = [THOUGHT, *python(PARIS + "<tool_call>ping</tool_call>" + "B")]
    choice = await plain(client, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"] == "B"
    sent, _ = await deltas(client, tools=TOOLS, parallel_tool_calls=False)
    assert {call["index"] for delta in sent for call in delta.get("tool_calls", ())} == {0}


async def test_a_call_of_an_unknown_tool_is_dropped_and_counted(client, caplog):
    caplog.set_level("INFO")
    client.engine.script.pieces = [THOUGHT, *python("<tool_call>nope<arg_key>a</arg_key></tool_call>B")]
    choice = await plain(client, tools=TOOLS)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("B", "stop")
    sent, reason = await deltas(client, tools=TOOLS)
    assert (sent[1:], reason) == ([{"content": "B"}], "stop")
    metrics = await client.get("/metrics")
    assert f'glm53d_dropped_tool_calls_total{{endpoint="{CHAT}"}} 2.0' in metrics.body.decode()
    assert sum("'nope'" in record.message for record in caplog.records) == 2


async def test_a_call_that_is_cut_off_is_length_and_never_complete(client):
    """F-E14"""
    client.engine.script.pieces = [THOUGHT, *python(PARIS + PARIS.partition("</arg_value>")[0])]
    client.engine.script.reason = FinishReason.LENGTH
    choice = await plain(client, tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    sent, reason = await deltas(client, tools=TOOLS)
    assert reason == "length"
    cut = [c["function"]["arguments"] for d in sent for c in d.get("tool_calls", ()) if c["index"] == 1]
    assert "".join(cut) == '{"city": "Paris'


async def test_a_call_in_the_thinking_ends_it(client):
    """F-E7: and the text of such a turn stays reasoning, although </think> never came."""
    client.engine.script.pieces = [("reasoning", "Hm ", [11]), *python(PARIS)]
    choice = await plain(client, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "Hm ")


async def test_legacy_functions_are_tools_answered_in_their_own_shape(client):
    client.engine.script.pieces = [THOUGHT, *python(PARIS + "<tool_call>ping</tool_call>")]
    fields = {"functions": [WEATHER, PING], "function_call": "auto"}
    choice = await plain(client, **fields)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert "tool_calls" not in choice["message"]
    assert client.engine.jobs[-1].conversation.tools == [{"type": "function", "function": f} for f in (WEATHER, PING)]
    sent, reason = await deltas(client, **fields)
    parts = [delta["function_call"] for delta in sent if "function_call" in delta]
    assert parts[0] == {"name": "get_weather", "arguments": ""}
    assert ("".join(part["arguments"] for part in parts), reason) == ('{"city": "Paris"}', "function_call")
    off = await plain(client, **fields | {"function_call": "none"})
    assert off["finish_reason"] == "stop"


async def test_a_legacy_call_in_the_history_is_a_tool_call(client):
    said = {"role": "assistant", "content": None, "function_call": {"name": "ping", "arguments": '{"a": 1}'}}
    await client.post(CHAT, {"messages": [*HI, said, {"role": "function", "name": "ping", "content": "42"}]})
    assert client.engine.jobs[-1].conversation.messages[1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": None, "type": "function", "function": {"name": "ping", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "42"},
    ]


async def test_what_a_parser_fails_on_ends_the_stream_with_an_error(client, monkeypatch):
    monkeypatch.setattr("glm53d.chat.tools.ToolParser.feed", lambda self, pieces: 1 / 0)
    answer = await client.post(CHAT, {"messages": HI, "tools": TOOLS, "stream": True})
    *_, error, done = answer.events
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
    assert client.engine.live == []


async def test_the_openai_sdk_gathers_a_streamed_call(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        async with sdk.chat.completions.stream(model="nano", messages=HI, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert message.content == "Let me look. B"
        answer = await sdk.chat.completions.create(model="nano", messages=HI, tools=TOOLS)
        [same] = answer.choices[0].message.tool_calls
        assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
