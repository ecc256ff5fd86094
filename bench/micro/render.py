"""A conversation to the model's prompt: glm53d's renderer against Jinja with the checkpoint's own template.

    python -m bench.micro.render [--template chat_template.jinja]

CPU µs per prompt: one turn of about 1K tokens with three tools, and 100 turns of about 87K tokens. Without --template
only ours is measured. Both texts are compared before the clock starts.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.corpus import NANO_TOKENIZER, Corpus
from bench.measure import Row, make_parser, report, timed_row
from glm53d.chat.conversation import Conversation, Json
from glm53d.chat.template import Template
from glm53d.text.vocab import Vocab

CHARS_PER_TOKEN = 4
AIMS_US = (20.0, 100.0)


def tool(name: str, description: str, **parameters: str) -> dict[str, Json]:
    """A function of string parameters."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("read_file", "Read a text file of the workspace.", path="Its absolute path", lines="A range, as 10-20"),
    tool("run_command", "Run a shell command and return what it prints.", command="The command line", cwd="Where"),
    tool("search", "Find lines that match an expression.", pattern="A regular expression", files="Names, with globs"),
]


def conversations() -> list[tuple[str, Conversation]]:
    """One turn with tools; 100 turns without."""
    corpus = Corpus()
    short = [{"role": "user", "content": corpus.take(1_000 * CHARS_PER_TOKEN)}]
    chars = 87_000 * CHARS_PER_TOKEN // 199
    roles = ["user", "assistant"] * 99 + ["user"]
    long = [{"role": role, "content": corpus.take(chars)} for role in roles]
    return [("1K tokens, 3 tools", Conversation(short, TOOLS)), ("87K tokens, 100 turns", Conversation(long))]


def jinja_renderer(path: Path) -> Callable[[Conversation], str]:
    """The template as other engines run it: sandboxed, with a tojson that escapes nothing."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return lambda conv: template.render(messages=conv.messages, tools=conv.tools, add_generation_prompt=True)


def measure(path: Path | None, rounds: int) -> list[Row]:
    """One row per conversation."""
    ours = Template(Vocab.load(NANO_TOKENIZER).added)
    theirs = jinja_renderer(path) if path else None
    rows = []
    for (name, conv), aim in zip(conversations(), AIMS_US, strict=True):
        against = None
        if theirs is not None:
            if ours.render_text(conv) != theirs(conv):
                raise SystemExit(f"the renderers disagree on {name}")
            against = ("jinja2", partial(theirs, conv))
        rows.append(timed_row(f"render {name}", partial(ours.render, conv), rounds=rounds, against=against, aim=aim))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--template", type=Path, help="the checkpoint's chat_template.jinja")
    args = parser.parse_args()
    report("render", measure(args.template, args.rounds), args.json)


if __name__ == "__main__":
    main()
