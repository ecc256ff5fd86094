"""Limits: what a scheduler plans within, and what follows from it."""

from dataclasses import dataclass
from typing import NamedTuple

from glm53d.sched import policy
from glm53d.sched.tables import MAX_BIASES
from glm53d.sched.tiers import NO_TIERS, TierLimits


class TokenIds(NamedTuple):
    """What a rank knows of the tokenizer."""

    size: int  # ids that it has
    eos: tuple[int, ...]
    think_end: int  # the id that ends reasoning
    call_begin: int  # the id that begins a tool call
    calls_ends: tuple[int, ...]  # ids that end a turn with tool calls


@dataclass(frozen=True, slots=True)
class Limits:
    """What was found at start: the ranks' pools and the model's context."""

    attn_dp_size: int
    num_pages: int  # per attention-DP rank
    page_size: int
    max_context_len: int
    max_running: int
    max_step_tokens: int  # per attention-DP rank
    max_step_area: int  # new prompt tokens times their context, likewise; one row of any context may [F-I5]
    eos_ids: tuple[int, ...]  # these five: of TokenIds
    vocab_size: int
    think_end: int
    call_begin: int
    calls_ends: tuple[int, ...]
    hash_key: bytes = bytes(16)
    target_itl_ns: int = 0  # gaps in running streams should stay below; 0: off [R29]
    ageing_ns: int = 10_000_000_000  # what a level of priority is worth, as a head start
    queue_timeout_ns: int = 0  # 0: none
    placement: str = "least_cost"  # a name in placement.POLICIES
    session_ttl_ns: int = 0  # how long a session's prefix is kept behind a turn with tool calls; 0: not [R45]
    max_session_pages: int = 0  # per attention-DP rank, that are kept so
    max_biased: int = 128  # rows of the sampling tables, per attention-DP rank
    max_in_flight: int = 1  # steps launched before the first one's result: 2 overlaps planning with computing [R34]
    num_draft_tokens: int = 0  # that each decoding request verifies in a step, behind its last token [R36]
    tiers: TierLimits = NO_TIERS  # where pages go that a pool gives up [R32]
    debug: bool = False  # check the books after every step

    @property
    def max_req_input_len(self) -> int:
        """The longest prompt that can be served: one output token must fit behind it."""
        return self.max_seq_len - 1

    @property
    def max_seq_len(self) -> int:
        """Prompt and output of the longest request, which has a pool for itself."""
        return min(self.max_context_len, self.num_pages * self.page_size - self.headroom)

    @property
    def headroom(self) -> int:
        """KV slots behind a request's tokens that a step may write: drafts verified, and drafts made behind those."""
        return 2 * self.num_draft_tokens

    @property
    def decode_len(self) -> int:
        """Tokens that a decoding request computes in a step."""
        return 1 + self.num_draft_tokens

    @property
    def max_new_pages(self) -> int:
        """Pages that one batch adds to tables at most: of a longest request, of all that grow, and of those that turn
        out to be others' too when a step has computed them."""
        longest = policy.pages_for(self.max_seq_len + self.headroom, self.page_size)
        each = 2 + policy.pages_for(self.decode_len + self.headroom, self.page_size)
        computed = policy.pages_for(self.attn_dp_size * self.max_step_tokens, self.page_size)
        return longest + each * self.max_running + self.max_in_flight * computed

    @property
    def max_table_entries(self) -> int:
        """Biases and ids said that one batch carries at most: of one request that has said every id."""
        return self.vocab_size + MAX_BIASES
