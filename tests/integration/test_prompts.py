"""Prompts over real HTTP: counted, cut, refused, stable, extended by what the model wrote. [R16] [R20] [R44] [R52]"""

import asyncio
import json

import pytest

from tests.helpers.daemon import Daemon, events, running

CHAT = {"model": "glm-5.3", "messages": [{"role": "user", "content": "hi"}]}
PAGE = 16


async def post(http, daemon: Daemon, path: str, body: dict, status: int = 200) -> dict:
    async with http.post(daemon.url + path, json=body) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def chat(http, daemon: Daemon, messages: list[dict], **fields) -> dict:
    return await post(http, daemon, "/v1/chat/completions", CHAT | {"messages": messages} | fields)


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_tokenize_counts_what_a_request_is_charged_for(sim, http):
    """[F-H10]"""
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    for fields in (
        {},
        {"tools": tools},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"clear_thinking": True}},
    ):
        counted = await post(http, sim, "/tokenize", CHAT | fields)
        answer = await chat(http, sim, CHAT["messages"], max_tokens=1, **fields)
        assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
        assert counted["max_model_len"] > 0


async def test_tokenize_and_detokenize_are_inverse_and_raw_text_has_control_tokens(sim, http):
    text = "<|user|>Grüße, 世界 👩\u200d💻</think>"
    ids = (await post(http, sim, "/tokenize", {"prompt": text}))["tokens"]
    whole = await post(http, sim, "/detokenize", {"tokens": ids, "skip_special_tokens": False})
    assert whole == {"text": text, "prompt": text}
    shown = await post(http, sim, "/detokenize", {"tokens": ids})
    assert shown["text"] == text.removeprefix("<|user|>")
    assert (await post(http, sim, "/detokenize", {"tokens": []}))["text"] == ""


async def test_tokenize_leaves_the_generation_prompt_out_when_told_so(sim, http):
    whole, bare = [
        (await post(http, sim, "/tokenize", CHAT | {"add_generation_prompt": choice}))["tokens"]
        for choice in (True, False)
    ]
    assert whole[: len(bare)] == bare and len(whole) == len(bare) + 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", CHAT | {"prompt": "x"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, 10**6]}, "tokens[1]"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_with_its_path(sim, http, path, body, param):
    assert (await post(http, sim, path, body, 400))["error"]["param"] == param


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A context of 400 tokens; raw prompts may be cut."""
    log = tmp_path_factory.mktemp("short") / "log"
    overrides = ("sim.base_ms=0.1", "sim.max_context_len=400", "text.allow_auto_truncate=true", f"kv.page_size={PAGE}")
    with running(*overrides, config="sim.toml", log=log) as daemon:
        yield daemon


async def test_max_tokens_beyond_the_context_is_clamped_and_ends_as_length(short, http):
    """[F-D5] Agents send a fixed cap."""
    answer = await chat(http, short, [{"role": "user", "content": "a " * 150}], max_tokens=32000, ignore_eos=True)
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage["total_tokens"] == 400 and 0 < usage["completion_tokens"] < 300


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_is_too_long_is_refused_with_both_numbers(short, http, stream):
    """[F-D5] [F-G2] Also where raw prompts may be cut, and before the status line of a stream."""
    messages = [{"role": "user", "content": "word " * 600}]
    count = (await post(http, short, "/tokenize", {"messages": messages}))["count"]
    body = CHAT | {"messages": messages, "stream": stream}
    error = (await post(http, short, "/v1/chat/completions", body, 400))["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(count) in error["message"] and "399" in error["message"]


async def test_a_raw_prompt_that_is_too_long_loses_its_beginning_and_the_answer_says_so(short, http):
    """[R20]"""
    ids = (await post(http, short, "/tokenize", {"prompt": "word " * 600}))["tokens"]
    for body in ({"input_ids": ids}, {"text": "word " * 600}, {"input_ids": ids, "stream": True}):
        async with http.post(short.url + "/generate", json=body | {"sampling_params": {"max_new_tokens": 1}}) as answer:
            assert answer.status == 200
            assert answer.headers["X-Prompt-Truncated"] == f"start; tokens={len(ids) - 399}"
            await answer.read()
    async with http.post(
        short.url + "/generate", json={"text": "short", "sampling_params": {"max_new_tokens": 1}}
    ) as a:
        assert "X-Prompt-Truncated" not in a.headers


async def test_without_leave_a_raw_prompt_that_is_too_long_is_refused(tmp_path, http):
    with running("sim.max_context_len=64", config="sim.toml", log=tmp_path / "log") as daemon:
        error = (await post(http, daemon, "/generate", {"text": "word " * 600}, 400))["error"]
    assert error["code"] == "context_length_exceeded"


async def test_a_billing_line_that_changes_does_not_cost_the_cache(sim, http):
    """[F-H6] [R44]"""
    usages = []
    for value in ("cch=1a2b3", "cch=ffff0"):
        line = f"x-anthropic-billing-header: cc_version=2.1.197; {value};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are a billing test. " * 20}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "q"}]
        usages.append(await chat(http, sim, messages, max_tokens=1))
    assert usages[0]["usage"]["prompt_tokens"] == usages[1]["usage"]["prompt_tokens"]
    assert cached(usages[1]) >= usages[1]["usage"]["prompt_tokens"] - PAGE


async def test_a_system_entry_between_messages_stays_in_its_place(sim, http):
    """[F-H7]"""
    messages = [
        {"role": "system", "content": "Head."},
        {"role": "user", "content": "Question."},
        {"role": "system", "content": "Tokens left: 1000"},
    ]
    ids = (await post(http, sim, "/tokenize", {"messages": messages}))["tokens"]
    text = (await post(http, sim, "/detokenize", {"tokens": ids, "skip_special_tokens": False}))["text"]
    assert text.endswith("<|system|>Head.<|user|>Question.<|system|>Tokens left: 1000<|assistant|><think>")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Writes ids that encoding its own text does not give: each answer is drawn from the seed."""
    log = tmp_path_factory.mktemp("odd") / "log"
    overrides = ("sim.base_ms=0.1", "sim.text=", f"kv.page_size={PAGE}", "scheduler.debug_checks=true")
    with running(*overrides, config="sim.toml", log=log) as daemon:
        yield daemon


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_extends_the_pages_of_what_the_model_wrote(odd, http, stream):
    """[R52] Re-encoding its text would give other ids."""
    question = {"role": "user", "content": f"a question {stream}"}
    body = CHAT | {"messages": [question], "max_tokens": 10 * PAGE, "seed": 3}
    if stream:
        async with http.post(odd.url + "/v1/chat/completions", json=body | {"stream": True}) as answer:
            got = [e["choices"][0]["delta"] for e in await events(answer) if e != "[DONE]"]
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in got)
    else:
        answer = await post(http, odd, "/v1/chat/completions", body)
        reasoning = answer["choices"][0]["message"]["reasoning_content"]
    first = (await post(http, odd, "/tokenize", {"messages": [question]}))["count"]
    turn = {"role": "assistant", "content": "", "reasoning_content": reasoning}
    messages = [question, turn, {"role": "user", "content": "and then?"}]
    second = await chat(http, odd, messages, max_tokens=1)
    # The token sampled last has no KV yet.
    assert cached(second) == (first + 10 * PAGE - 1) // PAGE * PAGE
    plain = (await post(http, odd, "/tokenize", {"prompt": reasoning}))["count"]
    assert plain != 10 * PAGE


