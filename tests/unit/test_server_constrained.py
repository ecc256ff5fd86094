"""What each dialect says of the output's form, as the engine gets it: a grammar, stop ids, a bias. [R35]"""

import json

import pytest

from glm53d.config import Grammar, Template
from glm53d.front.job import SamplingParams
from tests.helpers.fake_engine import ADDED
from tests.helpers.forms import BOOL, INT, STR, closed
from tests.helpers.http import Client, client_of_fake_engine

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    NATIVE: {"text": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "hi"},
}
CHATS = (CHAT, MESSAGES, RESPONSES)
SCHEMA = closed("a", a=INT)
SAY, PING = closed("text", text=STR), closed(loud=BOOL)
NEVER_CALLS = ((ADDED["<tool_call>"], float("-inf")),)
CALL, CALL_END = f"<[{ADDED['<tool_call>']}]>", ADDED["</tool_call>"]


async def sampling_of(client: Client, path: str, **fields) -> SamplingParams:
    answer = await client.post(path, BODIES[path] | fields)
    assert answer.status == 200, answer.body
    return client.engine.jobs[-1].sampling


def response_format(path: str, kind: str) -> tuple[dict, str]:
    """The field by which a dialect asks for this kind of form, and the path that an error would name."""
    if path in (CHAT, TEXT):
        said = {"type": kind} | ({"json_schema": {"name": "x", "schema": SCHEMA}} if kind == "json_schema" else {})
        return {"response_format": said}, f"response_format{'.json_schema.schema' if kind == 'json_schema' else ''}"
    said = {"type": kind} | ({"schema": SCHEMA} if kind == "json_schema" else {})
    field, at = ("text", "text.format") if path == RESPONSES else ("output_config", "output_config.format")
    return {field: {"format": said}}, f"{at}{'.schema' if kind == 'json_schema' else ''}"


def tools(path: str, *, strict: bool = False, **schemas) -> dict:
    """The field of a dialect with these tools."""
    out = []
    for name, schema in schemas.items():
        named = {"name": name} | ({"strict": True} if strict else {})
        if path == CHAT:
            out.append({"type": "function", "function": named | {"parameters": schema}})
        elif path == RESPONSES:
            out.append({"type": "function", **named, "parameters": schema})
        else:
            out.append(named | {"input_schema": schema})
    return {"tools": out}


def choice(path: str, name: str | None = None) -> dict:
    """The field of a dialect that forces a call, of a tool of this name or of any."""
    if path == MESSAGES:
        return {"tool_choice": {"type": "any"} if name is None else {"type": "tool", "name": name}}
    if name is None:
        return {"tool_choice": "required"}
    return {"tool_choice": {"type": "function", **({"function": {"name": name}} if path == CHAT else {"name": name})}}


def one_call(path: str) -> dict:
    if path == MESSAGES:
        return {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    return {"parallel_tool_calls": False}


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
async def test_a_response_format_is_a_grammar_and_the_prompt_says_nothing_of_it(client, path):
    plain = await sampling_of(client, path)
    conversation = client.engine.jobs[-1].conversation
    assert plain.grammar is None
    for kind in ("json_schema", "json_object"):
        fields, param = response_format(path, kind)
        grammar = (await sampling_of(client, path, **fields)).grammar
        assert (grammar.param, grammar.after_thinking) == (param, path in CHATS)
        assert ('"properties":{"a":{"type":"integer"}}' in grammar.text) is (kind == "json_schema")
        assert client.engine.jobs[-1].conversation == conversation
    fields, _ = response_format(path, "text")
    assert (await sampling_of(client, path, **fields)).grammar is None


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, '"type":"integer"'),
        ({"json_schema": SCHEMA}, '"type":"integer"'),
        ({"regex": "[a-z]+"}, "/(?:[a-z]+)/"),
        ({"ebnf": 'root ::= "a"'}, '"a"'),
        ({"guided_json": SCHEMA}, '"type":"integer"'),
        ({"guided_regex": "b"}, "/(?:b)/"),
        ({"guided_choice": ["x", "y"]}, '"x" | "y"'),
        ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, '"type":"integer"'),
        ({"structured_outputs": {"json_object": True}}, '"type":"object"'),
        ({"structured_outputs": {"regex": "c", "disable_any_whitespace": False}}, "/(?:c)/"),
        ({"structured_outputs": {"choice": ["x"]}}, '"x"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    ],
    ids=str,
)
async def test_the_names_of_sglang_and_vllm_work_in_every_dialect(client, path, fields, says):
    ((name, value),) = fields.items()
    param = name if name != "structured_outputs" else f"{name}.{next(iter(value))}"
    if path == NATIVE:
        fields, param = {"sampling_params": fields}, f"sampling_params.{param}"
    grammar = (await sampling_of(client, path, **fields)).grammar
    assert (grammar.param, grammar.after_thinking) == (param, path in CHATS)
    assert says in grammar.text


