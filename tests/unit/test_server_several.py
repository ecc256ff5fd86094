"""Several answers to one request: n of a chat and of a completion. [R20]"""

import asyncio

import pytest

from glm53d.errors import EngineError
from tests.helpers.http import raw_post, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}], "n": 3}, TEXT: {"prompt": "hi", "n": 3}}


@pytest.fixture(params=BODIES)
def path(request):
    return request.param


def text_of(choice: dict) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return (part.get("reasoning_content") or "") + (part.get("content") or part.get("text") or "")


async def test_a_plain_answer_has_each_choice_and_counts_the_prompt_once(client, path):
    answer = (await client.post(path, BODIES[path])).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {text_of(choice) for choice in answer["choices"]} == {'Let me think.Hello "you"\n世界'}
    one = (await client.post(path, BODIES[path] | {"n": 1})).json["usage"]
    assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == one["prompt_tokens_details"]
    assert answer["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    assert answer["usage"]["total_tokens"] == 5 + answer["usage"]["completion_tokens"]


async def test_a_stream_has_every_index_with_one_finish_each_and_one_usage(client, path):
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = (await client.post(path, body)).events
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 5
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, mine)) == 'Let me think.Hello "you"\n世界'
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "stop"
    assert all(event["usage"] is None for event in events)


async def test_an_answer_that_ends_is_told_while_the_others_go_on(client, path):
    client.engine.script.hold = True
    reader, writer = await client.open(raw_post(path, BODIES[path] | {"stream": True}))
    await until(lambda: len(client.engine.live) == 3)
    client.engine.live[1].release.set()
    end = await reader.readuntil(b'"finish_reason":"stop"')
    assert b'"index":1' in end.rpartition(b"data: ")[2]
    assert len(client.engine.live) == 2
    writer.close()
    await until(lambda: not client.engine.live)  # the client has left: all are aborted


async def test_no_two_answers_have_one_seed(client, path):
    await client.post(path, BODIES[path] | {"seed": -1})
    assert [job.sampling.seed for job in client.engine.jobs] == [2**64 - 1, 0, 1]


async def test_one_abort_ends_all(client, path):
    client.engine.script.hold = True
    request = asyncio.create_task(client.post(path, BODIES[path] | {"rid": "mine"}))
    await until(lambda: len(client.engine.live) == 3)
    assert (await client.post("/v1/requests/mine/cancel", b"")).json["cancelled"] == 3
    assert {choice["finish_reason"] for choice in (await request).json["choices"]} == {"abort"}


async def test_when_one_answer_fails_the_request_fails_and_nothing_is_left(client, path):
    client.engine.script.fail = EngineError("broken")
    assert (await client.post(path, BODIES[path])).status == 500
    events = (await client.post(path, BODIES[path] | {"stream": True})).events
    assert events[-2]["error"]["message"] == "broken"
    assert client.engine.live == []


async def test_metrics_count_the_prompt_once_and_every_answer(client, path):
    await client.post(path, BODIES[path])
    text = (await client.get("/metrics")).body.decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['glm53d_tokens_total{kind="prompt"}'] == "5.0"
    assert samples['glm53d_tokens_total{kind="completion"}'] == "18.0"
    assert samples[f'glm53d_generations_total{{endpoint="{path}",reason="stop"}}'] == "3.0"


async def test_a_slow_reader_slows_every_answer(client):
    client.engine.script.hold = True
    _, writer = await client.open(raw_post(CHAT, BODIES[CHAT] | {"stream": True}))
    await until(lambda: len(client.engine.live) == 3)
    first, *others = client.engine.live
    await until(lambda: first.write is not None)
    while not first.slow:
        first.write(first.frame("content", "x" * 60_000, []))
        await asyncio.sleep(0)
    assert [other.slow for other in others] == [[True], [True]]
    writer.close()
