"""Template against the official Jinja templates on random conversations, well-formed and not. [R16]

Needs the official files in a folder `shared/glm53` beside the checkout; skipped without them.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d.chat.conversation import Conversation
from glm53d.chat.template import CONTROL, MEDIA_CONTROL, Template
from glm53d.errors import InvalidRequest

OFFICIAL = Path(__file__).parents[2] / "../shared/glm53"
FILES = {"glm-5.3": "chat_template.jinja", "glm-5.3-flash": "chat_template_flash.jinja"}
IDS = {spelling: i for i, spelling in enumerate((CONTROL + " " + MEDIA_CONTROL).split())}


def official(variant):
    jinja2 = pytest.importorskip("jinja2")
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = OFFICIAL / FILES[variant]
    if not path.exists():
        pytest.skip("the official templates are not beside this checkout")
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    return env.from_string(path.read_text("utf-8")), (jinja2.TemplateError, TypeError)


TEXTS = st.sampled_from(["", "a", " b\n", "<think>x</think> y", "</think>", "<think>", "<|user|>", "é\u3000"])
SCALARS = TEXTS | st.sampled_from([None, True, False, 0, 5, 1.5, {}, {"a": 1}, [], ["z"]])
IDENTS = st.sampled_from(["1", "2", "3", 1, 2, "", None])
NAMES = st.sampled_from(["alpha", "beta"])
MEDIA = st.sampled_from(["image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio", "file", None])


def dicts(required, optional):
    return st.fixed_dictionaries(required, optional=optional)


REFERENCE = dicts({"type": st.just("tool_reference")}, {"name": NAMES | SCALARS, "output": SCALARS})
PARTS = st.one_of(
    SCALARS, dicts({"type": st.just("text")}, {"text": TEXTS | SCALARS}), dicts({"type": MEDIA}, {}), REFERENCE
)
OUTPUTS = dicts({"output": SCALARS | st.lists(PARTS, max_size=3)}, {"id": IDENTS})
CONTENTS = st.one_of(TEXTS, SCALARS, st.lists(PARTS | OUTPUTS, max_size=4), st.lists(OUTPUTS, max_size=4))
ARGUMENTS = st.dictionaries(TEXTS, SCALARS, max_size=3)
FUNCTION = dicts({"name": NAMES, "arguments": ARGUMENTS}, {})
ODD_FUNCTION = dicts({}, {"name": SCALARS, "arguments": SCALARS | ARGUMENTS})
CALLS = st.lists(
    st.one_of(
        *[dicts({"function": FUNCTION}, {"id": IDENTS})] * 6,
        dicts({"function": ODD_FUNCTION}, {"id": IDENTS, "tool_call_id": IDENTS}),
        FUNCTION,
        SCALARS,
    ),
    max_size=4,
)
TOOL = dicts({}, {"name": NAMES, "strict": SCALARS, "defer_loading": SCALARS, 'we"ird': SCALARS, "items": SCALARS})
TOOLS = st.lists(st.one_of(*[dicts({"function": TOOL}, {"type": st.just("function")})] * 6, TOOL, SCALARS), max_size=4)
MESSAGES = st.lists(
    st.one_of(
        dicts({"role": st.sampled_from(["user", "system", "developer"])}, {"content": CONTENTS}),
        dicts(
            {"role": st.just("assistant")},
            {"content": CONTENTS, "reasoning_content": TEXTS | SCALARS, "tool_calls": CALLS},
        ),
        dicts({"role": st.just("tool")}, {"content": CONTENTS, "tool_call_id": IDENTS, "id": IDENTS}),
        dicts({}, {"content": CONTENTS}),
    ),
    max_size=7,
)
VARIABLES = dicts(
    {"messages": MESSAGES},
    {
        "tools": TOOLS | SCALARS,
        "reasoning_effort": st.sampled_from(["low", "high", "max", ["low"], None]),
        "clear_thinking": SCALARS,
        "add_generation_prompt": st.booleans(),
    },
)


@pytest.mark.parametrize("variant", FILES)
def test_any_conversation_is_rendered_or_refused_as_by_the_official_template(variant):
    jinja, failures = official(variant)
    template = Template(IDS, variant)

    @settings(max_examples=400, deadline=None)
    @given(VARIABLES)
    def check(variables):
        try:
            expected = jinja.render(**json.loads(json.dumps(variables)))
        except failures:
            expected = None
        conv = Conversation(
            variables["messages"],
            variables.get("tools"),
            variables.get("reasoning_effort"),
            variables.get("clear_thinking", False),
            variables.get("add_generation_prompt", False),
        )
        try:
            rendered = template.render_text(conv)
        except InvalidRequest:
            rendered = None
        assert rendered == expected

    check()
