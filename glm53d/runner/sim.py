"""The simulated engine: no model; a step takes the time a formula says, and tokens come from a script. [R43]

Everything else is real: rings, scheduler, throttle, HTTP. So it measures the CPU half at full speed, and plans layouts
one does not have. Logprobs are of a made-up distribution: the id at position p has -(1 + p % 8) / 8 and is the
likeliest; each id behind it in number has 1 less than the one before.
"""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from glm53d.config import Config
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch, Logprobs, StepResult
from glm53d.ipc.records import LOGPROB, ROW_FEED, ROW_SAMPLE, MoveKind
from glm53d.runner.base import Loaded, Progress, host_pages
from glm53d.runner.page_files import FileMoves, PageFiles

FILE_BYTES = 16  # of the files that stand for pages


class SimRunner:
    """A Runner whose tokens are known before: script[position in the answer], or drawn from (seed, position).

    Args:
        attn_dp_rank: rows of other ranks are not ours.
        num_base_ids: ids below it are ordinary text; unscripted answers use only these.
        tokenizer: tokenizer.json, for the script.
        eos_ids: where the script has one before min_new_tokens, its first token is said instead.
    """

    def __init__(
        self,
        config: Config,
        attn_dp_rank: int,
        max_slots: int,
        num_base_ids: int,
        tokenizer: Path,
        eos_ids: Sequence[int] = (),
        attn_tp_rank: int = 0,
    ):
        self._sim = config.sim
        self._num_drafts = config.speculation.num_draft_tokens
        self._page_size = config.kv.page_size
        self._dp_rank = attn_dp_rank
        self._owns_rows = attn_tp_rank == 0  # of a group, one answers, and writes files
        self._num_base_ids = num_base_ids
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._script = np.empty(0, np.int32)  # sim.text, behind it sim.after_tools
        self._spans = np.zeros((2, 2), np.int64)  # of each, where it begins and how long it is
        self._roles: list[int] = []  # what begins a user's message, and a tool's
        self._after_tools = np.zeros(max_slots, np.int64)  # 1: the last of them in its prompt was a tool's
        self._ends = np.empty(0, bool)  # where the script ends a turn
        self._seed = np.zeros(max_slots, np.uint64)
        self._prompt_len = np.zeros(max_slots, np.int64)
        self._min_position = np.zeros(max_slots, np.int64)  # where an end of turn may stand at the earliest
        self._weights: np.ndarray | None = None  # of each id where a grammar narrows the choice; None: none has yet
        self._cache = config.cache
        self._page_bytes = config.sim.kv_bytes_per_token * config.kv.page_size
        self._files: FileMoves | None = None
        self._launched: deque[tuple[StepResult, int]] = deque()  # in order; end_ns is when each will be over; wait_us
        self._end_ns = 0  # of the last one

    def load(self, progress: Progress) -> Loaded:
        """Reads the script."""
        progress("script", 50)
        if self._sim.text or self._sim.after_tools:
            tokenizer = Tokenizer.from_file(str(self._tokenizer))
            texts = (self._sim.text, self._sim.after_tools or self._sim.text)
            first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
            if not first or not second:
                raise StartError("sim.text or sim.after_tools gives no token")
            self._script = np.array(first + second, np.int32)
            self._spans[:] = (0, len(first)), (len(first), len(second))
            self._roles = [tokenizer.token_to_id(tag) or -1 for tag in ("<|user|>", "<|observation|>")]
            self._ends = np.isin(self._script, self._eos_ids)
        num_host_pages = host_pages(self._cache.host_bytes, self._page_bytes)
        if self._cache.storage_path:  # files are real, but for what is in them
            files = PageFiles(Path(self._cache.storage_path), FILE_BYTES)
            self._files = FileMoves(files, np.zeros((num_host_pages, FILE_BYTES), np.uint8))
        return Loaded(
            self._sim.num_pages, self._page_size, self._sim.max_context_len, self._sim.kv_bytes_per_token, 0,
            num_host_pages, FILE_BYTES,
        )  # fmt: skip

    def launch(self, batch: Batch) -> None:
        """Note when the step will be over, and what it samples. It begins when the one before is over."""
        start = max(time.monotonic_ns(), self._end_ns)
        if len(batch.inits):
            slot = batch.inits["slot"]
            self._seed[slot] = batch.inits["seed"]
            self._prompt_len[slot] = batch.inits["num_prompt_ids"]
            self._min_position[slot] = self._prompt_len[slot] + batch.inits["min_new_tokens"]
            self._after_tools[slot] = 0
        if self._sim.after_tools:
            self._note_roles(batch)
        fed = (batch.row_flags & ROW_FEED) != 0
        mine = batch.row_dp_rank == self._dp_rank
        sampled = mine & ((batch.row_flags & ROW_SAMPLE) != 0) & self._owns_rows
        num_decoding = int(np.count_nonzero(mine & fed))
        prefill_tokens = int(batch.dp_num_tokens[self._dp_rank]) - num_decoding * (1 + self._num_drafts)
        us = self._sim.base_ms * 1e3 if batch.num_rows else 0.0
        us += self._sim.per_prefill_token_us * prefill_tokens
        us += self._sim.per_decode_row_us * num_decoding
        if len(batch.moves):
            us = self._move(batch.moves, us)
        first = (batch.row_prefix_len + np.where(fed, 1, batch.row_extend_len)).astype(np.int64)  # sample's position
        counts = sampled.astype(np.int32)
        if self._num_drafts:
            guessed = sampled & fed
            guessed[batch.mask_row] = False
            counts[guessed] += self._num_accepted(batch.row_slot[guessed], first[guessed])
        ids = np.full((batch.num_rows, 1 + self._num_drafts), -1, np.int32)
        rows, behind = np.nonzero(np.arange(1 + self._num_drafts) < counts[:, None])
        ids[rows, behind] = self._next_ids(batch.row_slot[rows], first[rows] + behind)
        if len(batch.mask_row) and (narrowed := sampled[batch.mask_row]).any():
            rows = batch.mask_row[narrowed]
            ids[rows, 0] = self._legal_ids(batch.masks[narrowed], self._random(batch.row_slot[rows], first[rows]))
        self._end_ns = start + int(us * 1e3)
        logprobs = self._logprobs(batch, counts, ids, first) if len(batch.top_logprobs) else None
        self._launched.append((StepResult(batch.step, counts, ids, start, self._end_ns, logprobs), batch.wait_us))

    def _move(self, moves: np.ndarray, us: float) -> float:
        """How long the step takes with what it moves: pages are saved before it, and brought beside it."""
        mine = moves[moves["dp_rank"] == self._dp_rank]
        count = np.bincount(mine["kind"], minlength=len(MoveKind) + 1) * self._page_bytes * 1e6
        brought = count[MoveKind.LOAD] / self._cache.host_bytes_per_s
        if count[MoveKind.PEER]:
            brought += count[MoveKind.PEER] / self._cache.peer_bytes_per_s
        if self._files is not None:
            is_file = mine["kind"] >= MoveKind.STORE if self._owns_rows else mine["kind"] == MoveKind.FETCH
            self._files.submit(mine[is_file], lambda: None)
        return float(count[MoveKind.SAVE] / self._cache.host_bytes_per_s + max(us, brought))

    def _num_accepted(self, slot: np.ndarray, first: np.ndarray) -> np.ndarray:
        """How many drafts of each row are right, up to the first that is not: of its seed and positions. [n]."""
        of_draft = self._random(slot[:, None], ~(first[:, None] + np.arange(self._num_drafts)))
        is_right = of_draft.astype(np.float64) / 2.0**64 < self._sim.draft_acceptance
        return np.cumprod(is_right, axis=1).sum(axis=1, dtype=np.int32)

    def _logprobs(self, batch: Batch, counts: np.ndarray, ids: np.ndarray, first: np.ndarray) -> Logprobs | None:
        """Of our rows that ask: prompt tokens that are targets, then what was sampled. None: there are none yet."""
        row_of = np.repeat(np.arange(batch.num_rows), batch.row_extend_len)
        ends = np.cumsum(batch.row_extend_len)
        position_of = np.arange(batch.num_tokens) + (batch.row_prefix_len + batch.row_extend_len - ends)[row_of]
        wanted = np.flatnonzero((batch.targets >= 0) & self._owns_rows)
        wanted = wanted[batch.row_dp_rank[row_of[wanted]] == self._dp_rank]
        said, at = np.nonzero((np.arange(ids.shape[1]) < counts[:, None]) & (batch.top_logprobs >= 0)[:, None])
        if not (len(wanted) or len(said)):
            return None
        rows, token = np.concatenate([row_of[wanted], said]), np.concatenate([batch.targets[wanted], ids[said, at]])
        position = np.concatenate([position_of[wanted] + 1, first[said] + at])
        behind = np.maximum(np.arange(-1, batch.top_logprobs.max()), 0)  # of the token itself, and of those beside it
        pairs = np.empty((len(rows), len(behind)), LOGPROB)
        pairs["id"] = np.where(behind, (token[:, None] + behind) % self._num_base_ids, token[:, None])
        pairs["logprob"] = -(1 + position[:, None] % 8) / 8 - behind
        pairs["id"][np.arange(len(behind)) > batch.top_logprobs[rows, None]] = -1
        order = np.argsort(rows, kind="stable")
        return Logprobs(rows[order].astype(np.int32), pairs[order])

    def _note_roles(self, batch: Batch) -> None:
        """Whose message a prompt ends with, as far as steps see it: what is cached is in none."""
        at = np.flatnonzero(np.isin(batch.input_ids, self._roles))
        rows = np.searchsorted(np.cumsum(batch.row_extend_len), at, side="right")
        self._after_tools[batch.row_slot[rows]] = batch.input_ids[at] == self._roles[1]  # of several the last counts

    def _next_ids(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        if len(self._script):
            start, length = self._spans[self._after_tools[slot]].T
            at = start + (position - self._prompt_len[slot]) % length
            return self._script[np.where(self._ends[at] & (position < self._min_position[slot]), start, at)]
        return (self._random(slot, position) % np.uint64(self._num_base_ids)).astype(np.int32)

    def _random(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Of each row's seed and position, uint64: splitmix64's finaliser."""
        mixed = (self._seed[slot] + position.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))

    def _legal_ids(self, masks: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Where a grammar holds, the script says nothing: one of the legal ids is drawn, rather a short or closing one.

        So whatever has an end comes to it soon. masks: [n, words], see Batch. random: [n] uint64.
        """
        if self._weights is None:
            self._weights = _weights(Tokenizer.from_file(str(self._tokenizer)), self._eos_ids)
        legal = np.unpackbits(masks.copy().view(np.uint8), axis=1, bitorder="little")[:, : len(self._weights)]
        sums = np.cumsum(legal * self._weights, axis=1)
        drawn = sums[:, -1] * (random.astype(np.float64) / 2.0**64)
        return np.array([np.searchsorted(row, x, side="right") for row, x in zip(sums, drawn, strict=True)], np.int32)

    def collect(self) -> StepResult:
        """Sleep until the oldest step is over."""
        result, wait_us = self._launched.popleft()
        if self._files is not None:
            result.done, result.failed = self._files.ended(wait_us)
        if (left := result.end_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return result

    def close(self) -> None:
        """Stop the threads that move files."""
        if self._files is not None:
            self._files.close()


def _weights(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> np.ndarray:
    """How likely each id is where it is legal: ends first, then what closes a string, a list or an object."""
    vocab = tokenizer.get_vocab()
    weights = np.zeros(1 + max(vocab.values()))
    for token, id_ in vocab.items():
        if id_ in eos_ids or (token.startswith("</") and token.endswith(">")):
            weights[id_] = 1000.0
        elif token in ('"', "}", "]"):
            weights[id_] = 30.0
        elif not token.strip("ĠĊĉč"):  # white space, as byte-level files spell it
            weights[id_] = 1e-3
        else:
            weights[id_] = 4.0 ** (1 - min(len(token), 9))  # a character is a byte there
    return weights
