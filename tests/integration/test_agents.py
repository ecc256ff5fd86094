"""Two turns of each agent in the shapes that were recorded, with words of our own: no 4xx, the second turn extends the
first and finds it cached. (F-J)"""

import json
import os
import signal

import aiohttp
import pytest

from tests.helpers.daemon import Daemon, events, running

MODEL = "glm-5.3-nano"
FILLER = "You are an agent that works on a computer. You read before you write, and you say what you have done. " * 40
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
NAMES = ("bash", "read", "write", "edit", "grep", "glob", "todo")
PAGE = 16


async def asked(http: aiohttp.ClientSession, daemon: Daemon, path: str, body: dict, headers: dict) -> list[dict]:
    """The events of a stream, [DONE] left out."""
    async with http.post(daemon.url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return [event for event in await events(answer) if event != "[DONE]"]


# ---- Codex -----------------------------------------------------------------------------------------------------------


def codex(items: list[dict]) -> tuple[dict, dict]:
    body = {
        "model": MODEL,
        "stream": True,
        "input": items,
        "tools": [
            *({"type": "function", "name": name, "description": "Does it.", "strict": False, "parameters": PARAMETERS}
              for name in NAMES),
            {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn_agent"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01-session",
        "client_metadata": {"x-codex-installation-id": "i"},
    }  # fmt: skip
    headers = {"session-id": "01-session", "thread-id": "01-thread", "x-client-request-id": "01-thread"}
    return body, headers | {"x-codex-turn-metadata": "{}", "Accept": "text/event-stream"}


async def test_codex(agent, http):
    """F-J1, F-H4, F-H5"""

    def message(id: str, role: str, *texts: str) -> dict:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": id, "role": role, "content": parts}

    items = [
        message("m1", "developer", FILLER, "Permissions: all."),
        message("m2", "developer", "Be brief."),
        message("m3", "user", "<environment>cwd: x</environment>"),
        message("m4", "user", "Which files are there?"),
    ]
    *_, first = await asked(http, agent, "/v1/responses", *codex(items))
    assert first["type"] == "response.completed"
    output = first["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    call = output[2]
    items += [*output, {"type": "function_call_output", "id": "o1", "call_id": call["call_id"], "output": "a.txt"}]
    *_, second = await asked(http, agent, "/v1/responses", *codex(items))
    before, after = first["response"]["usage"], second["response"]["usage"]
    assert after["input_tokens"] > before["total_tokens"]
    assert after["input_tokens_details"]["cached_tokens"] >= (before["total_tokens"] - 1) // PAGE * PAGE


# ---- Claude Code -----------------------------------------------------------------------------------------------------


def claude_code(messages: list[dict], turn: int) -> tuple[dict, dict]:
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "messages": messages,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={turn:05d}; x=y;"},
            {"type": "text", "text": "You are an agent of a terminal.", **mark},
            {"type": "text", "text": "\n" + FILLER, **mark},
        ],
        "tools": [{"name": name, "description": "Does it.", "input_schema": PARAMETERS} for name in NAMES],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "Authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "X-Claude-Code-Session-Id": "s",
        "X-Stainless-Timeout": "600",
    }
    return body, headers


async def test_claude_code(agent, http):
    """F-J2, F-H6, F-H7, F-H8: the billing line changes, the cache mark moves, a system message follows the user's."""
    async with http.head(agent.url + "/") as answer:
        assert answer.status == 200
    text = {"type": "text", "text": "Which files are there?", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}, {"role": "system", "content": "You have 900000 tokens left."}]
    started, *rest, first, stop = await asked(http, agent, "/v1/messages?beta=true", *claude_code(messages, 1))
    assert (started["type"], first["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    assert first["delta"]["stop_reason"] == "tool_use"
    blocks = [event["content_block"] for event in rest if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    for event in rest:
        if event["type"] == "content_block_delta":
            (_, kind), (name, more) = event["delta"].items()
            block = blocks[event["index"]]
            if kind == "input_json_delta":
                block["json"] = block.get("json", "") + more
            else:
                block[name] += more
    blocks[2]["input"] = json.loads(blocks[2].pop("json"))
    text.pop("cache_control")
    result = {"tool_use_id": blocks[2]["id"], "type": "tool_result", "content": "hi", "is_error": False}
    messages += [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "You have 890000 tokens left."},
    ]
    *_, second, _ = await asked(http, agent, "/v1/messages?beta=true", *claude_code(messages, 2))
    before, after = first["usage"], second["usage"]
    prompt = before["input_tokens"] + before["cache_read_input_tokens"]
    assert after["cache_read_input_tokens"] >= (prompt + before["output_tokens"] - 1) // PAGE * PAGE
    assert after["input_tokens"] < 60


# ---- opencode --------------------------------------------------------------------------------------------------------


async def test_opencode(agent, http):
    """F-J3"""
    headers = {"x-session-id": "ses", "x-session-affinity": "ses"}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": PARAMETERS}}
        for name in NAMES
    ]
    messages = [{"role": "system", "content": FILLER}, {"role": "user", "content": "Which files are there?"}]
    common = {"model": MODEL, "max_tokens": 32000, "stream": True, "stream_options": {"include_usage": True}}
    body = common | {"messages": messages, "tools": tools, "tool_choice": "auto"}
    chunks = await asked(http, agent, "/v1/chat/completions", body, headers)
    turn: dict = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            turn[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                turn["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                turn["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    [call] = turn["tool_calls"]
    messages += [turn, {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}]
    *_, last = await asked(http, agent, "/v1/chat/completions", body, headers)
    before, after = chunks[-1]["usage"], last["usage"]
    assert after["prompt_tokens_details"]["cached_tokens"] >= (before["total_tokens"] - 1) // PAGE * PAGE
    title = [{"role": "user", "content": "Make a title:"}, {"role": "user", "content": "Which files are there?"}]
    await asked(http, agent, "/v1/chat/completions", common | {"messages": [messages[0], *title]}, headers)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_rank_that_dies_ends_the_stream_in_the_dialects_own_way(path, tmp_path, http):
    """F-G3"""
    body = {"model": MODEL, "stream": True, "ignore_eos": True, "max_tokens": 5000, "max_output_tokens": 5000}
    body |= {"input": "Go on."} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Go on."}]}
    with running(config="sim.toml", log=tmp_path / "log") as daemon:
        async with http.post(daemon.url + path, json=body) as answer:
            seen = b""
            async for line in answer.content:
                seen += line
                if seen.count(b"_delta") + seen.count(b".delta") > 20:
                    break
            async with http.get(daemon.url + "/server_info") as info:
                [rank] = (await info.json())["ranks"]
            os.kill(rank["pid"], signal.SIGKILL)
            rest = (await answer.content.read()).decode()
    last = rest.strip().split("\n\n")[-1]
    name, data = last.split("\n")
    assert name == ("event: error" if path == "/v1/messages" else "event: response.failed")
    assert "message_stop" not in rest and "response.completed" not in rest
    assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
