"""OpenAI's SDK against the daemon's Responses API: plain, its stream helper, a loop of tool calls, cancel."""

import json

import openai
import pytest

MODEL = "glm-5.3-nano"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "name": "bash", "description": "Runs.", "parameters": PARAMETERS, "strict": False}]
ASK = [{"role": "user", "content": "Which files are there? " * 20}]


@pytest.fixture
async def sdk(agent):
    async with openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_loop_of_tool_calls_gives_its_items_back_and_finds_its_prefix_cached(sdk):
    history, before = list(ASK), None
    for turn in range(3):
        async with sdk.responses.stream(model=MODEL, input=history, tools=TOOLS, store=False) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert {"response.reasoning_text.delta", "response.output_text.delta"} <= set(kinds)
        assert (response.status, response.output_text) == ("completed", "I look at the files first.")
        reasoning, _, call = response.output
        assert reasoning.content[0].text.startswith("They want")
        assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls -la src"})
        if before is not None:
            whole_pages = (before.input_tokens + before.output_tokens - 1) // 16 * 16
            assert response.usage.input_tokens_details.cached_tokens >= whole_pages
        before = response.usage
        history += [item.to_dict() for item in response.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{turn}.txt"})


async def test_a_stream_adds_up_to_the_plain_answer(sdk):
    fields = {"model": MODEL, "input": "Which files?", "tools": TOOLS}
    plain = await sdk.responses.create(**fields)
    async with sdk.responses.stream(**fields) as stream:
        streamed = await stream.get_final_response()
    for response in (plain, streamed):
        for item in response.output:
            item.id = item.call_id = ""
    assert [item.to_dict(exclude_none=True) for item in streamed.output] == [
        item.to_dict(exclude_none=True) for item in plain.output
    ]
    assert plain.usage.output_tokens == streamed.usage.output_tokens


@pytest.mark.parametrize("max_tokens", range(1, 40, 6))
async def test_a_cut_anywhere_is_incomplete_without_half_a_call(sdk, max_tokens):
    """F-E14"""
    fields = {"model": MODEL, "input": "Which files?", "tools": TOOLS, "max_output_tokens": max_tokens}
    plain = await sdk.responses.create(**fields)
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = [event async for event in await sdk.responses.create(stream=True, **fields)]
    assert events[-1].type == "response.incomplete"
    for response in (plain, events[-1].response):
        assert all(item.type != "function_call" for item in response.output)
    assert [item.content[0].text for item in plain.output] == [
        item.content[0].text for item in events[-1].response.output
    ]


async def test_one_that_runs_is_cancelled_by_its_id(sim, http):
    """[R48]"""
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0) as sdk:
        fields = {"model": MODEL, "input": "Go on.", "extra_body": {"ignore_eos": True}}
        stream = await sdk.responses.create(stream=True, **fields)
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == 10:
                cancelled = await sdk.responses.cancel(events[0].response.id)
                assert cancelled.status == "cancelled"
        assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.cancel(events[0].response.id)
