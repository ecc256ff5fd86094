"""Stop strings over real HTTP, against the scripted engine. [R38] [R40]"""

import openai
import pytest

from tests.helpers.daemon import events

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def post(http, sim, path: str, body: dict) -> dict:
    async with http.post(sim.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(http, sim, path: str, body: dict) -> list:
    async with http.post(sim.url + path, json=body | STREAM) as answer:
        assert answer.status == 200, await answer.text()
        *got, done = await events(answer)
    assert done == "[DONE]"
    return got


def joined(chunks: list, key: str) -> str:
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks if c["choices"])


async def test_a_chat_ends_at_a_stop_string_of_its_content_streamed_or_not(sim, http):
    """The thinking says "answer" too, and is whole."""
    whole = (await post(http, sim, CHAT, {"messages": MESSAGES}))["choices"][0]["message"]
    assert "answer" in whole["reasoning_content"] and whole["content"].startswith("Hello! This answer")
    body = {"messages": MESSAGES, "stop": ["never said", "answer"]}
    plain, got = await post(http, sim, CHAT, body), await stream(http, sim, CHAT, body)
    choice = plain["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "answer")
    assert choice["message"] == whole | {"content": "Hello! This "}
    assert joined(got, "content") == "Hello! This " and joined(got, "reasoning_content") == whole["reasoning_content"]
    assert (got[-2]["choices"][0]["finish_reason"], got[-2]["choices"][0]["matched_stop"]) == ("stop", "answer")
    assert got[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    details = plain["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < plain["usage"]["completion_tokens"]  # [F-D4]


@pytest.mark.parametrize(
    ("fields", "end"),
    [({}, ""), ({"no_stop_trim": True}, "answer"), ({"include_stop_str_in_output": True}, "answer")],
)
async def test_a_raw_completion_ends_at_the_first_stop_string_of_all_its_text(sim, http, fields, end):
    whole = (await post(http, sim, TEXT, {"prompt": "Once"}))["choices"][0]["text"]
    body = {"prompt": "Once", "stop": "answer"} | fields
    choice = (await post(http, sim, TEXT, body))["choices"][0]
    assert choice["text"] == whole[: whole.index("answer")] + end and choice["matched_stop"] == "answer"
    got = await stream(http, sim, TEXT, body)
    assert "".join(c["choices"][0]["text"] for c in got if c["choices"]) == choice["text"]


async def test_generate_gives_the_ids_up_to_the_one_that_completes_the_string(sim, http):
    params = {"stop": ["测试", "这是"], "temperature": 0}
    whole = await post(http, sim, NATIVE, {"text": "x", "sampling_params": {"temperature": 0}})
    plain = await post(http, sim, NATIVE, {"text": "x", "sampling_params": params})
    assert plain["text"] == whole["text"][: whole["text"].index("这是")]
    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": "这是"}
    ids = plain["output_ids"]
    assert ids == whole["output_ids"][: len(ids)] and len(ids) == plain["meta_info"]["completion_tokens"]
    body = {"text": "x", "sampling_params": params, "incremental_streaming_output": True}
    *deltas, last = await stream(http, sim, NATIVE, body)
    assert [i for d in deltas for i in d["output_ids"]] == ids and "".join(d["text"] for d in deltas) == plain["text"]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "这是"}


async def test_stop_strings_that_nearly_match_change_nothing(sim, http):
    """[F-D1] [F-D2] what was held comes, the last of it at the end."""

    async def content(**fields) -> str:
        return joined(await stream(http, sim, CHAT, {"messages": MESSAGES} | fields), "content")

    whole = await content()
    assert await content(stop=["Hello?", "script endS", "🚀🚀", "ends.\nUser:"]) == whole


async def test_the_openai_sdk_passes_stop_strings(sim):
    client = openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="none")
    answer = await client.chat.completions.create(model="glm-5.3", messages=MESSAGES, stop=["no model"])
    assert answer.choices[0].message.content == "Hello! This answer is a script: "
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].matched_stop == "no model"
