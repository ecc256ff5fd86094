"""Tool calls on their whole way, from tokens of the scripted engine to the OpenAI SDK. [R41]"""

import json
from collections.abc import Iterator

import openai
import pytest

from glm53d.nano.weights import PACKAGE
from glm53d.text.vocab import Vocab
from tests.helpers.daemon import Daemon, scripted

MESSAGES = [{"role": "user", "content": "Write it."}]
CODE = "".join(f'line {i}\tsays "你好" and <b> \\n\n' for i in range(100))
WRITE = {
    "path": {"type": "string"},
    "code": {"type": "string"},
    "mode": {"type": "integer"},
    "flags": {"type": "array"},
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": WRITE}}},
    {"type": "function", "function": {"name": "ping"}},
]
PAIRS = {"path": "a b.py", "code": CODE, "mode": "420", "flags": '["x"]', "other": "null"}
ARGUMENTS = {"path": "a b.py", "code": CODE, "mode": 420, "flags": ["x"], "other": None}
TURN = (
    "I write.</think>Let me see.\n<tool_call>write"
    + "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in PAIRS.items())
    + "</tool_call><tool_call>nope</tool_call>\n<tool_call>ping</tool_call><|observation|>"
)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Every answer of its engine is TURN."""
    with scripted(TURN, log=tmp_path_factory.mktemp("writer") / "log") as daemon:
        yield daemon


@pytest.fixture
async def sdk(writer):
    async with openai.AsyncOpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_one_call_at_most_ends_the_turn_with_it(sdk):
    """Nothing is computed behind it, and no grammar is needed for that."""
    fields = {"model": sdk_model(await sdk.models.list()), "tools": TOOLS, "messages": MESSAGES}
    [all_calls] = (await sdk.chat.completions.create(**fields)).choices
    alone = await sdk.chat.completions.create(parallel_tool_calls=False, **fields)
    [choice] = alone.choices
    first = all_calls.message.tool_calls[0].function
    assert [call.function for call in choice.message.tool_calls] == [first]
    assert choice.finish_reason == "tool_calls" and choice.message.content == all_calls.message.content
    assert choice.model_extra["matched_stop"] == Vocab.load(PACKAGE / "tokenizer.json").added["</tool_call>"]


async def test_calls_come_typed_streamed_or_not_and_a_second_turn_takes_them_back(sdk):
    """F-E2, F-E5, F-E17: the code of a hundred lines comes in at least as many parts."""
    fields = {"model": sdk_model(await sdk.models.list()), "tools": TOOLS}
    plain = await sdk.chat.completions.create(messages=MESSAGES, **fields)
    [choice] = plain.choices
    write, ping = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == (
        "tool_calls", "Let me see.\n", "I write.",
    )  # fmt: skip
    assert (write.function.name, json.loads(write.function.arguments)) == ("write", ARGUMENTS)
    assert (ping.function.name, ping.function.arguments) == ("ping", "{}")
    assert 0 < plain.usage.completion_tokens_details.reasoning_tokens < plain.usage.completion_tokens

    num_parts = 0
    async with sdk.chat.completions.stream(
        messages=MESSAGES, stream_options={"include_usage": True}, **fields
    ) as stream:
        async for event in stream:
            num_parts += event.type == "tool_calls.function.arguments.delta"
        streamed = await stream.get_final_completion()
    message = streamed.choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in (write, ping)
    ]
    assert num_parts > 100
    assert (message.content, streamed.choices[0].finish_reason) == ("Let me see.\n", "tool_calls")
    assert streamed.usage.completion_tokens_details == plain.usage.completion_tokens_details
    assert streamed.usage.completion_tokens == plain.usage.completion_tokens

    results = [
        {"role": "tool", "tool_call_id": c.id, "content": [{"type": "text", "text": "42"}]} for c in (write, ping)
    ]
    history = [*MESSAGES, choice.message.model_dump(exclude_none=True), *results]
    second = await sdk.chat.completions.create(messages=history, **fields)
    assert second.choices[0].finish_reason == "tool_calls"
    assert second.usage.prompt_tokens > plain.usage.prompt_tokens + plain.usage.completion_tokens // 2


async def test_without_tools_or_with_choice_none_there_is_no_call(sdk):
    """F-E8, F-E9"""
    model = sdk_model(await sdk.models.list())
    untouched = await sdk.chat.completions.create(model=model, messages=MESSAGES)
    assert untouched.choices[0].message.content == TURN.partition("</think>")[2].removesuffix("<|observation|>")
    off = await sdk.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert (off.choices[0].message.content, off.choices[0].finish_reason) == ("Let me see.\n\n", "stop")
    assert off.usage.prompt_tokens == untouched.usage.prompt_tokens
    assert not off.choices[0].message.tool_calls


async def test_a_cut_inside_a_call_is_length(sdk):
    """F-E14"""
    fields = {"model": sdk_model(await sdk.models.list()), "messages": MESSAGES, "tools": TOOLS, "max_tokens": 40}
    plain = (await sdk.chat.completions.create(**fields)).choices[0]
    assert (plain.finish_reason, plain.message.tool_calls, plain.message.content) == ("length", None, "Let me see.\n")
    chunks = [chunk async for chunk in await sdk.chat.completions.create(stream=True, **fields)]
    sent = "".join(c.function.arguments for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ())
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(sent) and '"code": "line' in sent
    assert chunks[-1].choices[0].finish_reason == "length"


def sdk_model(models) -> str:
    return models.data[0].id
