"""The life of the daemon: HTTP first, then the ranks, then work; a signal or a dead rank ends it. [R3] [R4]

    main thread        event loop: HTTP, engine                     run() -> Daemon.live()
    supervisor thread  spawns ranks, watches their pidfds, ends them. It lives as long as main, because a rank's
                       parent-death signal is bound to the thread that spawned it.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from glm53d.chat.jinja import Choice, choose
from glm53d.config import Config
from glm53d.errors import EngineError, NotReady
from glm53d.front.engine import Engine, EngineLimits
from glm53d.front.grammar import GrammarCheck
from glm53d.front.health import Health, State, found_hanging
from glm53d.front.prompt import TextHalf
from glm53d.front.pump import OutputPump
from glm53d.ipc.board import Board
from glm53d.ipc.channels import Channels
from glm53d.ipc.records import RankState
from glm53d.sched.limits import TokenIds
from glm53d.server.app import HttpServer, serve
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab
from glm53d.worker.main import STACKS_SIGNAL, RankSpec, rank_main
from glm53d.world.checkpoint import Checkpoint, read_checkpoint
from glm53d.world.plan import check_machine, layout
from glm53d.world.reload import reload
from glm53d.world.storage import Storage

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

log = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0  # a rank that was told to end has so long
LOADING_POLL_MS = 10
HANG_POLL_MS = 1000
STACKS_S = 0.5  # that ranks have to write them
# A thread that waits for the GIL asks for it after so long. Python's own 5 ms would be the gap in every stream while a
# text thread runs plain Python; where nobody waits it costs nothing.
GIL_SWITCH_S = 0.0002
# What shells and systemd give by default is 1024, for the sake of select(), which nobody here calls: it would be full
# before server.max_requests is, and a connection more is closed by the event loop without a word.
MAX_FDS = 1 << 20
OWN_FDS = 64  # what main holds beside its clients' connections


class Event(Enum):
    """What the supervisor thread, or a signal, tells the loop."""

    LOADED = auto()
    FAILED = auto()
    SIGNAL = auto()
    RELOAD = auto()
    NO_TEXT = auto()  # the tokenizer could not be loaded


def run(config: Config, read: Callable[[], Config]) -> int:
    """Serve until a signal (exit code 0) or until the ranks fail (1). Raises StartError before anything is started.

    read: gives the configuration anew, for SIGHUP.
    """
    sys.setswitchinterval(GIL_SWITCH_S)
    _raise_fd_limit(config.server.max_requests)
    check_machine(config)
    checkpoint = read_checkpoint(config)
    vocab = Vocab.load(checkpoint.tokenizer)
    template = choose(
        vocab.added, checkpoint.chat_template, checkpoint.own_template, literal=config.template.literal_control_tokens
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(config, checkpoint, vocab, template).live(read))


def _raise_fd_limit(max_requests: int) -> None:
    """Take as many file descriptors as we may; say so when they are too few for max_requests connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, MAX_FDS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < max_requests + OWN_FDS:
        log.warning("%d file descriptors (ulimit -Hn) are too few for server.max_requests %d", most, max_requests)


