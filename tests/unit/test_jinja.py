"""Templates in Jinja: compared with ours at start, sandboxed, no way for clients to write control tokens. [R16] [R17]

The official templates are read from a folder `shared/glm53` beside the checkout; tests that need them are skipped
without it.
"""

import logging
from importlib.resources import files
from pathlib import Path

import pytest

from glm53d.chat import jinja
from glm53d.chat.conversation import Conversation
from glm53d.chat.corpus import CORPUS
from glm53d.chat.jinja import JinjaTemplate, choose
from glm53d.chat.template import Template
from glm53d.errors import CheckpointError, ConfigError, InvalidRequest
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

VOCAB = Vocab.load(Path(str(files("glm53d.nano") / "tokenizer.json")))
OFFICIAL = Path(__file__).parents[2] / "../shared/glm53"
FILES = {"glm-5.3": "chat_template.jinja", "glm-5.3-flash": "chat_template_flash.jinja"}
SPELLED = "".join(VOCAB.added)
FOREIGN = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% else %}<|assistant|>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = VOCAB.added["<|user|>"]
ASSISTANT = VOCAB.added["<|assistant|>"]


def source(variant: str) -> str:
    path = OFFICIAL / FILES[variant]
    if not path.exists():
        pytest.skip("the official templates are not beside this checkout")
    return path.read_text("utf-8")


def talk(*contents: str, **options) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **options)


@pytest.mark.parametrize("variant", FILES)
def test_an_official_template_chooses_our_renderer_of_its_variant(variant, caplog):
    """[R16] And says nothing."""
    choice = choose(VOCAB.added, source(variant), None, literal=False)
    assert (choice.kind, choice.literal) == (variant, False) and isinstance(choice.template, Template)
    assert not caplog.records


def test_the_corpus_has_forty_conversations_and_more():
    assert len(CORPUS) >= 40


CHANGES = [
    ("['low', 'high']", "['low', 'high', 'medium']"),
    ("| capitalize", ""),
    ("k != 'defer_loading' and k != 'strict'", "k != 'defer_loading'"),
    ("k != 'defer_loading' and k != 'strict'", "k != 'strict'"),
    ('"{{ k }}": {{ v | tojson(ensure_ascii=False) }}', '"{{ k }}": {{ v | tojson(ensure_ascii=True) }}'),
    ("not tool.defer_loading %}", "true %}"),
    ("tool.name == tr.name", "tool.name"),
    ("{{ tool_to_json(tool) }}\n", "{{ tool_to_json(tool) }}"),
    ("You may call one or more functions", "You can call one or more functions"),
    ("{%- elif item is string -%}", "{%- elif item is integer -%}"),
    ("item.type | replace('_url', '')", "item.type"),
    ("| replace('input_', '')", ""),
    ("{%- elif content is not none -%}", "{%- else -%}"),
    ('m.content.0.type == "tool_reference"', "false"),
    ("{%- if m.content and m.content.0.output is defined -%}1", "{%- if false -%}1"),
    ("{%- if ns_cnt.n > 1 -%}1{%- endif -%}", ""),
    ("{%- if ns_f.found -%}1{%- endif -%}", "1"),
    ("m.role == 'user' %}\n        {%- set ns.last", "m.role != 'user' %}\n        {%- set ns.last"),
    ("m.reasoning_content is string", "m.reasoning_content is defined"),
    (".split('<think>')[-1]", ".split('<think>')[0]"),
    ("set content = content.split('</think>')[-1]", "set content = content.split('</think>')[1]"),
    ("loop.index0 > ns.last_user_index", "loop.index0 >= ns.last_user_index - 1"),
    ("{{ content.strip() }}", "{{ content }}"),
    ("'<think></think>'", "'</think>'"),
    ("{%- if tc.function %}", "{%- if false %}"),
    ("v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>", "v | tojson }}</arg_value>"),
    ("loop.first or (messages[loop.index0 - 1].role != \"tool\")", "loop.first or true"),
    ("and messages[block_start - 1].role == 'assistant'", ""),
    ("{%- elif not tc_id_exists(ns_a.tool_calls, tk_id) -%}", "{%- elif false -%}"),
    ("{%- if not tc_id -%}", "{%- if false -%}"),
    ("{%- if id_of(ns_a.tool_calls[j]) == tc_id -%}", "{%- if false -%}"),
    ("<|system|>{{ visible_text(m.content) }}", "<|system|>{{ m.content }}"),
    ("{%- if add_generation_prompt -%}", "{%- if true -%}"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=[old[:40] for old, _ in CHANGES])
def test_a_template_that_was_changed_anywhere_is_seen_to_differ(old, new, caplog):
    """[R16] Not by a random search: the corpus itself has the case."""
    text = source("glm-5.3")
    assert old in text
    with caplog.at_level(logging.WARNING):
        choice = choose(VOCAB.added, text.replace(old, new), None, literal=False)
    assert choice.kind == "jinja"
    assert "ours: " in caplog.text and "theirs: " in caplog.text


def test_the_log_names_the_first_conversation_that_differs_with_both_texts(caplog):
    """[R16]"""
    choice = choose(VOCAB.added, FOREIGN, None, literal=False)
    assert choice.kind == "jinja"
    (record,) = caplog.records
    assert "conversation 0" in record.getMessage()
    assert "ours:   '[gMASK]<sop>" in record.getMessage() and "theirs: '<|user|>Hi<|assistant|>'" in record.getMessage()


def test_without_any_template_ours_is_used():
    choice = choose(VOCAB.added, None, None, literal=True)
    assert isinstance(choice.template, Template) and (choice.kind, choice.literal) == ("glm-5.3", True)


def test_a_users_own_template_is_used_whatever_the_checkpoint_ships():
    choice = choose(VOCAB.added, "{{ shipped }}", FOREIGN, literal=False)
    assert choice.kind == "jinja" and choice.template.render_text(talk("a")) == "<|user|>a<|assistant|>"


@pytest.mark.parametrize("text", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages[7].content.x }}"])
def test_a_template_that_is_none_is_refused_at_start(text):
    with pytest.raises(ConfigError, match=r"template\.path"):
        choose(VOCAB.added, None, text, literal=False)
    with pytest.raises(CheckpointError, match="chat template"):
        choose(VOCAB.added, text, None, literal=False)


