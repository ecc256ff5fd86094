"""Pieces of a turn to events: the tool parser, a token a step, against looking at the whole text again at each token.

    python -m bench.micro.parse

CPU µs per token. A token is a tag or four characters. "Of so many lines" is a call that writes a file: its cost per
token must not grow with what has come. "To its chunk" adds what a chat makes of the events. The alternative joins the
text so far and runs a regular expression over it, as parsers on text do; measured only where that ends.
"""

import json
import re
from collections.abc import Callable

from bench.corpus import Corpus
from bench.measure import Row, make_parser, report, timed_row
from glm53d.chat.events import Piece, ToolCallArguments
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.server.common import Offered
from glm53d.server.openai_common import Chunks
from glm53d.server.openai_tools import Tools

TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>")
ADDED = {tag: i for i, tag in enumerate(TAGS)}
CHARS_PER_TOKEN, CHARS_PER_LINE = 4, 40
AIM_US = 3.0  # per token: 64 streams of 100 tokens a second then take 2 % of a core
PROPERTIES = {"code": {"type": "string"}, "n": {"type": "integer"}, "flags": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"properties": PROPERTIES}}}]
SPLIT = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")
CALL = re.compile(r"<tool_call>([^<]*)(.*?)(</tool_call>|$)", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(</arg_value>|$)", re.DOTALL)


def call(**arguments: str) -> str:
    """A call of the one tool."""
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>write{''.join(pairs)}</tool_call>"


def tokens_of(turn: str) -> list[list[Piece]]:
    """The turn by steps of one token."""
    steps: list[list[Piece]] = []
    for part in SPLIT.split(turn):
        if part in ADDED:
            steps.append([ADDED[part]])
        else:
            steps += [[part[i : i + CHARS_PER_TOKEN]] for i in range(0, len(part), CHARS_PER_TOKEN)]
    return steps


def parsed(steps: list[list[Piece]]) -> list[str]:
    """The arguments of each call, as a stream has them."""
    parser, arguments = ToolParser(ADDED, functions_of(TOOLS)), []
    for step in steps:
        for event in parser.feed(step):
            if isinstance(event, ToolCallArguments):
                arguments.append(event.text)
    return arguments


def chunked(steps: list[list[Piece]]) -> int:
    """Bytes of a chat's chunks."""
    tools = Tools(Offered(TOOLS, functions_of(TOOLS), None), is_legacy=False)
    parser = tools.offered.parser(ADDED, has_parsers=True)
    chunks = Chunks("chatcmpl-0123456789abcdef", "chat.completion.chunk", 1, "m", with_usage=False, index=0)
    return sum(len(chunks.delta(delta)) for step in steps for delta in tools.deltas(parser.feed(step)))


def looked_at_again(steps: list[list[Piece]]) -> list[dict[str, str]]:
    """The calls as they are at the end, found anew at every token."""
    text, calls = "", []
    for step in steps:
        text += "".join(piece if isinstance(piece, str) else TAGS[piece] for piece in step)
        calls = [{key: value for key, value, _ in PAIR.findall(body)} for _, body, _ in CALL.findall(text)]
    return calls


def measure(rounds: int) -> list[Row]:
    """A short file against the alternative, a long one, many short calls, and with the chunks."""
    corpus = Corpus()
    clean = SPLIT.sub("", corpus.take(10_000 * CHARS_PER_LINE))
    short = tokens_of(call(code=clean[: 100 * CHARS_PER_LINE]))
    long, many = tokens_of(call(code=clean)), tokens_of(call(n="12", flags="[1, 2]", other="x") * 50)
    if json.loads("".join(parsed(short))) != looked_at_again(short)[0]:
        raise SystemExit("the two find different arguments")
    # name, what is timed, tokens, alternative, aim
    cases: list[tuple[str, Callable[[], object], int, Callable[[], object] | None, float | None]] = [
        ("a token of 100 lines", lambda: parsed(short), len(short), lambda: looked_at_again(short), AIM_US),
        ("a token of 10,000 lines", lambda: parsed(long), len(long), None, AIM_US),
        ("a token of short typed arguments", lambda: parsed(many), len(many), None, None),
        ("a token of 100 lines, to its chunk", lambda: chunked(short), len(short), None, None),
    ]
    return [
        timed_row(
            what, ours, rounds=rounds, per=per, aim=aim,
            against=None if theirs is None else ("re and the text so far", theirs),
        )
        for what, ours, per, theirs, aim in cases
    ]  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    report("tool parser", measure(args.rounds), args.json)


if __name__ == "__main__":
    main()