class Daemon:
    """One start of glm53d."""

    def __init__(self, config: Config, checkpoint: Checkpoint, vocab: Vocab, template: Choice):
        self._config = config
        self._checkpoint = checkpoint
        self._vocab = vocab
        self._template = template
        parallel = config.parallel
        self._channels = Channels.create(
            secrets.randbits(63), parallel.tp_size, parallel.attn_dp_size, config.world.ring_bytes
        )
        self._ends = self._channels.main_ends()
        self._health = Health(self._ends.board)
        self._events: asyncio.Queue[tuple[Event, str]] = asyncio.Queue()
        self._storage = Storage(config.cache.storage_path)
        self._hash_key = self._storage.hash_key

    async def live(self, read: Callable[[], Config]) -> int:
        """From the first listening socket to the last process gone; returns the exit code."""
        loop = asyncio.get_running_loop()
        if not sys.stderr.isatty():  # there it says that the terminal is closed, which ends what runs in it
            loop.add_signal_handler(signal.SIGHUP, self._events.put_nowait, (Event.RELOAD, "SIGHUP"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._events.put_nowait, (Event.SIGNAL, signal.Signals(number).name))
        checkpoint = self._checkpoint
        engine = Engine(self._config, self._vocab, checkpoint.models, checkpoint.defaults, self._health)
        pump = OutputPump(self._ends.outputs, self._channels.world_id, self._vocab, engine.table.size)
        site = await serve(engine, self._config)
        log.info("listening at %s", site.url)
        ranks = Ranks(self._config, self._channels, self._specs(), self._tell(loop))
        ranks.start()
        text = loop.run_in_executor(None, self._load_text)  # while the ranks load
        text.add_done_callback(self._text_loaded)
        code, reloads = 0, set[asyncio.Task[None]]()
        try:
            while True:
                event, message = await self._events.get()
                if event is Event.LOADED:
                    await self._open(engine, text, pump)
                    continue
                if event is Event.NO_TEXT:
                    text.result()  # raises
                if event is Event.RELOAD:
                    reloading = asyncio.create_task(reload(read, engine, site))  # ranks answer when they can
                    reloads.add(reloading)
                    reloading.add_done_callback(reloads.discard)
                    continue
                if event is Event.SIGNAL:
                    log.info("%s: draining", message)
                failure = message if event is Event.FAILED else await self._drain(engine, site)
                if failure is not None:
                    log.error("the daemon ends: %s", failure)
                    self._health.become(State.UNHEALTHY, failure)
                    engine.fail_all(EngineError(failure))
                    code = 1
                return code
        finally:
            await site.stop()
            if were_told := engine.is_open and code == 0:
                engine.control.shut_down()
            await loop.run_in_executor(None, ranks.stop, EXIT_GRACE_S if were_told else 0.0)
            engine.close()
            self._storage.close()
            await loop.shutdown_default_executor()
            _stop_resource_tracker()

    def _specs(self) -> list[RankSpec]:
        vocab, checkpoint = self._vocab, self._checkpoint
        ids = TokenIds(vocab.size, checkpoint.eos_ids, vocab.think_end, vocab.call_begin, vocab.calls_ends)
        return [
            RankSpec(
                self._config, self._channels, os.getpid(), place.rank, place.attn_dp_rank, place.attn_tp_rank,
                place.ep_rank, ids, vocab.num_base, checkpoint.tokenizer, self._hash_key,
                *((vocab.token_bytes, vocab.special) if place.rank == 0 else ([], [])),
            )
            for place in layout(self._config)
        ]  # fmt: skip

    def _tell(self, loop: asyncio.AbstractEventLoop) -> Callable[[Event, str], None]:
        def tell(event: Event, message: str) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, (event, message))

        return tell

    def _text_loaded(self, text: "asyncio.Future[TextHalf]") -> None:
        if not text.cancelled() and text.exception() is not None:
            self._events.put_nowait((Event.NO_TEXT, ""))

    def _load_text(self) -> TextHalf:
        config, checkpoint = self._config, self._checkpoint
        encoder = Encoder(checkpoint.tokenizer, self._vocab, config.text.threads, config.text.cache_tokens)
        return TextHalf(
            encoder, self._template, config.template.strip_lines, config.kv.page_size, self._hash_key,
            checkpoint.chain_seed,
        )  # fmt: skip

    async def _open(self, engine: Engine, text: "asyncio.Future[TextHalf]", pump: OutputPump) -> None:
        """All ranks have loaded: take their limits, and accept work. [R3]"""
        rows = self._ends.board.ranks()
        longest = int(rows["max_req_input_len"].min())
        half = await text
        grammars = GrammarCheck(self._checkpoint.tokenizer, self._checkpoint.eos_ids, self._config.grammar)
        grammars.start()
        limits = EngineLimits(longest, longest + 1)
        engine.open(self._ends, half, pump, limits, self._channels.describe(), grammars)
        gc.collect()
        gc.freeze()
        self._health.become(State.UP)
        log.info(
            "ready: %s, %d rank(s), %d pages of %d tokens per pool, prompts up to %d tokens",
            self._checkpoint.models[0], len(rows), rows["num_pages"].min(), rows["page_size"].min(), longest,
        )  # fmt: skip

    async def _drain(self, engine: Engine, site: HttpServer) -> str | None:
        """Refuse new work, let running requests finish, to the last byte of their answers, until time is up or a second
        signal comes; what is left gets an error event. Returns why the ranks failed, if they did. [F-A6]
        """
        self._health.become(State.DRAINING)
        deadline = time.monotonic() + self._config.server.drain_timeout_s
        while (len(engine.table) or site.num_open) and time.monotonic() < deadline:
            if self._events.empty():
                await asyncio.sleep(0.02)
                continue
            event, message = self._events.get_nowait()
            if event is Event.FAILED:
                return message
            if event is Event.SIGNAL:
                break
        if num_left := max(len(engine.table), site.num_open):
            log.warning("%d request(s) did not finish in time", num_left)
            engine.fail_all(NotReady("The server is shutting down."))
        return None


