"""A stream of /generate as SGLang's clients read it: each event has all that was said so far. [R41]

To repeat everything for every token would cost the square of an answer. So it is repeated when it has grown by a fixed
part of itself: those before the last are together at most MAX_REPEATS times as long as it, and up to so many tokens
there can be one for each.
"""

import msgspec

from glm53d.chat.conversation import Json
from glm53d.front.job import Frame

MAX_REPEATS = 256

FRAME = Frame(b'{"text":"', b"}\n")
"""What add_frames() reads; the engine puts `","output_ids":[...]` between the text and the end."""


class _Delta(msgspec.Struct):
    text: str
    output_ids: list[int]


_DELTAS = msgspec.json.Decoder(_Delta)


class SoFar:
    """What was said so far of one answer."""

    def __init__(self) -> None:
        self._num_prompt_ids = 0
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Json]] = {}
        self._num_told = 0

    def begin(self, num_prompt_ids: int) -> bytes:
        """No event: none is sent before something was said."""
        self._num_prompt_ids = num_prompt_ids
        return b""

    def add_frames(self, frames: bytes) -> None:
        """More of it, as the engine frames it."""
        for delta in _DELTAS.decode_lines(frames):
            self.add(delta.text, delta.output_ids, {})

    def add(self, text: str, ids: list[int], logprobs: dict[str, list[Json]]) -> None:
        """More of it; logprobs: as Native gives them."""
        self._texts.append(text)
        self._ids += ids
        for name, values in logprobs.items():
            self._logprobs.setdefault(name, []).extend(values)

    @property
    def is_due(self) -> bool:
        """Whether enough was said since it was told the last time."""
        num_new = len(self._ids) - self._num_told
        return num_new > 0 and num_new * MAX_REPEATS >= len(self._ids)

    def told(self, rid: str) -> dict[str, Json]:
        """An event in the middle. What is known at the end alone is null; the prompt's logprobs wait for it too."""
        self._num_told = len(self._ids)
        meta: dict[str, Json] = {
            "id": rid,
            "finish_reason": None,
            "prompt_tokens": self._num_prompt_ids,
            "completion_tokens": len(self._ids),
            "cached_tokens": None,
        }
        return self._event(meta | {name: of for name, of in self._logprobs.items() if name.startswith("output")})

    def whole(self, meta: dict[str, Json]) -> dict[str, Json]:
        """The last event."""
        return self._event(meta | self._logprobs)

    def _event(self, meta: dict[str, Json]) -> dict[str, Json]:
        self._texts = ["".join(self._texts)]
        return {"text": self._texts[0], "output_ids": self._ids, "meta_info": meta}
