"""From the output ring to frames: the native pump against the same work in plain Python, 64 streams.

    python -m bench.micro.pump

CPU µs per token of this process, all its threads: append a step's 64 output records of a token each, let the pump
decode and frame them, take the frames. "paced" takes after every step, as the loop does with a slow model; "free" after
every 64 steps. The alternative reads the same records from a ring with DecodeStream and json.dumps; nothing wakes it.
"""

import json
import select
import time
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from bench.corpus import NANO_TOKENIZER, Corpus
from bench.measure import Row, make_parser, report, timed_row
from glm53d._native import ByteVocab, Pump, RingReader, RingWriter, ring_init, ring_segment_bytes
from glm53d.ipc.records import OUTPUT, FinishReason
from glm53d.ipc.segment import Segment
from glm53d.text.vocab import Vocab

STREAMS, STEPS = 64, 64
WORLD, CAPACITY = 1, 1 << 22
PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"m","choices":[{'
)
DELTA = b'"index":0,"delta":{"content":"'
SUFFIX = b'"},"finish_reason":null}]}\n\n'
FRAME = (PREFIX + DELTA, SUFFIX, b"", b"")
DEADLINE_S = 10.0


def new_ring() -> tuple[Segment, RingWriter]:
    """A fresh ring and its writing end."""
    segment = Segment.create("bench", ring_segment_bytes(CAPACITY))
    ring_init(segment, WORLD)
    return segment, RingWriter(segment, WORLD)


class Steps:
    """The leader's side: the records of one request per stream, STEPS tokens long, over and over."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids  # [STEPS, STREAMS] int32
        self.heads = np.zeros(STREAMS, OUTPUT)
        self.heads["num_ids"], self.heads["matched_id"], self.heads["matched_stop"] = 1, -1, -1
        self.generation = 0

    def next_requests(self) -> list[int]:
        """Handles of fresh requests, a slot each."""
        self.generation += 1
        handles = [self.generation << 32 | slot for slot in range(STREAMS)]
        self.heads["handle"] = handles
        return handles

    def write(self, writer: RingWriter, step: int) -> None:
        """One step's records; the last one finishes every request."""
        self.heads["token_offset"], self.heads["num_output_ids"] = step, step + 1
        self.heads["finish_reason"] = FinishReason.LENGTH if step == STEPS - 1 else FinishReason.NONE
        if writer.try_append_outputs(self.heads, self.ids[step]) != STREAMS:
            raise SystemExit("the ring is full")
        writer.publish()


def native(vocab: Vocab, ids: np.ndarray, every: int) -> tuple[Callable[[], bytes], Pump]:
    """A call that passes STREAMS x STEPS tokens, frames taken every so many steps, and gives those of stream 0."""
    segment, writer = new_ring()
    pump = Pump(segment, WORLD, ByteVocab(vocab.token_bytes, vocab.special), STREAMS, -1, vocab.think_end, [])
    pump.start()
    steps, poll = Steps(ids), select.poll()
    poll.register(pump.fileno(), select.POLLIN)

    def pass_all() -> bytes:
        handles = steps.next_requests()
        for handle in handles:
            pump.open(handle, FRAME, None, False, False, True, [], False)
        frames, ends = b"", 0
        seen = pump.stats()["records"]
        for step in range(STEPS):
            steps.write(writer, step)
            expected = seen + STREAMS * (step + 1)
            if (step + 1) % every:
                continue
            while pump.stats()["records"] < expected or poll.poll(0):
                if not poll.poll(DEADLINE_S * 1e3):
                    raise SystemExit("the pump gives nothing")
                for handle, data, _, finish, *_ in pump.take():
                    frames += data if handle == handles[0] else b""
                    ends += finish is not None
        while ends < STREAMS:
            poll.poll(DEADLINE_S * 1e3)
            for handle, data, _, finish, *_ in pump.take():
                frames += data if handle == handles[0] else b""
                ends += finish is not None
        return frames

    return pass_all, pump


def plain(tokenizer: Tokenizer, ids: np.ndarray) -> Callable[[], bytes]:
    """The same in Python: records are read, decoded by DecodeStream, framed by json.dumps."""
    segment, writer = new_ring()
    reader, steps = RingReader(segment, WORLD, 0), Steps(ids)

    def pass_all() -> bytes:
        streams = {handle: DecodeStream(skip_special_tokens=True) for handle in steps.next_requests()}
        first, frames = next(iter(streams)), b""
        for step in range(STEPS):
            steps.write(writer, step)
            for _, data in reader.read_all():
                head = np.frombuffer(data, OUTPUT, 1)[0]
                handle = int(head["handle"])
                text = ""
                for token in np.frombuffer(data, np.int32, int(head["num_ids"]), OUTPUT.itemsize).tolist():
                    text += streams[handle].step(tokenizer, token) or ""
                if text:
                    frame = PREFIX + DELTA[:-1] + json.dumps(text, ensure_ascii=False).encode() + SUFFIX[1:]
                    frames += frame if handle == first else b""
        return frames

    return pass_all


def measure(rounds: int) -> list[Row]:
    """Paced and free running, against the same alternative."""
    vocab, tokenizer, corpus = Vocab.load(NANO_TOKENIZER), Tokenizer.from_file(str(NANO_TOKENIZER)), Corpus()
    texts = [
        tokenizer.encode(corpus.take(8 * STEPS).encode("ascii", "ignore").decode()).ids[:STEPS] for _ in range(STREAMS)
    ]
    ids = np.ascontiguousarray(np.array(texts, np.int32).T)
    theirs = plain(tokenizer, ids)
    rows = []
    for name, every in (("paced", 1), ("free", STEPS)):
        ours, pump = native(vocab, ids, every)
        if text_of(ours()) != text_of(theirs()):
            raise SystemExit("the two give different texts")
        rows.append(
            timed_row(
                f"a token to its frame, {name}", ours, rounds=rounds, per=STREAMS * STEPS,
                against=("read_all + DecodeStream + json", theirs), clock=time.process_time_ns,
            )
        )  # fmt: skip
        pump.stop()
    return rows


def text_of(frames: bytes) -> str:
    """What a client shows of a stream."""
    events = [json.loads(event[len("data: ") :]) for event in frames.decode().split("\n\n") if event]
    return "".join(event["choices"][0]["delta"]["content"] for event in events)


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    report("output pump", measure(args.rounds), args.json)


if __name__ == "__main__":
    main()
