"""Anthropic's SDK against the daemon: messages, their stream helper, count_tokens, a loop of tool calls."""

import anthropic
import pytest

MODEL = "glm-5.3-nano"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}]
ASK = [{"role": "user", "content": "Which files are there? " * 20}]
THINKING = {"type": "adaptive"}


@pytest.fixture
async def sdk(agent):
    async with anthropic.AsyncAnthropic(base_url=agent.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_tokens(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def said(message) -> list[tuple]:
    """The blocks without their ids; the stream helper's are of types of their own."""
    names = ("type", "thinking", "signature", "text", "name", "input")
    return [tuple(getattr(block, name, None) for name in names) for block in message.content]


async def test_a_loop_of_tool_calls_gives_thinking_back_and_finds_its_prefix_cached(sdk):
    """F-H8, F-H10: what was counted is what is charged, and the cached part is no input."""
    history, before = list(ASK), None
    for turn in range(3):
        fields = {"model": MODEL, "messages": history, "tools": TOOLS, "thinking": THINKING, "system": "Be brief."}
        counted = await sdk.messages.count_tokens(**fields)
        async with sdk.messages.stream(max_tokens=1000, **fields) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert {"thinking", "text", "input_json"} <= set(kinds)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, use = message.content
        assert (thinking.thinking.startswith("They want"), bool(thinking.signature)) == (True, True)
        assert (text.text, use.name, use.input) == ("I look at the files first.", "bash", {"command": "ls -la src"})
        assert message.stop_reason == "tool_use"
        assert prompt_tokens(message.usage) == counted.input_tokens
        if before is not None:
            whole_pages = (prompt_tokens(before) + before.output_tokens - 1) // 16 * 16
            assert message.usage.cache_read_input_tokens >= whole_pages
            assert message.usage.input_tokens < 40
        before = message.usage
        history += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": f"{turn}.txt"}]},
        ]


async def test_a_stream_adds_up_to_the_plain_answer(sdk):
    fields = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 1000}
    plain = await sdk.messages.create(**fields)
    async with sdk.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    assert said(streamed) == said(plain)
    assert streamed.stop_reason == plain.stop_reason
    assert streamed.usage.output_tokens_details == plain.usage.output_tokens_details


async def test_a_stop_sequence_ends_the_text(sdk):
    message = await sdk.messages.create(model=MODEL, messages=ASK, max_tokens=1000, stop_sequences=[" files"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " files")
    assert message.content[-1].text == "I look at the"


@pytest.mark.parametrize("max_tokens", range(1, 40, 6))
async def test_a_cut_anywhere_is_max_tokens_and_adds_up(sdk, max_tokens):
    """F-E14"""
    fields = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": max_tokens}
    plain = await sdk.messages.create(**fields)
    assert (plain.stop_reason, plain.usage.output_tokens) == ("max_tokens", max_tokens)
    assert all(block.type != "tool_use" for block in plain.content)
    async with sdk.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    assert streamed.stop_reason == "max_tokens"
    assert [block for block in said(streamed) if block[0] != "tool_use"] == said(plain)


async def test_errors_are_the_sdks_own(sdk, agent):
    with pytest.raises(anthropic.NotFoundError) as missing:
        await sdk.messages.create(model="claude-x", messages=ASK, max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await sdk.messages.create(model=MODEL, messages=[{"role": "user", "content": "ab " * 300_000}], max_tokens=5)
