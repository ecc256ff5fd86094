"""What main writes for a Job, and what it reads as its Finish: generate and output records. [R10] [R38] [R53]"""

import secrets

import numpy as np

from glm53d._native import TokenLogprob
from glm53d.config import Config
from glm53d.errors import DeadlineExceeded, EngineError, GrammarFailed, QueueTimeout
from glm53d.front.job import Finish, Job, Pieces, SamplingParams, Usage
from glm53d.front.prompt import Prompt
from glm53d.ipc.records import (
    ABORT,
    BIAS,
    GENERATE,
    HELPER,
    IGNORE_EOS,
    NO_STOP_TRIM,
    ONLY_BIASED,
    OUTPUT,
    PROBE,
    SKIP_SPECIAL,
    STOP_BEFORE_CALLS,
    STOP_IN_CONTENT,
    THINKING_FORCED,
    FinishReason,
    GrammarKind,
    Packer,
    align8,
    padded,
)

PROBE_RID = "health-probe"

_FAILED: dict[str, type[EngineError]] = {kind.code: kind for kind in (DeadlineExceeded, GrammarFailed, QueueTimeout)}
"""What the scheduler calls by a code; anything else it says is an EngineError."""

_pack_generate = Packer(GENERATE)
_output = Packer(OUTPUT)
pack_abort = Packer(ABORT)


def generate_record(
    handle: int, job: Job, prompt: Prompt, max_context_len: int, chain_seed: bytes, config: Config, group: int = 0
) -> list[bytes]:
    """A generate record's parts in order. Without a seed of its own, a request gets one here. [R51]

    Args:
        chain_seed: 16 bytes that page hashes start from, before the request's own salt. [R19]
        group: the handle of the first of several that share a prompt, 0 for one alone. [R20]
    """
    sampling, room = job.sampling, max_context_len - len(prompt.ids)
    stop_ids, rid = np.array(sampling.stop_ids, np.int32), job.rid.encode()
    stop = b"".join(len(s).to_bytes(2, "little") + s for s in map(str.encode, sampling.stop))
    grammar = b"" if sampling.grammar is None else sampling.grammar.text.encode()
    bias = _bias(sampling)
    chain = job.routing.chain_seed(chain_seed)
    head = _pack_generate(
        handle=handle,
        group=group,
        arrival_ns=job.received_ns,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed & (2**64 - 1),
        chain_lo=int.from_bytes(chain[:8], "little"),
        chain_hi=int.from_bytes(chain[8:], "little"),
        session=job.routing.session_hash,
        num_prompt_ids=len(prompt.ids),
        num_page_hashes=len(prompt.hashes),
        num_stop_ids=len(stop_ids),
        stop_bytes=len(stop),
        num_logit_bias=len(bias),
        grammar_bytes=len(grammar),
        grammar_kind=_grammar_kind(sampling),
        rid_bytes=len(rid),
        flags=_flags(job, config.scheduler.helper_max_tokens),
        max_new_tokens=room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens),
        min_new_tokens=sampling.min_new_tokens,
        stream_interval=config.output.stream_interval if job.out.is_streamed else config.output.plain_interval,
        priority=sampling.priority,
        dp_rank=-1 if job.routing.dp_rank is None else job.routing.dp_rank,
        bootstrap_room=-1 if job.routing.bootstrap_room is None else job.routing.bootstrap_room,
        deadline_ns=job.received_ns + round(job.first_token_timeout_s * 1e9) if job.first_token_timeout_s else 0,
        thinking_budget=_thinking_budget(job, config.scheduler.thinking_share),
        cached_device=-1,
        cached_host=-1,
        cached_storage=-1,
        top_k=sampling.top_k,
        top_logprobs=-1 if sampling.top_logprobs is None else sampling.top_logprobs,
        logprob_start=-1 if sampling.logprob_start is None else sampling.logprob_start,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
    )
    parts = (prompt.ids.tobytes(), prompt.hashes.tobytes(), stop_ids.tobytes(), stop, bias.tobytes(), grammar, rid)
    return [head, *map(padded, parts)]


