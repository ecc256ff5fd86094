"""The text half of a request: a job becomes ids and page hashes, in one job of the text pool. [R16] [R18] [R19]"""

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from glm53d._native import page_hashes
from glm53d.chat.conversation import Conversation
from glm53d.chat.jinja import Choice
from glm53d.chat.stable import without_lines
from glm53d.chat.template import refuse_media
from glm53d.errors import ContextTooLong, InvalidRequest
from glm53d.front.job import Job
from glm53d.front.sessions import Sessions
from glm53d.text.encode import ANY, Encoder

log = logging.getLogger(__name__)

TOLD_CHARS = 80  # of the text where a session's prompt leaves the earlier one


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the leader is sent of a prompt, and what main remembers of it."""

    ids: np.ndarray  # int32
    hashes: np.ndarray  # of each full page, [n, 2] uint64
    rendered_ns: int  # when the template was done, 0: there was none
    num_cut: int = 0  # tokens cut off its beginning


@dataclass(frozen=True, slots=True)
class TextHalf:
    """What turns a job into ids: made once at start, used by the text pool's threads."""

    encoder: Encoder
    choice: Choice  # of a template
    strip_lines: tuple[str, ...]
    page_size: int
    hash_key: bytes
    chain_seed: bytes  # 16 bytes, from what makes pages interchangeable [R19]
    sessions: Sessions = field(default_factory=Sessions)

    def prepare(self, job: Job, longest: int, may_truncate: bool) -> Prompt:
        """The prompt of a job, at most `longest` tokens.

        A raw one that is longer loses its beginning if may_truncate, unless it is several times as long; a chat never
        does. Raises InvalidRequest, and ContextTooLong before anything is hashed or taken up.
        """
        rendered_ns = num_cut = 0
        if job.ids is not None:
            ids = job.ids
        elif job.text is not None:
            ids = self.encoder.encode_text(job.text, longest)
        else:
            assert job.conversation is not None
            segments = self._segments(job.conversation)
            rendered_ns = time.monotonic_ns()
            ids = self.encoder.encode_segments(segments, longest)
        if len(ids) == 0:
            raise InvalidRequest("The prompt is empty.")
        if len(ids) > longest:
            if job.conversation is not None or not may_truncate:
                raise ContextTooLong(f"The prompt has {len(ids)} tokens; at most {longest} fit.")
            num_cut = len(ids) - longest
            ids = ids[num_cut:]
        seed = job.routing.chain_seed(self.chain_seed)
        prompt = Prompt(ids, page_hashes(ids, self.page_size, self.hash_key, seed), rendered_ns, num_cut)
        if job.conversation is not None and job.routing.session:
            self._follow_session(job, prompt)
        return prompt

    def encode(self, prompt: Conversation | str, longest: int = ANY) -> np.ndarray:
        """The ids that a request with this prompt has: of a chat, or of a raw text. longest: see encode_segments()."""
        if isinstance(prompt, str):
            return self.encoder.encode_text(prompt, longest)
        return self.encoder.encode_segments(self._segments(prompt), longest)

    def decode(self, ids: np.ndarray, skip_special: bool) -> str:
        """The text of ids."""
        return self.encoder.decode(ids, skip_special=skip_special)

    def describe(self) -> dict[str, object]:
        """What is used, and how well the cache of texts does; for /server_info."""
        return {
            "encoder": self.encoder.backend,
            "template": self.choice.kind,
            "literal_control_tokens": self.choice.literal,
            "cache": self.encoder.stats(),
        }

    def _follow_session(self, job: Job, prompt: Prompt) -> None:
        """Say so when a session's prompt does not go on where it ended: its cached pages are lost from there. [R44]"""
        left = self.sessions.follow(job.routing.session_hash, prompt.hashes)
        if left is None:
            return
        at = left.page * self.page_size
        text = self.encoder.decode(prompt.ids[at : at + self.page_size], skip_special=False)
        log.info(
            "a session's prompt changes behind token %d of %d, in the page that begins %r",
            at, left.num_pages * self.page_size, text[:TOLD_CHARS], extra={"rid": job.rid},
        )  # fmt: skip

    def _segments(self, conv: Conversation) -> list[str | int]:
        if self.choice.kind == "glm-5.3-flash":
            refuse_media(conv)
        conv = without_lines(conv, self.strip_lines)
        template = self.choice.template
        return self.encoder.split(template.render_text(conv)) if self.choice.literal else template.render(conv)