@dataclass(slots=True)
class Rank:
    """One spawned process."""

    number: int
    process: "SpawnProcess"
    pidfd: int


class Ranks:
    """The supervisor thread and the rank processes it spawned."""

    def __init__(self, config: Config, channels: Channels, specs: list[RankSpec], tell: Callable[[Event, str], None]):
        self._config = config
        self._channels = channels
        self._specs = specs
        self._tell = tell
        self._stopping = threading.Event()
        self._grace_s = 0.0  # set before _stopping is
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="supervisor")
        self._ranks: list[Rank] = []

    def start(self) -> None:
        """Spawn all ranks; LOADED or FAILED is told later."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Wait until every rank has ended; those that have not within grace_s are killed. Blocks."""
        self._grace_s = grace_s
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="glm53d-", ignore_cleanup_errors=True) as folder:
                self._spawn(Path(folder))
                self._watch(Path(folder))
        except Exception as error:  # this thread has nobody above it: main must hear of it
            log.exception("the supervisor fails")
            self._tell(Event.FAILED, f"{type(error).__name__}: {error}")
            self._stopping.wait()
        self._end_all()

    def _spawn(self, rendezvous: Path) -> None:
        gc.disable()  # as in __main__
        import torch.multiprocessing as mp  # the one place in main that loads torch

        gc.freeze()
        gc.enable()
        context = mp.get_context("spawn")
        for spec in self._specs:
            spec = replace(spec, rendezvous=rendezvous, spawned_ns=time.monotonic_ns())
            process = context.Process(target=rank_main, args=(spec,), name=f"glm53d-rank-{spec.rank}")
            process.start()
            assert process.pid is not None
            self._ranks.append(Rank(spec.rank, process, os.pidfd_open(process.pid)))
            if self._stopping.is_set():
                return

    def _watch(self, rendezvous: Path) -> None:
        """Until stop(): see ranks load, see them die, or hang. [F-B2] [F-B3]"""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd = {rank.pidfd: rank for rank in self._ranks}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        board, loading, hang = self._channels.board(), True, ""
        deadline = time.monotonic() + self._config.world.start_timeout_s
        while not self._stopping.is_set():
            for fd, _ in poll.poll(LOADING_POLL_MS if loading else HANG_POLL_MS):
                if fd in by_fd:
                    poll.unregister(fd)
                    self._died(by_fd[fd], board)
            if not loading and not hang and (hang := found_hanging(board, self._config.scheduler.watchdog_s)):
                self._end_hanging(hang)
            if loading and (board.ranks()["state"] == RankState.RUNNING).all():
                loading = False
                shutil.rmtree(rendezvous)  # all have met; if we are killed from here on, nothing of it is left
                self._tell(Event.LOADED, "")
            elif loading and time.monotonic() > deadline:
                loading = False
                self._tell(Event.FAILED, f"the ranks have not loaded within {self._config.world.start_timeout_s:g} s")

    def _died(self, rank: Rank, board: Board) -> None:
        """Wake whoever waits for the rank, and tell main why it ended."""
        rank.process.join()
        self._channels.mark_gone(rank.number)
        code, row = rank.process.exitcode, board.read_rank(rank.number)
        if row["state"] == RankState.FAILED:
            why = row["last_words"].decode(errors="replace")
        elif code is not None and code < 0:
            why = f"killed by {signal.Signals(-code).name}"
        else:
            why = f"exit code {code}"
        if not self._stopping.is_set():
            self._tell(Event.FAILED, f"rank {rank.number} has ended: {why}")

    def _end_hanging(self, what: str) -> None:
        """Nothing will come of it: the log gets each rank's stacks, main the reason to end."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # it has just died
                signal.pidfd_send_signal(rank.pidfd, STACKS_SIGNAL)
        self._stopping.wait(STACKS_S)
        self._tell(Event.FAILED, f"{what} (scheduler.watchdog_s)")

    def _end_all(self) -> None:
        """Ranks end by themselves after shutdown; those that do not are killed, by pidfd and no others. [F-B8]"""
        deadline = time.monotonic() + self._grace_s
        for rank in self._ranks:
            if any(r.process.exitcode not in (None, 0) for r in self._ranks):
                deadline = time.monotonic()  # the world has failed: nobody will be told to end
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.exitcode is None:
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
                rank.process.join()
        for rank in self._ranks:
            os.close(rank.pidfd)
            rank.process.close()


def _stop_resource_tracker() -> None:
    """multiprocessing's helper process would outlive us by a moment; it holds nothing of ours."""
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # no public way
