"""A rank's entry: bind to main's life, open the channels, load, report, loop, last words. [R3]"""

import gc
import logging
import os
import signal
import time
import traceback
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from llguidance import LLExecutor

from glm53d._native import ByteVocab, set_parent_death_signal
from glm53d.config import Config
from glm53d.errors import EngineError, PeerGone, StartError
from glm53d.grammar.compiler import Compiler
from glm53d.ipc.batch import Batch
from glm53d.ipc.board import Board
from glm53d.ipc.channels import MAX_RESULT_RING_BYTES, Channels
from glm53d.ipc.records import (
    BATCH,
    LOAD_PHASES,
    LOGPROB,
    OUTPUT,
    PAGE_MOVE,
    RANK_ROW,
    RESULT,
    SLOT_INIT,
    TABLE_INIT,
    RankState,
)
from glm53d.kv.events import KvEvents
from glm53d.obs import log as logs
from glm53d.runner.base import Loaded, Runner
from glm53d.runner.page_files import PageFiles
from glm53d.sched.grammar import Grammars
from glm53d.sched.limits import Limits
from glm53d.sched.logprobs import MAX_STEP_TARGETS, MAX_TOP
from glm53d.sched.scheduler import NO_HASHES, Scheduler
from glm53d.sched.tiers import FILE_MOVES, MAX_STEP_PAGES, TierLimits
from glm53d.worker import follower
from glm53d.worker.grammar import ThreadPool
from glm53d.worker.leader import Leader

log = logging.getLogger(__name__)

SAY_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All a rank is told when it is spawned. Channels can only be pickled while spawning."""

    config: Config
    channels: Channels
    parent_pid: int
    rank: int
    attn_dp_rank: int
    attn_tp_rank: int
    ep_rank: int
    eos_ids: tuple[int, ...]
    vocab_size: int  # ids the tokenizer has
    num_base_ids: int  # ids below it are ordinary text
    tokenizer: Path
    hash_key: bytes
    think_end: int  # the id that ends reasoning
    call_begin: int  # the id that begins a tool call
    calls_ends: tuple[int, ...]  # ids that end a turn with tool calls
    # Of each id, for the leader, who finds stop strings in them; followers get none.
    token_bytes: list[bytes]
    special: list[bool]
    rendezvous: Path | None = None  # a folder of this world alone, where its ranks find each other
    spawned_ns: int = 0  # CLOCK_MONOTONIC, which main and its ranks share


class Report:
    """This rank's row on the board."""

    def __init__(self, spec: RankSpec, board: Board):
        self._board = board
        self._rank = spec.rank
        self._said_ns = time.monotonic_ns()
        self._row = np.zeros(1, RANK_ROW)
        self.set(
            pid=os.getpid(), attn_dp_rank=spec.attn_dp_rank, attn_tp_rank=spec.attn_tp_rank, ep_rank=spec.ep_rank,
            phase=b"imports", state=RankState.STARTING,
        )  # fmt: skip

    def set(self, **fields: int | bytes) -> None:
        """Change fields and show the row."""
        for name, value in fields.items():
            self._row[0][name] = value
        self._row[0]["heartbeat_ns"] = time.monotonic_ns()
        self._board.write_rank(self._rank, self._row)

    def progress(self, phase: str, percent: int) -> None:
        """Shown by /ready, and by the log once a second: what loads in less is no news."""
        assert phase in LOAD_PHASES
        self.set(phase=phase.encode()[:32], percent=percent)
        if (now := time.monotonic_ns()) - self._said_ns > SAY_NS:
            self._said_ns = now
            log.info("loading: %s, %d%%", phase, percent)

    def loaded(self, loaded: Loaded, max_req_input_len: int, init_ns: int, load_ns: int) -> None:
        """The *loaded* report. No engine warms up today, so that phase stays 0. [R3]"""
        self.set(
            init_ns=init_ns,
            state=RankState.LOADED, percent=100, phase=b"loaded", load_ns=load_ns, weight_bytes=loaded.weight_bytes,
            num_pages=loaded.num_pages, page_size=loaded.page_size, kv_bytes_per_token=loaded.kv_bytes_per_token,
            max_req_input_len=max_req_input_len,
        )  # fmt: skip


def rank_main(spec: RankSpec) -> None:
    """The target of torch.multiprocessing's Process. Ends the process with 0 after shutdown, 1 after anything else."""
    set_parent_death_signal()
    if os.getppid() != spec.parent_pid:
        os._exit(1)  # main died before the signal was set
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a group-wide signal is main's to act on: it drains, then tells us
    logs.setup(spec.config.log.level, f"rank {spec.rank}")
    if spec.config.world.pin_cpus:
        os.sched_setaffinity(0, {spec.config.world.pin_cpus[spec.rank]})
    report = Report(spec, spec.channels.board())
    runner: Runner | None = None
    try:
        gc.disable()  # as in __main__
        runner = make_runner(spec)
        gc.freeze()
        gc.enable()
        begun = time.monotonic_ns()
        loaded = runner.load(report.progress)
        limits = limits_of(spec, loaded)
        check_ring(spec.config.world.ring_bytes, limits.max_seq_len)
        check_result_ring(spec.config, limits)
        check_batch_ring(spec.config, limits)
        report.loaded(loaded, limits.max_req_input_len, begun - spec.spawned_ns, time.monotonic_ns() - begun)
        compiler = make_compiler(spec) if spec.rank == 0 else None
        gc.collect()
        gc.freeze()
        if compiler is not None:
            lead(spec, report, runner, limits, compiler, stored_pages(spec.config, loaded))
        else:
            ends = spec.channels.follower_ends(spec.rank)
            report.set(state=RankState.RUNNING)
            follower.run(
                runner, ends, spec.channels.world_id, limits.max_in_flight, spin_ns(spec), lambda now: report.set()
            )
        report.set(state=RankState.STOPPED)
    except PeerGone:
        log.warning("the other end of a channel is gone; this rank ends")
        report.set(state=RankState.STOPPED, last_words=b"the other end of a channel is gone")
    except BaseException as error:  # last words, whatever it was; the traceback of what is our bug goes to the log
        where = "" if isinstance(error, StartError) else f"\n{traceback.format_exc()}"
        log.error("this rank fails: %s%s", error, where)
        report.set(state=RankState.FAILED, last_words=f"{type(error).__name__}: {error}".encode()[:512])
        raise SystemExit(1) from None
    finally:
        if runner is not None:
            runner.close()


