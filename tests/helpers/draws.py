"""Outputs drawn at random from what a grammar allows, with weight on short tokens and on those that end something.

What a model says under a grammar is one of these, whatever model it is.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm53d.chat.constraint import Grammar
from glm53d.chat.events import Piece
from glm53d.grammar.compiler import Compiler
from glm53d.text.vocab import Vocab

NANO = Path(__file__).parents[2] / "glm53d" / "nano"
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")


@dataclass(frozen=True)
class Draw:
    """One output."""

    ids: list[int]
    has_ended: bool  # by itself; else it was cut off


class Drawer:
    """Draws over the nano model's vocabulary."""

    def __init__(self):
        self.vocab = Vocab.load(NANO / "tokenizer.json")
        added = self.vocab.added
        self.ends = sorted(added[spelling] for spelling in ENDS)
        self.compiler = Compiler(self.vocab.token_bytes, self.vocab.num_base, self.ends)
        self._byte_ids = [self.vocab.token_bytes.index(bytes([byte])) for byte in range(256)]
        self._added = {id_: spelling for spelling, id_ in added.items()}
        self._weights = np.array([2.0 ** -len(token) for token in self.vocab.token_bytes[: self.vocab.num_base]])
        self._weights[[token[:1] in (b'"', b"}", b"]") for token in self.vocab.token_bytes[: self.vocab.num_base]]] *= 8
        self._weights = np.append(self._weights, np.ones(self.vocab.size - self.vocab.num_base))
        self._weights[[i for i, spelling in self._added.items() if spelling.startswith("</")]] = 8
        self._weights[self.ends] = 8

    def draw(self, grammar: Grammar, rng: np.random.Generator, max_tokens: int = 400) -> Draw:
        """An output that the grammar allows, token by token."""
        matcher = self.compiler.compile(grammar.text).matcher(0)
        ids: list[int] = []
        while len(ids) < max_tokens:
            allowed = self.allowed(matcher.machine)
            assert len(allowed), f"nothing is legal behind {self.text(ids)!r}: {matcher.machine.get_error()}"
            weights = self._weights[allowed]
            id_ = int(rng.choice(allowed, p=weights / weights.sum()))
            if id_ in self.ends:
                return Draw(ids, True)
            assert matcher.machine.consume_token(id_), matcher.machine.get_error()
            ids.append(id_)
        return Draw(ids, False)

    def matcher(self, grammar: Grammar, *said: str | int):
        """The machine of a grammar behind what was said: texts, byte by byte, and ids. None: not all of it is legal."""
        machine = self.compiler.compile(grammar.text).matcher(0).machine
        for part in said:
            for id_ in [part] if isinstance(part, int) else map(self._byte_ids.__getitem__, part.encode()):
                if id_ not in self.allowed(machine):
                    return None
                machine.consume_token(id_)
        return machine

    def accepts(self, grammar: Grammar, *said: str | int) -> bool:
        """Whether what was said is a whole output."""
        machine = self.matcher(grammar, *said)
        return machine is not None and set(self.ends) <= set(self.allowed(machine))

    def allowed(self, machine) -> np.ndarray:
        """The ids that may come next."""
        mask = np.frombuffer(machine.compute_bitmask(), np.uint8)
        return np.unpackbits(mask, bitorder="little", count=self.vocab.size).nonzero()[0]

    def text(self, ids: list[int]) -> str:
        """All of an output as text; it is valid UTF-8."""
        return b"".join(self.vocab.token_bytes[i] for i in ids).decode()

    def pieces(self, ids: list[int]) -> list[Piece]:
        """An output as a parser gets it."""
        pieces: list[Piece] = []
        run: list[int] = []
        for i in ids:
            if i in self._added:
                pieces += [self.text(run), i]
                run = []
            else:
                run.append(i)
        return [*pieces, self.text(run)]


def json_of(text: str):
    """The value of a JSON text, which has to be strict JSON."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
