"""The endpoints over real HTTP, against the simulated engine: shapes, order, counts, errors. [R14] [R15] [R42]"""

import asyncio

import openai
import pytest

from tests.helpers.daemon import events, idle_info

REASONING = "The user wants to see a stream."
CHAT = {"model": "glm-5.3", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_plain_chat_answer_has_reasoning_content_and_exact_usage(sim, http):
    async with http.post(sim.url + "/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
        body = await answer.json()
    choice, usage = body["choices"][0], body["usage"]
    assert choice["finish_reason"] == "stop" and body["object"] == "chat.completion"
    assert choice["message"]["reasoning_content"].startswith(REASONING)
    assert (
        choice["message"]["content"].startswith("Hello! This answer is a script")
        and "👩‍💻" in choice["message"]["content"]
    )
    assert choice["message"]["content"].endswith("ends.")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


async def test_a_streamed_answer_joins_to_the_plain_one_in_the_documented_order(sim, http):
    async with http.post(sim.url + "/v1/chat/completions", json=CHAT) as answer:
        plain = (await answer.json())["choices"][0]["message"]
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post(sim.url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200 and answer.headers["X-Accel-Buffering"] == "no"
        got = await events(answer)
    assert got[-1] == "[DONE]" and got[-2]["choices"] == [] and got[-2]["usage"]["completion_tokens"] > 0
    assert got[-3]["choices"][0]["finish_reason"] == "stop"
    assert got[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(event["usage"] is None for event in got[:-2])  # [F-D6]
    deltas = [event["choices"][0]["delta"] for event in got[:-2]]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == plain["reasoning_content"]
    assert "".join(d.get("content") or "" for d in deltas) == plain["content"]


async def test_each_token_of_a_stream_has_its_own_frame_when_steps_are_slow_enough(sim, http):
    """[R37] stream_interval 1."""
    async with http.post(sim.url + "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 20}) as answer:
        got = await events(answer)
    assert 15 <= len([e for e in got[:-1] if e["choices"][0]["delta"].get("reasoning_content")]) <= 20
    assert got[-2]["choices"][0]["finish_reason"] == "length"


async def test_the_openai_sdk_streams_and_does_not_stream(sim):
    client = openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="none")
    plain = await client.chat.completions.create(**CHAT)
    stream = await client.chat.completions.create(**CHAT, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == plain.choices[0].message.content
    completion = await client.completions.create(model="glm-5.3", prompt="Once", max_tokens=12)
    assert completion.choices[0].text and completion.usage.completion_tokens == 12
    assert (await client.models.list()).data[0].id == "glm-5.3-nano"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-x", messages=CHAT["messages"])


async def test_generate_takes_text_or_ids_and_gives_ids_back(sim, http):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
    async with http.post(sim.url + "/generate", json=body) as answer:
        plain = await answer.json()
    assert len(plain["output_ids"]) == 9 and plain["meta_info"]["prompt_tokens"] == 3
    async with http.post(sim.url + "/generate", json=body | {"stream": True}) as answer:
        *parts, last, _ = await events(answer)
    assert (last["text"], last["output_ids"]) == (plain["text"], plain["output_ids"])
    assert last["meta_info"]["completion_tokens"] == 9
    for part in parts:
        assert plain["text"].startswith(part["text"]) and part["meta_info"]["prompt_tokens"] == 3
        assert part["output_ids"] == plain["output_ids"][: part["meta_info"]["completion_tokens"]]
    async with http.post(
        sim.url + "/generate", json=body | {"stream": True, "incremental_streaming_output": True}
    ) as answer:
        *deltas, last, _ = await events(answer)
    assert [i for delta in deltas for i in delta["output_ids"]] == plain["output_ids"]
    assert "".join(delta["text"] for delta in deltas) == plain["text"]
    assert last["meta_info"]["completion_tokens"] == 9


async def test_a_second_turn_reuses_the_pages_of_the_first(sim, http):
    """[R27] whole pages of an equal prefix are cached."""
    body = CHAT | {"messages": [{"role": "user", "content": "a rather long question " * 20}], "max_tokens": 3}
    usages = []
    for _ in range(2):
        async with http.post(sim.url + "/v1/chat/completions", json=body) as answer:
            usages.append((await answer.json())["usage"])
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0 and usages[1]["prompt_tokens"] - 16 <= cached + 16 and cached > 0


async def test_a_seed_gives_the_same_answer_and_none_gives_others(nano, http):
    """[R51]"""

    async def text(**fields) -> str:
        body = {"prompt": "What nobody has said.", "temperature": 2, "max_tokens": 32, "ignore_eos": True} | fields
        async with http.post(nano.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]["text"]

    seeded = await asyncio.gather(*(text(seed=7) for _ in range(4)))
    assert len(set(seeded)) == 1
    assert len({await text() for _ in range(3)}) > 1


async def test_greedy_answers_are_the_same_at_once_and_one_at_a_time(nano, http):
    async def text(prompt: str) -> str:
        body = {"model": "glm-5.3", "prompt": prompt, "temperature": 0, "max_tokens": 24}
        async with http.post(nano.url + "/v1/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["text"]

    prompts = ["one", "two two", "three three three", "你好"]
    alone = [await text(p) for p in prompts]
    assert await asyncio.gather(*(text(p) for p in prompts)) == alone


async def test_health_ready_live_and_the_round_trip(sim, http):
    """[R4]"""
    for path in ("/health", "/ready", "/live", "/health_generate"):
        async with http.get(sim.url + path) as answer:
            assert answer.status == 200, path
    async with http.post(sim.url + "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 200}) as answer:
        await answer.content.readline()
        async with http.get(sim.url + "/health_generate") as probe:  # answered from the running step
            assert probe.status == 200


async def test_the_model_list_says_what_the_nano_model_is(nano, http):
    async with http.get(nano.url + "/v1/models") as answer:
        model = (await answer.json())["data"][0]
    assert model["owned_by"] == "glm53d" and model["max_model_len"] > 0 and "3 million" in str(model)


async def test_each_rank_reports_its_place_its_pool_and_how_long_its_start_took(nano, http):
    """[R3]"""
    async with http.get(nano.url + "/server_info") as answer:
        [rank] = (await answer.json())["ranks"]
    assert (rank["state"], rank["attn_dp_rank"], rank["num_pages"]) == ("running", 0, 256) and rank["pid"] > 0
    assert rank["weight_bytes"] > 0 and rank["kv_bytes_per_token"] > 0 and rank["max_req_input_len"] == 256 * 16 - 1
    assert 0 < rank["init_ns"] < 300e9 and 0 < rank["load_ns"] < 300e9


async def test_metrics_count_requests_and_tokens(sim, http):
    async with http.post(sim.url + "/v1/chat/completions", json=CHAT | {"max_tokens": 4}) as answer:
        assert answer.status == 200
    async with http.get(sim.url + "/metrics") as answer:
        text = await answer.text()
    assert "glm53d" in text and 'endpoint="/v1/chat/completions"' in text


async def test_aborting_by_rid_ends_the_stream_at_once(sim, http):
    """[R22]"""
    body = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 100_000}
    async with http.post(
        sim.url + "/v1/chat/completions", json=body, headers={"X-Request-Id": "to-be-stopped"}
    ) as answer:
        await answer.content.readline()
        async with http.post(sim.url + "/abort_request", json={"rid": "to-be-stopped"}) as stopped:
            assert stopped.status == 200
        assert (await asyncio.wait_for(events(answer), 10))[-1] == "[DONE]"
    info = await idle_info(http, sim.url)
    assert info["requests_in_flight"] == 0 and info["loads"][0]["num_running"] == 0


async def test_two_requests_with_one_rid_are_both_served(sim, http):
    """[F-G15]"""

    async def one() -> int:
        async with http.post(
            sim.url + "/generate", json={"text": "x", "rid": "same", "sampling_params": {"max_new_tokens": 30}}
        ) as a:
            return (await a.json())["meta_info"]["completion_tokens"]

    assert await asyncio.gather(one(), one()) == [30, 30]


async def test_no_answer_ends_by_itself_before_its_min_tokens(sim, nano, http):
    """On the script, whose end comes after 216 tokens, and in the sampler."""
    body = CHAT | {"max_tokens": 300, "min_tokens": 250}
    async with http.post(sim.url + "/v1/chat/completions", json=body) as answer:
        assert (await answer.json())["usage"]["completion_tokens"] >= 250
    prompts = [{"input_ids": [i], "sampling_params": {"min_new_tokens": 8, "max_new_tokens": 8}} for i in range(30)]
    for body in prompts:
        async with http.post(nano.url + "/generate", json=body) as answer:
            ids = (await answer.json())["output_ids"]
            assert len(ids) == 8 and not set(ids) & {2000, 2007, 2009}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"thinking_budget": 9}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 9}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}),
    ],
)
async def test_a_thinking_budget_ends_the_thinking_and_the_answer_says_so(sim, http, path, fields):
    """[R46] The script thinks for longer; what it would still have thought is content then."""
    async with http.post(sim.url + path, json=CHAT | {"max_tokens": 40} | fields) as answer:
        assert answer.status == 200, await answer.text()
        body = await answer.json()
    details = body["usage"].get("completion_tokens_details") or body["usage"]["output_tokens_details"]
    assert details.get("reasoning_tokens", details.get("thinking_tokens")) == 9
    assert body.get("choices", [body])[0]["thinking_forced"] is True


async def test_thinking_within_its_budget_is_not_forced(sim, http):
    async def thought(fields: dict[str, int]) -> int:
        async with http.post(sim.url + "/v1/chat/completions", json=CHAT | fields) as answer:
            body = await answer.json()
        assert "thinking_forced" not in body["choices"][0]
        return body["usage"]["completion_tokens_details"]["reasoning_tokens"]

    assert 9 < await thought({"thinking_budget": 500}) == await thought({}) < 500
