"""What agents send, as it was recorded (F-J): their shapes with words of our own. Other dialects have theirs."""

import asyncio

CHAT = "/v1/chat/completions"
OPENCODE = {"x-session-id": "ses_1", "x-session-affinity": "ses_1", "User-Agent": "opencode"}
SYSTEM = {"role": "system", "content": "You write titles. " * 20}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("bash", "read", "write", "grep")
]
TITLE = {
    "model": "nano",
    "messages": [SYSTEM, {"role": "user", "content": "Make a title:"}, {"role": "user", "content": "List the files."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 32000,
}
FIRST = {
    "model": "nano",
    "messages": [SYSTEM, {"role": "user", "content": "List the files."}],
    "tools": TOOLS,
    "tool_choice": "auto",
    "max_tokens": 32000,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
TURN = {"role": "assistant", "content": "I look.", "reasoning_content": "They want files.", "tool_calls": [CALL]}
SECOND = FIRST | {
    "messages": [*FIRST["messages"], TURN, {"role": "tool", "tool_call_id": "call_1", "content": "a.txt\nb.txt"}]
}


async def test_opencodes_title_and_first_turn_come_at_once_and_both_are_served(client):
    """F-J3"""
    answers = await asyncio.gather(*(client.post(CHAT, body, OPENCODE) for body in (TITLE, FIRST)))
    assert [answer.status for answer in answers] == [200, 200]
    assert all(answer.events[-2]["usage"]["total_tokens"] > 0 for answer in answers)
    title = next(job.conversation for job in client.engine.jobs if not job.conversation.tools)
    assert [message["role"] for message in title.messages] == ["system", "user", "user"]
    assert {job.routing.session for job in client.engine.jobs} == {"ses_1"}


async def test_opencodes_second_turn_gives_its_thinking_and_its_call_back_to_the_template(client):
    """F-J3"""
    assert (await client.post(CHAT, SECOND, OPENCODE)).status == 200
    turn, result = client.engine.jobs[-1].conversation.messages[2:]
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "They want files.")
    assert turn["tool_calls"][0]["function"] == {"name": "bash", "arguments": {"command": "ls"}}
    assert result == {"role": "tool", "content": "a.txt\nb.txt", "tool_call_id": "call_1"}