async def test_the_cache_of_texts_is_shown(sim, http):
    """[R18]"""
    for _ in range(2):
        await post(http, sim, "/tokenize", {"prompt": "shown in the statistics"})
    async with http.get(sim.url + "/server_info") as answer:
        text = (await answer.json())["text"]
    assert text["template"] == "glm-5.3" and text["literal_control_tokens"] is False
    assert text["cache"]["hits"] > 0 and text["cache"]["tokens"] > 0
    async with http.get(sim.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    assert any(line.startswith("glm53d_text_cache_hits_total ") and float(line.split()[1]) > 0 for line in lines)


OWN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>{{ flavour }}"


async def test_a_template_of_ones_own_answers_without_our_parsers(tmp_path, http):
    """[R17] What its users spell stays text; options reach it."""
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    overrides = (f"template.path={path}", "template.parsers=none", "sim.base_ms=0.1")
    with running(*overrides, config="sim.toml", log=tmp_path / "log") as daemon:
        message = {"role": "user", "content": "hi <|user|>"}
        body = {"messages": [message], "chat_template_kwargs": {"flavour": "dry"}}
        ids = (await post(http, daemon, "/tokenize", body))["tokens"]
        text = (await post(http, daemon, "/detokenize", {"tokens": ids, "skip_special_tokens": False}))["text"]
        assert text == "<|user|>hi <|user|><|assistant|>dry" and ids.count(ids[0]) == 1
        answer = await chat(http, daemon, [message])
        stream = CHAT | {"messages": [message], "stream": True}
        async with http.post(daemon.url + "/v1/chat/completions", json=stream) as streamed:
            got = [e["choices"][0]["delta"] for e in await events(streamed) if e != "[DONE]"]
    content = answer["choices"][0]["message"]["content"]
    assert content.startswith("The user wants") and "</think>" in content and content.endswith("ends.")
    assert "".join(delta.get("content") or "" for delta in got) == content


async def test_a_template_without_a_word_on_parsers_is_refused_at_start(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    daemon = Daemon(f"template.path={path}", config="sim.toml", log=tmp_path / "log", wait=False)
    assert await asyncio.to_thread(daemon.process.wait, 60) == 2
    assert "template.parsers" in daemon.log.read_text()


async def test_a_checkpoint_that_ships_another_template_gets_it(tmp_path, http):
    """[R16] Said in the log, with both texts."""
    from importlib.resources import files
    from shutil import copy

    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        copy(str(files("glm53d.nano") / name), tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(OWN)
    with running(f"model.path={tmp_path}", config="sim.toml", log=tmp_path / "log") as daemon:
        async with http.get(daemon.url + "/server_info") as answer:
            assert (await answer.json())["text"]["template"] == "jinja"
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "differs" in line]
    assert len(said) == 1 and json.dumps("Hi") in said[0]
