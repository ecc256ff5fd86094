"""Several answers to one request: n of a prompt, and several prompts. [R20]"""

import asyncio

import pytest

from glm53d.errors import EngineError
from tests.helpers.http import client_of_fake_engine, raw_post, until

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


async def test_an_answer_that_fails_is_told_while_the_others_go_on(client, path):
    client.engine.script.hold, client.engine.script.fail = True, EngineError("broken")
    request = asyncio.create_task(client.post(path, BODIES[path]))
    await until(lambda: len(client.engine.live) == 3)
    client.engine.live[1].release.set()
    async with asyncio.timeout(60):
        assert (await request).error["message"] == "broken"
    assert client.engine.live == []


@pytest.mark.parametrize("stream", [False, True])
async def test_whose_thinking_was_forced_to_end_says_so_itself(client, path, stream):
    """[R46]"""
    client.engine.script.thinking_forced = (1,)
    answer = await client.post(path, BODIES[path] | {"stream": stream})
    choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert [choice.get("thinking_forced", False) for choice in ends] == [False, True, False]


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


async def test_a_completion_of_several_prompts_has_n_choices_of_each_in_their_order(client):
    answer = (await client.post(TEXT, {"prompt": ["a", [5, 6], "b"], "n": 2, "seed": 7, "max_tokens": 9})).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    jobs = client.engine.jobs
    prompts = [job.text if job.ids is None else job.ids.tolist() for job in jobs]
    assert prompts == ["a", "a", [5, 6], [5, 6], "b", "b"]
    assert [job.sampling.seed for job in jobs] == [7, 8] * 3  # as each prompt would have them alone
    assert answer["usage"]["prompt_tokens"] == 3 * 5 and answer["usage"]["completion_tokens"] == 6 * 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * 2


async def test_a_list_of_one_prompt_is_that_prompt(client):
    for prompt in ("hi", ["hi"]):
        assert len((await client.post(TEXT, {"prompt": prompt})).json["choices"]) == 1
    assert [job.text for job in client.engine.jobs] == ["hi", "hi"]


async def test_a_stream_of_several_prompts_has_each_index_and_one_usage(client):
    body = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = (await client.post(TEXT, body)).events
    assert done == "[DONE]" and usage["usage"]["prompt_tokens"] == 10
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[1, 2], [3]]}])
async def test_a_batch_is_answered_by_a_list(client, prompts):
    """SGLang's /generate."""
    answers = (await client.post("/generate", prompts | {"rid": "mine"})).json
    assert [answer["text"] for answer in answers] == ['Let me think.Hello "you"\n世界'] * 2
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine", "mine"]
    jobs = client.engine.jobs
    assert [job.text or job.ids.tolist() for job in jobs] == next(iter(prompts.values()))


async def test_a_batch_may_have_parameters_and_rids_of_each_prompt(client):
    params = [{"max_new_tokens": 3, "temperature": 0, "n": 2}, {"top_k": 5, "n": 2}]
    body = {"text": ["a", "b"], "sampling_params": params, "rid": ["one", "two"]}
    answer = await client.post("/generate", body)
    assert [one["meta_info"]["id"] for one in answer.json] == ["one", "one", "two", "two"]
    sampling = [job.sampling for job in client.engine.jobs]
    assert [s.max_new_tokens for s in sampling] == [3, 3, None, None]
    assert [s.top_k for s in sampling] == [0, 0, 5, 5]


async def test_several_answers_to_one_text_are_a_list_too(client):
    assert len((await client.post("/generate", {"text": "a", "sampling_params": {"n": 3}})).json) == 3
    assert isinstance((await client.post("/generate", {"text": "a", "sampling_params": {"n": 1}})).json, dict)
    assert len((await client.post("/generate", {"text": ["a"]})).json) == 1


@pytest.mark.parametrize("is_delta", [False, True])
async def test_a_batch_in_a_stream_says_of_each_event_whose_it_is(client, is_delta):
    fields = {"stream": True, "incremental_streaming_output": is_delta}
    *events, done = (await client.post("/generate", {"text": ["a", "b"]} | fields)).events
    assert done == "[DONE]"
    for index in range(2):
        *deltas, last = [event for event in events if event["index"] == index]
        texts = [delta["text"] for delta in deltas]
        assert ("".join(texts) if is_delta else texts[-1]) == 'Let me think.Hello "you"\n世界'
        assert last["meta_info"]["finish_reason"]["type"] == "stop"
    *alone, _ = (await client.post("/generate", {"text": "a"} | fields)).events
    assert not any("index" in event for event in alone)


@pytest.mark.parametrize(
    ("path", "body"), [(TEXT, {"prompt": ["a", "b"]}), ("/generate", {"text": ["a", "b"]}), (CHAT, BODIES[CHAT])]
)
async def test_more_answers_than_can_be_in_flight_are_refused_and_not_put_off(path, body):
    async with client_of_fake_engine(max_requests=1) as client:
        answer = await client.post(path, body)
        assert answer.status == 400 and "server.max_requests" in answer.error["message"]


async def test_metrics_count_each_prompt_once(client):
    await client.post(TEXT, {"prompt": ["a", "b"], "n": 2})
    text = (await client.get("/metrics")).body.decode()
    assert 'glm53d_tokens_total{kind="prompt"} 10.0' in text
    assert 'glm53d_tokens_total{kind="cached"} 4.0' in text
