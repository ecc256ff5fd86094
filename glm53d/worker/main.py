"""A rank's entry: bind to main's life, open the channels, load, report, loop, last words. [R3]"""

import faulthandler
import gc
import logging
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLExecutor

from glm53d._native import ByteVocab, set_parent_death_signal
from glm53d.config import Config
from glm53d.errors import EngineError, PeerGone, StartError
from glm53d.grammar.compiler import Compiler
from glm53d.ipc.board import Board
from glm53d.ipc.channels import Channels
from glm53d.ipc.records import LOAD_PHASES, RANK_ROW, RankState
from glm53d.kv.events import KvEvents
from glm53d.obs import log as logs
from glm53d.runner.base import Loaded, Runner
from glm53d.runner.page_files import PageFiles
from glm53d.sched.grammar import Grammars
from glm53d.sched.limits import Limits, TokenIds
from glm53d.sched.scheduler import NO_HASHES, Scheduler
from glm53d.worker import follower
from glm53d.worker.grammar import ThreadPool
from glm53d.worker.leader import Leader
from glm53d.worker.room import check_rings, limits_of

log = logging.getLogger(__name__)

SAY_NS = 1_000_000_000
STACKS_SIGNAL = signal.SIGUSR1  # a rank answers with the stacks of its threads, whatever it hangs in


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
    ids: TokenIds
    num_base_ids: int  # ids below it are ordinary text
    tokenizer: Path
    hash_key: bytes
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
    """The target of torch.multiprocessing's Process. Ends the process with 0 after shutdown or when a channel's other
    end is gone, 1 after anything else.
    """
    set_parent_death_signal()
    if os.getppid() != spec.parent_pid:
        os._exit(1)  # main died before the signal was set
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a group-wide signal is main's to act on: it drains, then tells us
    faulthandler.register(STACKS_SIGNAL)
    logs.setup(spec.config.log.level, f"rank {spec.rank}")
    report = Report(spec, spec.channels.board())
    runner: Runner | None = None
    try:
        if spec.config.world.pin_cpus:
            os.sched_setaffinity(0, {spec.config.world.pin_cpus[spec.rank]})
        gc.disable()  # as in __main__
        runner = make_runner(spec)
        gc.freeze()
        gc.enable()
        begun = time.monotonic_ns()
        loaded = runner.load(report.progress)
        limits = limits_of(spec.config, loaded, spec.ids, spec.hash_key)
        check_rings(spec.config, limits)
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
                runner, ends, spec.channels.world_id, limits.max_in_flight, spin_ns(spec), report.set
            )
        report.set(state=RankState.STOPPED)
    except PeerGone:
        log.warning("the other end of a channel is gone; this rank ends")
        report.set(state=RankState.STOPPED, last_words=b"the other end of a channel is gone")
    except BaseException as error:  # last words, whatever it was; the traceback of what is our bug goes to the log
        where = "" if isinstance(error, StartError) else f"\n{traceback.format_exc()}"
        log.error("this rank fails: %s%s", error, where)
        report.set(state=RankState.FAILED, last_words=f"{type(error).__name__}: {error}".encode()[:512])
        os._exit(1)  # at once: closing waits for the device and for other ranks, which may never answer
    if runner is not None:
        runner.close()


def make_runner(spec: RankSpec) -> Runner:
    """The engine that the configuration names."""
    max_slots = spec.config.scheduler.max_running_requests
    if spec.config.engine.kind == "sim":
        from glm53d.runner.sim import SimRunner

        return SimRunner(
            spec.config, spec.attn_dp_rank, max_slots, spec.num_base_ids, spec.tokenizer, spec.ids.eos,
            spec.attn_tp_rank,
        )  # fmt: skip
    from glm53d.runner.torch_runner import TorchRunner  # imports torch

    return TorchRunner(
        spec.config, spec.rank, max_slots, spec.ids.size, spec.rendezvous, spec.ids.eos,
        spec.channels.mailbox_ends(spec.rank),
    )  # fmt: skip


def stored_pages(config: Config, loaded: Loaded) -> np.ndarray:
    """Hashes [n, 2] uint64 of the page files that another start has left, oldest first."""
    if not config.cache.storage_path:
        return NO_HASHES
    hashes = PageFiles(Path(config.cache.storage_path), loaded.page_file_bytes).scan()
    log.info("%d pages of KV are in files", len(hashes))
    return hashes


def make_compiler(spec: RankSpec) -> Compiler:
    """Of grammars, over the tokenizer's vocabulary."""
    return Compiler(spec.token_bytes, spec.num_base_ids, spec.ids.eos)


def lead(
    spec: RankSpec, report: Report, runner: Runner, limits: Limits, compiler: Compiler, stored: np.ndarray
) -> None:
    """Wait until every follower has loaded, then run the node: only then is it ready."""
    ends = spec.channels.leader_ends()
    for rank in range(1, spec.config.parallel.tp_size):
        wait_loaded(ends.board, rank, limits, spec.config.world.start_timeout_s)
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
        compiling,
        masking,
        publish_kv,
    )
    report.set(state=RankState.RUNNING)
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
