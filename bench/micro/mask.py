"""Masks of grammars: µs per row and step, and what compiling takes, beside xgrammar in one run.

    python -m bench.micro.mask [--tokenizer tokenizer.json] [--rows 1,16,64] [--threads 2]

Both engines follow the same answers token by token: take a token, compute which ids are legal behind it. A row's time
is that of the whole step over its rows, as the leader runs it. Wall time: several threads take part.

xgrammar is measured if it is there; glm53d does not need it: pip install xgrammar.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLExecutor

from bench.corpus import NANO_TOKENIZER
from bench.measure import Row, make_parser, report, timed_row
from glm53d.grammar.compiler import Compiler
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

ENDS = ("<|user|>", "<|observation|>", "<|endoftext|>")
CITY = {"type": "object", "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["name", "people"], "additionalProperties": False}  # fmt: skip
EDIT = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer", "minimum": 1},
                                         "how": {"enum": ["insert", "replace", "delete"]}, "text": {"type": "string"}},
        "required": ["path", "line", "how", "text"], "additionalProperties": False}  # fmt: skip
TREE = {"$defs": {"node": {"type": "object", "properties": {
            "value": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["value", "children"], "additionalProperties": False}}, "$ref": "#/$defs/node"}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "list of records": ({"type": "array", "items": CITY}, [{"name": f"City {i}", "people": i} for i in range(8)]),
    "edit of a file": (EDIT, {"path": "main.py", "line": 12, "how": "replace", "text": "def f():\n    pass\n" * 8}),
    "recursion": (TREE, {"value": "a", "children": [{"value": i / 4, "children": []} for i in range(10)]}),
    "any object": ({"type": "object"}, {"a": [1, 2.5, None], "b": {"c": "text with words", "d": [True, False]}}),
}  # fmt: skip


class Xgrammar:
    """The other engine, over the same vocabulary."""

    def __init__(self, vocab: Vocab, ends: list[int], threads: int):
        import xgrammar

        self._library, self._threads = xgrammar, threads
        info = xgrammar.TokenizerInfo(vocab.token_bytes, vocab_size=vocab.size, stop_token_ids=ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        self._vocab_size = vocab.size

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(schema, strict_mode=False)

    def follow(self, compiled: Any, ids: list[int], rows: int) -> None:
        matchers = [self._library.GrammarMatcher(compiled) for _ in range(rows)]
        bitmask = self._library.allocate_token_bitmask(rows, self._vocab_size)
        batch = self._library.BatchGrammarMatcher(max_threads=self._threads)
        for id_ in ids:
            for matcher in matchers:
                if not matcher.accept_token(id_):
                    raise SystemExit("xgrammar refuses an answer that we take")
            if rows == 1:
                matchers[0].fill_next_token_bitmask(bitmask)
            else:
                batch.batch_fill_next_token_bitmask(matchers, bitmask)


class Ours:
    """As rank 0 does it: one job for all rows of a grammar."""

    def __init__(self, vocab: Vocab, ends: list[int], threads: int):
        self._compiler = Compiler(vocab.token_bytes, vocab.num_base, ends)
        self._executor = LLExecutor(threads)

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile(f"start: %json {json.dumps(schema)}")

    def follow(self, compiled: Any, ids: list[int], rows: int) -> None:
        matchers = [compiled.matcher(row) for row in range(rows)]
        for id_ in ids:
            for matcher in matchers:
                matcher.tokens.append(id_)
            compiled.advance(matchers, self._executor)
        if error := next((matcher.error for matcher in matchers if matcher.error), ""):
            raise SystemExit(f"llguidance refuses an answer: {error}")


def measure(options: argparse.Namespace) -> list[Row]:
    """Compile times, then masks, each beside the other engine's where that is installed."""
    vocab = Vocab.load(options.tokenizer)
    encoder = Encoder(options.tokenizer, vocab, 1)
    ends = [vocab.added[spelling] for spelling in ENDS]
    ours = Ours(vocab, ends, options.threads)
    theirs = Xgrammar(vocab, ends, options.threads) if importlib.util.find_spec("xgrammar") else None

    def row(what: str, call: Callable[[Ours | Xgrammar], Callable[[], object]], per: int = 1) -> Row:
        against = ("xgrammar", call(theirs)) if theirs is not None else None
        return timed_row(what, call(ours), rounds=options.rounds, per=per, against=against, clock=time.perf_counter_ns)

    found = [row(f"compile, {name}", compiling(schema)) for name, (schema, _) in FORMS.items()]
    for name, (schema, answer) in FORMS.items():
        ids = encoder.encode_text(json.dumps(answer, separators=(",", ":"))).tolist()
        for rows in options.rows:
            found.append(row(f"mask, {name}, {rows} rows", following(schema, ids, rows), per=rows * len(ids)))
    return found


def compiling(schema: dict[str, Any]) -> Callable[[Ours | Xgrammar], Callable[[], object]]:
    return lambda engine: lambda: engine.compile(schema)


def following(schema: dict[str, Any], ids: list[int], rows: int) -> Callable[[Ours | Xgrammar], Callable[[], object]]:
    def call(engine: Ours | Xgrammar) -> Callable[[], object]:
        compiled = engine.compile(schema)
        return lambda: engine.follow(compiled, ids, rows)

    return call


def main() -> None:
    parser = make_parser(__doc__, rounds=True)
    parser.add_argument("--tokenizer", type=Path, default=NANO_TOKENIZER, help="a byte-level BPE tokenizer.json")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=2, help="of either engine")
    options = parser.parse_args()
    report(f"masks over {options.tokenizer.parent.name}'s vocabulary", measure(options), options.json)


if __name__ == "__main__":
    main()