def read_finish(
    job: Job,
    marks: dict[str, int],
    record: bytes,
    text: bytes,
    reasoning: bytes,
    pieces: Pieces,
    ids: bytes,
    reasoning_tokens: int,
    first_token_ns: int,
) -> Finish:
    """The end of a request, from its last output record and what the pump has collected.

    Raises EngineError when the record says that the request failed.
    """
    head = _output.unpack(record)
    if head["finish_reason"] == FinishReason.ERROR:
        start = OUTPUT.itemsize + align8(4 * head["num_ids"])
        message = record[start : start + head["error_bytes"]].decode(errors="replace")
        code, _, sentence = message.partition(": ")
        raise _FAILED[code](sentence) if code in _FAILED else EngineError(message or "The scheduler failed.")
    names = ("inbox", "admitted", "queue", "first_forward", "prefill_done", "last_token")
    marks = marks | {name: head[f"{name}_ns"] for name in names}
    if first_token_ns:
        marks["first_token"] = first_token_ns
    device, host, storage = (head[f"cached_{tier}"] for tier in ("device", "host", "storage"))
    usage = Usage(
        prompt_tokens=head["num_prompt_ids"],
        completion_tokens=head["num_output_ids"],
        reasoning_tokens=reasoning_tokens,
        cached_tokens=device + host + storage,
        cached_device=device,
        cached_host=host,
        cached_storage=storage,
        accepted_tokens=head["num_accepted"],
    )
    has_tokens = job.sampling.top_logprobs is not None
    tokens = [piece for piece in pieces if isinstance(piece, TokenLogprob)] if has_tokens else []
    matched_id, matched_stop = head["matched_id"], head["matched_stop"]
    return Finish(
        reason=FinishReason(head["finish_reason"]),
        usage=usage,
        matched_id=None if matched_id < 0 else matched_id,
        matched_stop=None if matched_stop < 0 else job.sampling.stop[matched_stop],
        text=text.decode(),
        reasoning=reasoning.decode(),
        pieces=[piece for piece in pieces if not isinstance(piece, TokenLogprob)] if tokens else pieces,
        logprobs=[token for token in tokens if not token.is_prompt],
        prompt_logprobs=[token for token in tokens if token.is_prompt],
        output_ids=np.frombuffer(ids, np.int32),
        marks=marks,
        thinking_forced=bool(head["flags"] & THINKING_FORCED),
    )


def _grammar_kind(sampling: SamplingParams) -> GrammarKind:
    if sampling.grammar is None:
        return GrammarKind.NONE
    return GrammarKind.AFTER_THINKING if sampling.grammar.after_thinking else GrammarKind.FROM_START


def _bias(sampling: SamplingParams) -> np.ndarray:
    """BIAS entries, one of an id, its last. Ids that alone are allowed have one each, be it 0."""
    given = dict(sampling.logit_bias)
    if sampling.allowed_ids:
        given = {id: given.get(id, 0.0) for id in sampling.allowed_ids}
    return np.array(list(given.items()), BIAS)


def _thinking_budget(job: Job, share: float) -> int:
    """GenerateRecord.thinking_budget: the request's own, or so much of its max_tokens as may be thinking. [R46]"""
    sampling = job.sampling
    if sampling.thinking_budget is not None:
        return sampling.thinking_budget
    if share and job.out.starts_in_reasoning and sampling.max_new_tokens is not None:
        return int(share * sampling.max_new_tokens)
    return -1


def _flags(job: Job, helper_max_tokens: int) -> int:
    """GenerateRecord.flags."""
    chat, sampling = job.conversation, job.sampling
    is_small = sampling.max_new_tokens is not None and sampling.max_new_tokens <= helper_max_tokens
    flags = {
        IGNORE_EOS: job.sampling.ignore_eos,
        PROBE: job.rid == PROBE_RID,
        NO_STOP_TRIM: job.sampling.no_stop_trim,
        SKIP_SPECIAL: job.out.skip_special_tokens,
        STOP_IN_CONTENT: job.out.starts_in_reasoning,
        STOP_BEFORE_CALLS: bool(job.out.python_ids),
        ONLY_BIASED: bool(sampling.allowed_ids),
        HELPER: chat is not None and not chat.tools and is_small and not sampling.priority,
    }
    return sum(flag for flag, is_set in flags.items() if is_set)
