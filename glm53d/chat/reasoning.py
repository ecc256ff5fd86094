"""Reasoning: a turn's thinking apart from its answer, for dialects whose every event passes through Python. [R41]

For the others the native out state does the same before its frames are built; the rules are one:

    turn = reasoning [ "</think>" answer ]

The prompt has opened the thinking already, so a <think> in it says nothing and is dropped. A <tool_call> token ends it
as well, when the request has tools [F-E7]. White space is kept as it is: it comes back in the next prompt, and a change
would cost the cached pages from there on.
"""

from collections.abc import Iterable, Mapping

from glm53d.chat.events import Event, Piece, Reasoning
from glm53d.chat.tools import ToolParser


class ReasoningParser:
    """Makes events of a whole turn's pieces: the thinking here, the rest through the parser of the answer."""

    def __init__(self, added: Mapping[str, int], answer: ToolParser):
        """added: the id of each added token by its spelling. answer: gets every piece behind the thinking."""
        self._spelling = {id_: spelling for spelling, id_ in added.items()}
        self._answer = answer
        self._in_reasoning = True

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of the next pieces, cut anywhere."""
        thoughts: list[str] = []
        rest: list[Piece] = []
        for piece in pieces:
            if not self._in_reasoning:
                rest.append(piece)
            elif isinstance(piece, str):
                thoughts.append(piece)
            else:
                match self._spelling[piece]:
                    case "</think>":
                        self._in_reasoning = False
                    case "<tool_call>" if self._answer.parses_calls:
                        self._in_reasoning = False
                        rest.append(piece)
                    case spelling if spelling != "<think>":
                        thoughts.append(spelling)
        events: list[Event] = [Reasoning("".join(thoughts))] if thoughts else []
        return events + self._answer.feed(rest)

    def finish(self) -> list[Event]:
        """The events that only the end of the turn decides."""
        return self._answer.finish()