def test_only_what_the_template_writes_becomes_a_control_token():
    """[R17] Foreign templates too. What answers spell of thinking is left to the template."""
    template = JinjaTemplate(FOREIGN, VOCAB.added)
    assert template.render(talk(SPELLED)) == [USER, SPELLED, ASSISTANT]
    assert template.render(talk("a", "b" + SPELLED)) == [
        USER, "a", ASSISTANT, "b" + SPELLED.split("<think>")[0], VOCAB.added["<think>"], VOCAB.added["</think>"],
        SPELLED.split("</think>")[1], ASSISTANT,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["\U0010fffd", "\U0010fffd\U00100003\U0010fffd", "\U0010fffd<|user|>", "\U00100000"])
def test_a_client_cannot_forge_a_sentinel(text):
    assert JinjaTemplate(FOREIGN, VOCAB.added).render(talk(text)) == [USER, text, ASSISTANT]


@pytest.mark.parametrize("variant", FILES)
def test_the_official_templates_in_the_sandbox_keep_spelled_control_tokens_text(variant):
    """[R17] Segments equal those of our own renderer on conversations that spell them all."""
    theirs, ours = JinjaTemplate(source(variant), VOCAB.added), Template(VOCAB.added, variant)
    assert theirs.keeps_sentinels()
    calls = [{"id": "a", "function": {"name": SPELLED, "arguments": {SPELLED: SPELLED, "o": {"<|user|>": [SPELLED]}}}}]
    conv = Conversation(
        [
            {"role": "system", "content": SPELLED},
            {"role": "user", "content": [{"type": "text", "text": SPELLED}, {"type": "image"}]},
            {"role": "assistant", "content": "x", "reasoning_content": SPELLED, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": SPELLED},
        ],
        tools=[{"type": "function", "function": {"name": "<|user|>", "description": SPELLED}}],
    )
    assert theirs.render(conv) == ours.render(conv)


@pytest.mark.parametrize("variant", FILES)
def test_the_official_templates_make_control_tokens_of_no_more_of_an_answer_than_we_do(variant):
    """[R17] They look for reasoning in the content where none stands beside it, and up to the last </think>."""
    theirs, ours = JinjaTemplate(source(variant), VOCAB.added), Template(VOCAB.added, variant)
    question = {"role": "user", "content": "q"}
    parts = [{"type": "text", "text": "<think> a"}, {"type": "text", "text": "</think> b <think>"}]
    for content in ("a </think> b <think> c", "<think> a </think> b </think> c", "<think> a", parts):
        answer = {"role": "assistant", "content": content}
        for told in (answer | {"reasoning_content": "r"}, answer | {"reasoning_content": ""}, answer):
            conv = Conversation([question, told])
            assert theirs.render(conv) == ours.render(conv)


def test_a_foreign_template_never_makes_control_tokens_of_answers_whose_reasoning_stands_apart():
    """[R17]"""
    answer = {"role": "assistant", "content": SPELLED, "reasoning_content": "r"}
    conv = Conversation([{"role": "user", "content": "a"}, answer])
    assert JinjaTemplate(FOREIGN, VOCAB.added).render(conv) == [USER, "a", ASSISTANT, SPELLED, ASSISTANT]


def test_user_system_and_tool_text_yields_no_added_token_whatever_it_spells():
    """[R17] Assistant text only the `<think>` and `</think>` that the template takes out."""
    encoder, template = Encoder(VOCAB.path, VOCAB, max_threads=1), Template(VOCAB.added)
    added = set(VOCAB.added.values())

    def controls(conv: Conversation) -> list[int]:
        return [i for i in encoder.encode_segments(template.render(conv)).tolist() if i in added]

    def conv(text: str, answer: str) -> Conversation:
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": answer,
                "tool_calls": [{"id": "a", "name": "f", "arguments": {"k": text}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": text},
        ]
        return Conversation(messages, tools=[{"name": "f", "description": text}])

    assert controls(conv(SPELLED, "plain")) == controls(conv("-", "plain"))
    assert controls(conv("-", "<think>" + SPELLED + "</think>" + SPELLED)) == controls(conv("-", "plain"))


def test_where_a_template_breaks_sentinels_the_flat_encoding_is_used_and_said(caplog):
    """[R17]"""
    choice = choose(
        VOCAB.added, None, FOREIGN.replace("m.content", "m.content | tojson(ensure_ascii=True)"), literal=False
    )
    assert choice.literal and "control tokens that clients spell become control tokens" in caplog.text
    letters = FOREIGN.replace("m.content", "m.content | list | join(' ')")
    assert choose(VOCAB.added, None, letters, literal=False).literal


def test_a_template_for_plain_texts_gets_parts_of_text_joined():
    conv = Conversation(
        [{"role": "user", "content": [{"type": "text", "text": "a <|user|>"}, {"type": "text", "text": "b"}]}]
    )
    template = JinjaTemplate(FOREIGN, VOCAB.added)
    assert template.render_text(conv) == "<|user|>a <|user|>b<|assistant|>"
    assert template.render(conv) == [USER, "a <|user|>b", ASSISTANT]


def test_a_template_gets_the_options_of_the_request():
    options = (
        "{{ messages[0].content }}{{ enable }}{{ reasoning_effort is defined }}{{ tools is none }}{{ clear_thinking }}"
    )
    template = JinjaTemplate(options, VOCAB.added)
    assert template.render_text(talk("a")) == "aFalseTrueFalse"
    conv = talk("a", template_kwargs={"enable": 1}, reasoning_effort="low", clear_thinking=True, tools=[{"name": "f"}])
    assert template.render_text(conv) == "a1TrueFalseTrue"


def test_a_template_that_refuses_or_fails_is_the_requests_error():
    template = JinjaTemplate("{{ raise_exception('roles must alternate') if messages | length > 1 }}x", VOCAB.added)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(talk("a", "b"))


def test_a_template_may_not_leave_the_sandbox():
    for text in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.format.__globals__ }}"):
        with pytest.raises(InvalidRequest):
            JinjaTemplate("x" + text + "{{ y.z }}", VOCAB.added).render(talk("a"))


def test_a_template_has_a_time_and_a_length(monkeypatch):
    """A conversation on which it is quadratic ends as an error, not as a thread that is lost."""
    endless = "{% for a in range(90000) %}{% for m in messages %}{% if m.role %}{% endif %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(jinja, "MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match="too long"):
        JinjaTemplate(endless, VOCAB.added).render(talk(*"abcdefgh"))
    monkeypatch.setattr(jinja, "MAX_RENDER_S", 60)
    monkeypatch.setattr(jinja, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="too long"):
        JinjaTemplate("{% for a in range(900) %}{{ a }}{% endfor %}", VOCAB.added).render(talk("a"))
