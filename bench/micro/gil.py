"""How long a long prompt stops the process's other threads: the GIL, held by rendering, encoding and hashing. [R18]

    python -m bench.micro.gil [--tokenizer tokenizer.json]

A watchdog thread does nothing but look at the clock, and lets go of the GIL each time. A stop is the time between two
looks, without what it waited for a CPU as far as the kernel tells, and at most what the working thread was on one. Of
each kind of prompt, 100,000 tokens, the round whose worst stop is shortest counts: a hold that the code makes is there
in every round, what else runs on the machine only in some. Beside it a thread that computes as long without the GIL.
"""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.corpus import NANO_TOKENIZER, Corpus
from bench.measure import Row, make_parser, report
from glm53d.chat.conversation import Conversation
from glm53d.chat.jinja import choose
from glm53d.front.job import Job
from glm53d.front.prompt import TextHalf
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab
from glm53d.world.supervisor import GIL_SWITCH_S

TOKENS = 100_000
PAGE_SIZE = 64
AIM_MS = 0.5
NO_GIL = bytes(8_000_000)  # takes about as long to hash


class Watchdog:
    """The worst stop that a call causes another thread, in ms."""

    def __init__(self) -> None:
        self._worker = time.pthread_getcpuclockid(threading.get_ident())
        self._watching = False
        self._worst = 0

    def worst_stop(self, call: Callable[[], object]) -> float:
        """Of one call, made by this thread."""
        self._watching, self._worst = True, 0
        thread = threading.Thread(target=self._watch)
        thread.start()
        call()
        self._watching = False
        thread.join()
        return self._worst / 1e6

    def _watch(self) -> None:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as stat:
            last, last_cpu, last_delay = time.perf_counter_ns(), time.clock_gettime_ns(self._worker), 0
            while self._watching:
                # Reading lets go of the GIL. CPU time, time of waiting for a CPU, slices; in ns.
                delay = int(os.pread(stat.fileno(), 64, 0).split()[1])
                now, cpu = time.perf_counter_ns(), time.clock_gettime_ns(self._worker)
                if last_delay:
                    self._worst = max(self._worst, min(now - last - (delay - last_delay), cpu - last_cpu))
                last, last_cpu, last_delay = now, cpu, delay


def measure(path: Path, rounds: int) -> list[Row]:
    """A row for each kind of prompt."""
    sys.setswitchinterval(GIL_SWITCH_S)  # as in the daemon
    vocab = Vocab.load(path)
    half = TextHalf(
        Encoder(path, vocab, 1), choose(vocab.added, None, None, literal=False), (), PAGE_SIZE, bytes(16), bytes(16)
    )
    corpus = Corpus()
    sample = corpus.take(100_000)
    chars = round(TOKENS * len(sample) / len(half.encoder.encode_text(sample)))
    watchdog = Watchdog()
    rows = []
    for what, make in (
        ("one message", lambda: _chat(corpus.take(chars))),
        ("one message, all CJK", lambda: _chat(corpus.take(chars).translate(CJK)[:TOKENS])),
        ("400 messages", lambda: _chat(*(corpus.take(chars // 400) for _ in range(400)))),
        ("raw text", lambda: Job("bench", 0, text=corpus.take(chars))),
        ('raw text, all "<|"', lambda: Job("bench", 0, text="<|" * TOKENS)),  # begins control tokens, spells none
    ):
        stops: list[float] = []
        noise: list[float] = []
        for _ in range(rounds):
            job = make()
            stops.append(watchdog.worst_stop(partial(half.prepare, job, 1 << 30, False)))
            noise.append(watchdog.worst_stop(partial(hashlib.blake2b, NO_GIL)))
        rows.append(
            Row(
                f"worst stop, {what} of {TOKENS:,} tokens", "ms", min(stops), min(stops), max(stops),
                "a thread without the GIL", min(noise), AIM_MS,
            )
        )  # fmt: skip
    return rows


def _chat(*texts: str) -> Job:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return Job("bench", 0, conversation=Conversation(messages))


CJK = {code: 0x4E00 + code for code in range(128)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, default=NANO_TOKENIZER, help="a byte-level BPE tokenizer.json")
    args = parser.parse_args()
    report("gil", measure(args.tokenizer, args.rounds), args.json)


if __name__ == "__main__":
    main()