@pytest.mark.parametrize("path", CHATS)
async def test_a_choice_that_forces_a_call_is_a_grammar_of_the_tools_that_may_be(client, path):
    """F-E15: after the thinking, which is free; and the prompt shows all tools, so its pages are found again."""
    offered = tools(path, say=SAY, ping=PING)
    sampling = await sampling_of(client, path, **offered)
    shown = client.engine.jobs[-1].conversation.tools
    assert (sampling.grammar, sampling.stop_ids, sampling.logit_bias) == (None, (), ())
    grammar = (await sampling_of(client, path, **offered, **choice(path))).grammar
    assert (grammar.param, grammar.after_thinking) == ("tool_choice", True)
    assert grammar.text.startswith(f"start: call+\ncall: {CALL} (tool_0 | tool_1) <[{CALL_END}]>\n")
    assert '"say"' in grammar.text and '"ping"' in grammar.text
    named = await sampling_of(client, path, **offered, **choice(path, "ping"))
    assert named.grammar.text.startswith("start: call\n")
    assert '"say"' not in named.grammar.text
    assert named.stop_ids == (CALL_END,)
    assert client.engine.jobs[-1].conversation.tools == shown


@pytest.mark.parametrize("path", CHATS)
async def test_a_strict_tool_is_a_grammar_of_turns_that_may_say_something(client, path):
    strict, free = tools(path, strict=True, say=SAY)["tools"], tools(path, ping=PING)["tools"]
    grammar = (await sampling_of(client, path, tools=strict + free)).grammar
    assert (grammar.param, grammar.after_thinking) == ("tools", True)
    assert grammar.text.startswith("start: PROSE (call PROSE)*\n")
    assert '"text"' in grammar.text and '"loud"' not in grammar.text


@pytest.mark.parametrize("path", CHATS)
async def test_where_the_server_is_set_so_all_tools_are_strict(path):
    async with client_of_fake_engine(grammar=Grammar(auto_calls=True)) as client:
        grammar = (await sampling_of(client, path, **tools(path, say=SAY))).grammar
        assert grammar.text.startswith("start: PROSE (call PROSE)*\n") and '"text"' in grammar.text


@pytest.mark.parametrize("path", BODIES)
async def test_forms_are_made_off_the_event_loop_and_requests_without_any_do_not_go_there(client, path):
    """F-G13: what looks through a hostile schema holds up nobody else."""
    await sampling_of(client, path)
    if path in CHATS:
        await sampling_of(client, path, **tools(path, say=SAY), **one_call(path))
    assert client.engine.num_text_jobs == 0
    await sampling_of(client, path, **({"sampling_params": {"regex": "a"}} if path == NATIVE else {"regex": "a"}))
    assert client.engine.num_text_jobs == 1
    if path in CHATS:
        await sampling_of(client, path, **tools(path, say=SAY), **choice(path))
        assert client.engine.num_text_jobs == 2


@pytest.mark.parametrize("path", CHATS)
async def test_one_call_at_most_costs_a_stop_id_and_no_grammar(client, path):
    sampling = await sampling_of(client, path, **tools(path, say=SAY), **one_call(path))
    assert (sampling.grammar, sampling.stop_ids) == (None, (CALL_END,))
    assert (await sampling_of(client, path, **one_call(path))).stop_ids == ()


@pytest.mark.parametrize("path", CHATS)
async def test_no_call_is_a_bias_and_no_grammar(client, path):
    """F-E8: the tag that begins one is never sampled."""
    none = {"type": "none"} if path == MESSAGES else "none"
    sampling = await sampling_of(client, path, **tools(path, strict=True, say=SAY), tool_choice=none)
    assert (sampling.grammar, sampling.stop_ids, sampling.logit_bias) == (None, (), NEVER_CALLS)
    assert client.engine.jobs[-1].conversation.tools is None
    assert (await sampling_of(client, path, tool_choice=none)).logit_bias == ()


async def test_the_older_names_of_tools_force_calls_too(client):
    fields = {"functions": [{"name": "say", "parameters": SAY}, {"name": "ping"}]}
    named = await sampling_of(client, CHAT, **fields, function_call={"name": "ping"})
    assert named.grammar.text.startswith("start: call\n") and '"say"' not in named.grammar.text
    assert (await sampling_of(client, CHAT, **fields, function_call="none")).logit_bias == NEVER_CALLS


@pytest.mark.parametrize("path", CHATS)
async def test_a_form_of_the_text_leaves_calls_possible(client, path):
    fields, param = response_format(path, "json_schema")
    grammar = (await sampling_of(client, path, **tools(path, say=SAY), **fields)).grammar
    assert "\nstart: content | call+\n" in grammar.text and grammar.param == param
    answer = await client.post(path, BODIES[path] | tools(path, say=SAY) | fields | choice(path))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "`tool_choice`" in answer.error["message"]


async def test_where_answers_are_not_parsed_a_form_holds_from_the_first_token_on():
    async with client_of_fake_engine(template=Template(path="x", parsers="none")) as client:
        fields, _ = response_format(CHAT, "json_object")
        assert (await sampling_of(client, CHAT, **fields)).grammar.after_thinking is False
        answer = await client.post(CHAT, BODIES[CHAT] | tools(CHAT, say=SAY) | choice(CHAT))
        assert (answer.status, answer.error["param"]) == (400, "tool_choice")


async def test_a_response_says_which_form_was_asked_for(client):
    fields, _ = response_format(RESPONSES, "json_schema")
    answer = await client.post(RESPONSES, BODIES[RESPONSES] | fields)
    assert answer.json["text"] == fields["text"]
    assert (await client.post(RESPONSES, BODIES[RESPONSES])).json["text"] == {"format": {"type": "text"}}
