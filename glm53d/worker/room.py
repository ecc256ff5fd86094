"""Room: what a configuration and its pools allow, and whether the rings take the largest records of that. [R9]

Ranks ask when they have loaded, and `--check` of a plan.
"""

from dataclasses import fields

from glm53d.config import Config
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch
from glm53d.ipc.channels import MAX_RESULT_RING_BYTES
from glm53d.ipc.records import BATCH, LOGPROB, OUTPUT, PAGE_MOVE, RESULT, SLOT_INIT, TABLE_INIT
from glm53d.runner.base import Loaded
from glm53d.sched.limits import Limits, TokenIds
from glm53d.sched.logprobs import MAX_STEP_TARGETS, MAX_TOP
from glm53d.sched.tiers import FILE_MOVES, MAX_STEP_PAGES, TierLimits


def limits_of(config: Config, loaded: Loaded, ids: TokenIds, hash_key: bytes) -> Limits:
    """What a rank's pool and the configuration allow."""
    # On the CPU a launch returns when the step is over, and how far drafts got is known only then.
    overlaps = config.engine.kind == "sim" or config.engine.device == "cuda"
    max_in_flight = 2 if config.scheduler.overlap and overlaps and not config.speculation.num_draft_tokens else 1
    return Limits(
        attn_dp_size=config.parallel.attn_dp_size, num_pages=loaded.num_pages, page_size=loaded.page_size,
        max_context_len=min(loaded.max_context_len, config.model.max_context_len or loaded.max_context_len),
        max_running=config.scheduler.max_running_requests, max_step_tokens=config.scheduler.max_step_tokens,
        max_step_area=config.scheduler.max_step_area, target_itl_ns=int(config.scheduler.target_itl_ms * 1e6),
        ageing_ns=int(config.scheduler.ageing_s * 1e9), queue_timeout_ns=int(config.scheduler.queue_timeout_s * 1e9),
        eos_ids=ids.eos, vocab_size=ids.size, think_end=ids.think_end, call_begin=ids.call_begin,
        calls_ends=ids.calls_ends, hash_key=hash_key, placement=config.scheduler.placement,
        session_ttl_ns=int(config.scheduler.session_ttl_s * 1e9),
        max_session_pages=int(config.scheduler.session_share * loaded.num_pages),
        max_biased=config.scheduler.max_biased_requests, max_in_flight=max_in_flight,
        num_draft_tokens=config.speculation.num_draft_tokens,
        tiers=tier_limits(config, loaded), debug=config.scheduler.debug_checks,
    )  # fmt: skip


def tier_limits(config: Config, loaded: Loaded) -> TierLimits:
    """What fits into the slower tiers, and what moving a page takes. [R32]"""
    cache, parallel = config.cache, config.parallel
    page_bytes = loaded.kv_bytes_per_token * loaded.page_size
    has_peers = cache.peer_bytes_per_s > 0 and parallel.attn_dp_size > 1
    return TierLimits(
        host_pages=loaded.num_host_pages,
        file_pages=cache.storage_bytes // page_bytes if cache.storage_path else 0,
        step_pages=min(max(1, cache.step_bytes // page_bytes), MAX_STEP_PAGES),
        load_ns=int(1e9 * page_bytes / cache.host_bytes_per_s),
        fetch_ns=int(1e9 * page_bytes / cache.storage_bytes_per_s),
        peer_ns=int(1e9 * page_bytes / cache.peer_bytes_per_s) if has_peers else -1,
        group_size=parallel.tp_size // parallel.attn_dp_size,
    )


def check_rings(config: Config, limits: Limits) -> None:
    """Raise StartError unless the rings take the largest records that there can be."""
    check_output_ring(config.world.ring_bytes, limits.max_seq_len)
    check_result_ring(config, limits)
    check_batch_ring(config, limits)


def check_output_ring(ring_bytes: int, max_seq_len: int) -> None:
    """Raise StartError unless one output record can hold all tokens of the longest request: when main has not read
    for long, its last one does."""
    needed = 2 * (OUTPUT.itemsize + 4 * max_seq_len + 16)  # half a ring is a record with its header and padding
    if needed > ring_bytes:
        raise StartError(
            f"world.ring_bytes {ring_bytes} cannot take the output of a request of {max_seq_len} tokens: give it "
            f"{1 << (needed - 1).bit_length()}, or lower model.max_context_len"
        )


def check_result_ring(config: Config, limits: Limits) -> None:
    """Raise StartError unless a follower's ring takes the result of the largest step, in which all ask for logprobs."""
    room = min(config.world.ring_bytes, MAX_RESULT_RING_BYTES)
    num_sampled = limits.max_running * limits.decode_len
    num_bytes = RESULT.itemsize + 4 * (limits.max_running + num_sampled)
    num_bytes += (num_sampled + MAX_STEP_TARGETS) * (4 + LOGPROB.itemsize * (1 + MAX_TOP))
    needed = 2 * (num_bytes + 64)  # half a ring is a record with its header and padding
    if config.parallel.tp_size > 1 and needed > room:
        raise StartError(
            f"a result of {limits.max_running} requests takes up to {num_bytes} bytes, and the ring for it has {room}: "
            "lower scheduler.max_running_requests, or raise world.ring_bytes if it is less than "
            f"{MAX_RESULT_RING_BYTES}"
        )


def largest_batch(limits: Limits) -> int:
    """Bytes of the largest record that a step can have in the batch ring."""
    rows, num_tokens = limits.max_running, limits.attn_dp_size * limits.max_step_tokens
    num_bytes = BATCH.itemsize + rows * (6 * 4 + SLOT_INIT.itemsize) + num_tokens * 2 * 4 + 4 * limits.attn_dp_size
    num_runs = (2 + limits.max_in_flight) * rows  # of pages: of who begins, who grows, whose prompt is computed
    num_bytes += 4 * (3 * num_runs + limits.max_new_pages)
    num_bytes += TABLE_INIT.itemsize * rows + 3 * 4 * limits.max_table_entries
    moves_per_rank = 2 * limits.tiers.step_pages
    num_bytes += PAGE_MOVE.itemsize * (limits.attn_dp_size * moves_per_rank + FILE_MOVES)
    num_bytes += rows * 4 * (1 + -(-limits.vocab_size // 32))  # a mask each
    return num_bytes + 8 * len(fields(Batch))  # each part is padded


def check_batch_ring(config: Config, limits: Limits) -> None:
    """Raise StartError unless the ring takes two of the largest batches: what followers have not read at most."""
    num_bytes = largest_batch(limits)
    if config.parallel.tp_size > 1 and (needed := 4 * (num_bytes + 64)) > config.world.ring_bytes:
        raise StartError(
            f"a step of {limits.max_running} requests takes up to {num_bytes} bytes, and the ring for it has "
            f"{config.world.ring_bytes}: give world.ring_bytes {1 << (needed - 1).bit_length()}, or lower "
            "scheduler.max_running_requests"
        )