def make_runner(spec: RankSpec) -> Runner:
    """The engine that the configuration names."""
    max_slots = spec.config.scheduler.max_running_requests
    if spec.config.engine.kind == "sim":
        from glm53d.runner.sim import SimRunner

        return SimRunner(
            spec.config, spec.attn_dp_rank, max_slots, spec.num_base_ids, spec.tokenizer, spec.eos_ids,
            spec.attn_tp_rank,
        )  # fmt: skip
    from glm53d.runner.torch_runner import TorchRunner  # imports torch

    return TorchRunner(
        spec.config, spec.rank, max_slots, spec.vocab_size, spec.rendezvous, spec.eos_ids,
        spec.channels.mailbox_ends(spec.rank),
    )  # fmt: skip


def limits_of(spec: RankSpec, loaded: Loaded) -> Limits:
    """What this rank's pool and the configuration allow."""
    config = spec.config
    # On the CPU a launch returns when the step is over, and how far drafts got is known only then.
    overlaps = config.engine.kind == "sim" or config.engine.device == "cuda"
    max_in_flight = 2 if config.scheduler.overlap and overlaps and not config.speculation.num_draft_tokens else 1
    return Limits(
        attn_dp_size=config.parallel.attn_dp_size, num_pages=loaded.num_pages, page_size=loaded.page_size,
        max_context_len=min(loaded.max_context_len, config.model.max_context_len or loaded.max_context_len),
        max_running=config.scheduler.max_running_requests, max_step_tokens=config.scheduler.max_step_tokens,
        max_step_area=config.scheduler.max_step_area, target_itl_ns=int(config.scheduler.target_itl_ms * 1e6),
        ageing_ns=int(config.scheduler.ageing_s * 1e9), queue_timeout_ns=int(config.scheduler.queue_timeout_s * 1e9),
        eos_ids=spec.eos_ids, vocab_size=spec.vocab_size, think_end=spec.think_end,
        call_begin=spec.call_begin, calls_ends=spec.calls_ends,
        hash_key=spec.hash_key, placement=config.scheduler.placement,
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


def stored_pages(config: Config, loaded: Loaded) -> np.ndarray:
    """Hashes [n, 2] uint64 of the page files that another start has left, oldest first."""
    if not config.cache.storage_path:
        return NO_HASHES
    hashes = PageFiles(Path(config.cache.storage_path), loaded.page_file_bytes).scan()
    log.info("%d pages of KV are in files", len(hashes))
    return hashes


def check_ring(ring_bytes: int, max_seq_len: int) -> None:
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


def make_compiler(spec: RankSpec) -> Compiler:
    """Of grammars, over the tokenizer's vocabulary."""
    return Compiler(spec.token_bytes, spec.num_base_ids, spec.eos_ids)


def lead(
    spec: RankSpec, report: Report, runner: Runner, limits: Limits, compiler: Compiler, stored: np.ndarray
) -> None:
    """Wait until every follower has loaded, then run the node."""
    ends = spec.channels.leader_ends()
    for rank in range(1, spec.config.parallel.tp_size):
        wait_loaded(ends.board, rank, limits, spec.config.world.start_timeout_s)
    report.set(state=RankState.RUNNING)
    grammar = spec.config.grammar
    compiling, masking = ThreadPool(grammar.processes, "compile"), ThreadPool(grammar.threads, "mask")
    grammars = Grammars(compiler, compiling, masking, grammar.max_cached, LLExecutor(grammar.threads))
    vocab = ByteVocab(spec.token_bytes, spec.special)
    kv_events = publish_kv = None
    if spec.config.kv_events.endpoint:
        from glm53d.worker.kv_events import KvPublisher  # imports zmq

        kv_events = KvEvents(limits.attn_dp_size, limits.page_size)
        publish_kv = KvPublisher(spec.config.kv_events, limits.attn_dp_size).publish
    leader = Leader(
        Scheduler(limits, vocab, spec.channels.world_id, grammars=grammars, stored=stored, kv_events=kv_events),
        runner,
        ends,
        spin_ns(spec),
        int(spec.config.scheduler.watchdog_s * 1e9),
        compiling,
        masking,
        publish_kv,
    )
    try:
        leader.run()
    finally:
        compiling.close()
        masking.close()


def wait_loaded(board: Board, rank: int, limits: Limits, timeout_s: float) -> None:
    """Raises EngineError when a follower does not load in time, or has another pool than ours."""
    deadline = time.monotonic() + timeout_s
    while (row := board.read_rank(rank))["state"] < RankState.LOADED:
        if time.monotonic() > deadline:
            raise EngineError(f"rank {rank} has not loaded within {timeout_s:g} s")
        time.sleep(0.005)
    if (int(row["num_pages"]), int(row["page_size"])) != (limits.num_pages, limits.page_size):
        raise EngineError(f"rank {rank} has {row['num_pages']} pages of {row['page_size']}, rank 0 {limits.num_pages}")


def spin_ns(spec: RankSpec) -> int:
    return int(spec.config.world.spin_us * 1e3)
