"""
Native parts of glm53d: shared memory, prefix tree, hashing, decoding and framing.
"""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


class RecordLayout:
    """One fixed struct of records.h."""

    @property
    def size(self) -> int: ...

    @property
    def fields(self) -> list[tuple[str, str, int]]:
        """(name, numpy format, offset) of each field, in order."""

class RecordType(enum.IntEnum):
    """What a ring record is."""

    GENERATE = 1

    ABORT = 2

    CONTROL = 3

    OUTPUT = 4

    CONTROL_RESULT = 5

    BATCH = 6

    RESULT = 7

class FinishReason(enum.IntEnum):
    """Why a request ended; NONE while it goes on."""

    NONE = 0

    STOP = 1

    LENGTH = 2

    ABORT = 3

    ERROR = 4

def record_layouts() -> dict[str, RecordLayout]:
    """
    Every fixed struct of records.h by name: what numpy dtypes are made from.
    """

class Segment:
    """A piece of shared memory without a name in the file system. [R5]"""

    @staticmethod
    def create(name: str, size: int) -> Segment:
        """
        Fresh zeroed memory. The name is for people, in lists of open files. OSError when there is no room.

        Of size 0 it has none until its owner calls set_size.
        """

    @staticmethod
    def attach(fd: int) -> Segment:
        """
        The memory behind a descriptor that create() made here or in the spawning process; takes fd over.
        """

    def set_size(self, size: int) -> None:
        """
        Give a segment made with size 0 its memory, once, in the process that owns it. OSError without room.
        """

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The memory itself [size], which lives as long as the array; of a segment sized since it came here, all of it.
        """

    @property
    def fd(self) -> int:
        """-1 after close()."""

    @property
    def size(self) -> int:
        """In bytes."""

    def close(self) -> None:
        """
        Give up the descriptor. The memory stays mapped while an end of it is held.
        """

def ring_segment_bytes(capacity: int, num_readers: int = 1) -> int:
    """
    Size of a segment for a ring with this capacity in bytes, a power of two.
    """

def ring_init(segment: Segment, world_id: int, num_readers: int = 1) -> None:
    """
    Make a fresh segment a ring, its capacity the largest power of two that fits. With more than one reader each sees every record, and the slowest bounds the writer. [R6] [R7]
    """

def mark_writer_gone(segment: Segment, world_id: int) -> None:
    """
    The writer's process is dead: readers take what it published, then raise PeerGone.
    """

def mark_reader_gone(segment: Segment, world_id: int, index: int = 0) -> None:
    """
    The reader's process is dead: it no longer bounds the writer, which raises PeerGone when no reader is left.
    """

class RingWriter:
    """The writing end of a ring. Never waits; one thread at a time."""

    def __init__(self, segment: Segment, world_id: int) -> None:
        """Raises AbiMismatch, or IpcError when the ring has had a writer."""

    def try_append(self, type: int, parts: Sequence) -> bool:
        """
        Write one record, the parts' bytes one after the other, to be seen at the next publish(). False when there is no room: nothing changed. ValueError above max_length; PeerGone when nobody is left to read.
        """

    def try_append_outputs(self, heads: object, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        try_append an OutputRecord for each head (their bytes in a row), with its num_ids of the ids behind it; none may have an error text. Returns how many fitted.
        """

    def publish(self) -> None:
        """Show readers all that was appended; wakes those that sleep."""

    def try_write(self, type: int, parts: Sequence) -> bool:
        """try_append, then publish."""

    @property
    def free_bytes(self) -> int:
        """A record takes 8 bytes more than its parts, rounded up to 8."""

    @property
    def max_length(self) -> int:
        """Bytes of the longest record that ever fits."""

    def close(self) -> None:
        """Say that no record follows; what was published can still be read."""

class RingReader:
    """A reading end of a ring; one thread at a time."""

    def __init__(self, segment: Segment, world_id: int, index: int = 0) -> None:
        """Raises AbiMismatch, or IpcError when the ring has had this reader."""

    def read(self) -> tuple[int, bytes] | None:
        """
        The oldest record as (type, bytes), or None. IpcError when the ring holds no valid record.
        """

    def peek(self) -> tuple[int, numpy.typing.NDArray[numpy.uint8]] | None:
        """
        The oldest record as (type, bytes where they lie in the ring), or None. Read them, then pop().
        """

    def pop(self) -> None:
        """The peeked record's bytes are the writer's again."""

    def read_all(self, max_records: int = 1024) -> list[tuple[int, bytes]]:
        """All records there are, oldest first."""

    def wait(self, spin_ns: int, timeout_ns: int) -> bool:
        """
        True once there is something to read; False after timeout_ns, or earlier when a signal arrived. Spins for the first spin_ns, then sleeps. PeerGone when the writer is gone and nothing is left to read.
        """

    def close(self) -> None:
        """Stop counting as a reader: the writer no longer waits for this end."""

def board_segment_bytes(num_dp: int, num_ranks: int) -> int:
    """Size of a segment for a board with so many rows."""

def board_init(segment: Segment, world_id: int, num_dp: int, num_ranks: int) -> None:
    """Make a fresh segment a board, all rows zero. [R8]"""

class Board:
    """
    Rows that one process each writes and anybody reads, none ever waiting. [R8]
    """

    def __init__(self, segment: Segment, world_id: int) -> None:
        """Raises AbiMismatch."""

    @property
    def num_dp(self) -> int:
        """Number of LoadRows."""

    @property
    def num_ranks(self) -> int:
        """Number of RankRows."""

    def write_load(self, dp: int, row: object) -> None:
        """Replace a LoadRow; by the leader only."""

    def read_load(self, dp: int) -> bytes:
        """The bytes of the LoadRow last written, zeros before the first."""

    def write_rank(self, i: int, row: object) -> None:
        """Replace a RankRow; by that rank only."""

    def read_rank(self, i: int) -> bytes:
        """The bytes of the RankRow last written, zeros before the first."""

def signals_segment_bytes(num_ranks: int) -> int:
    """Size of a segment for the signals of so many ranks."""

def signals_init(segment: Segment, world_id: int, num_ranks: int) -> None:
    """Make a fresh segment the signals between ranks. [R11]"""

def mark_rank_gone(segment: Segment, world_id: int, rank: int) -> None:
    """The rank's process is dead: whoever waits for it sees PeerGone."""

class Signals:
    """One rank's end of the signals between all; one thread at a time. [R11]"""

    def __init__(self, segment: Segment, world_id: int, rank: int) -> None:
        """Raises AbiMismatch, or IpcError when the rank has had its end."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def set(self, to: int, value: int) -> None:
        """Tell a rank that we have come to value, which never falls."""

    def wait(self, of: int, value: int, spin_ns: int, timeout_ns: int) -> bool:
        """
        True once that rank has come to value; False after timeout_ns, or earlier when a signal arrived. PeerGone when it is gone and has not. Spins for the first spin_ns, then sleeps.
        """

    def export_memory(self, handle: bytes, num_bytes: int) -> None:
        """Show how to open our device memory, and its size; once."""

    def exported(self, of: int) -> tuple[bytes, int] | None:
        """
        (handle, bytes) of a rank's device memory, or None before it has shown it.
        """

    def close(self) -> None:
        """Nobody waits for this rank any more."""

class PrefixTree:
    """
    Which pages of one KV pool hold which prefix. [R27] One owner, one thread. A node is an int, the root is 0;
    any but a locked one may be gone after evict(). `now` is a counter that never goes back.
    """

    def __init__(self) -> None: ...

    def match(self, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)], now: int) -> tuple[int, int]:
        """
        (pages cached of this prefix, the node that ends there), all of it now last used. A node in whose middle
        it ends is split, so pages(node) is exactly the match.
        """

    def peek(self, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)]) -> int:
        """Pages cached of this prefix; changes nothing."""

    def lock(self, node: int) -> None:
        """Keep the node, and with it all before it, until as many unlock()."""

    def unlock(self, node: int) -> None: ...

    def pages(self, node: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Page numbers from the root to the end of the node."""

    def all_pages(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Every page in the tree, in no order."""

    def insert(self, node: int, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)], pages: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], now: int) -> tuple[int, Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
        """
        Put pages behind a node: (the node that ends there, the tree's page for each hash).

        Where the tree had a page of that hash it keeps its own: there the returned page differs from the one
        given, and the given one stays the caller's.
        """

    def evict(self, n: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint64], dict(shape=(None, 2))]]:
        """
        Drop up to n pages: (them, their hashes), the least recently used leaf first, each leaf from its tail.
        """

    @property
    def num_pages(self) -> int: ...

    @property
    def num_nodes(self) -> int:
        """Without the root."""

    @property
    def evictable_pages(self) -> int:
        """Pages in no locked node and before none: what evict() could drop."""

    def check(self) -> None:
        """
        Look at everything; raise RuntimeError saying which invariant is broken. Takes milliseconds.
        """

class TierIndex:
    """
    Which pages of KV a slower tier holds, by hash. [R32] One owner, one thread. An entry is an int, the place of a
    page among `capacity`; one that nobody pins goes when another needs the room, the least recently used first.
    """

    def __init__(self, capacity: int) -> None: ...

    def count(self, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)]) -> int:
        """How many of these pages, from the first on, are there."""

    def find(self, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Their entries; -1 of those that are not there."""

    def add(self, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C', device='cpu', writable=False)], filling: bool) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint64], dict(shape=(None, 2))]]:
        """
        Make room for pages: (their entries, the hashes dropped for them).

        An entry is -1 where the page is there or on its way, and so last used now; or all others are pinned: then
        the first hashes go without. filling: new ones are pinned and not found until settle().
        """

    def settle(self, entry: int, filled: bool) -> None:
        """
        A filling entry has its page now, or is free because it did not get it; it is unpinned.
        """

    def condemn(self, entries: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """These pinned ones are not found any more, and free when their pins go."""

    def pin(self, entries: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Keep these until as many unpin()."""

    def unpin(self, entries: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """They are last used when the last pin goes."""

    def clear(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None, 2))]:
        """Forget all that nobody pins; their hashes."""

    def __len__(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def num_pinned(self) -> int: ...

    def check(self) -> None:
        """
        Look at everything; raise RuntimeError saying which invariant is broken.
        """

def page_hashes(ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], page_size: int, key: bytes, seed: bytes) -> Annotated[NDArray[numpy.uint64], dict(shape=(None, 2))]:
    """
    The chained hash of each full page, uint64 [num_full_pages, 2]. [R19]

    key: 16 bytes. seed: what the chain starts from, any bytes; a page's 16 bytes continue behind it.
    """

class ByteVocab:
    """The bytes of each token id. Immutable: any thread may use it."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[bool]) -> None:
        """
        tokens: the bytes of id 0, 1, 2 ...; special: which of them a decoder may skip.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> bytes: ...

class Decoder:
    """
    Ids in any pieces to UTF-8, each character as soon as it is whole. [R39] One thread.

    All output together equals b''.join(tokens).decode('utf-8', errors='replace').
    """

    def __init__(self, vocab: ByteVocab, skip_special: bool) -> None: ...

    def feed(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bytes:
        """The UTF-8 that is certain now; an unknown id adds none."""

    def finish(self) -> bytes:
        """
        U+FFFD when a character has begun, else nothing. The decoder is fresh again.
        """

    @property
    def unknown_ids(self) -> int:
        """How many ids were outside the vocabulary."""

class TokenLogprob:
    """
    A token, the natural logarithm of its probability, and the likeliest ids'.
    """

    def __init__(self, id: int, logprob: float | None, top: Sequence[tuple[int, float]], is_prompt: bool = False) -> None: ...

    @property
    def id(self) -> int: ...

    @property
    def logprob(self) -> float | None:
        """None: of a prompt's first token, before which nothing stands."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """(id, logprob) of the likeliest ids, most likely first."""

    @property
    def is_prompt(self) -> bool:
        """A token of the prompt, else of the output."""

class Pump:
    """
    The thread that turns output records into frames. [R13] [R41] All methods are the event loop's.

    A handle's low 32 bits are its slot. Constructing takes the reading end of the output ring.
    """

    def __init__(self, segment: Segment, world_id: int, vocab: ByteVocab, max_slots: int, begin_reasoning_id: int, end_reasoning_id: int, piece_ids: Sequence[int]) -> None: ...

    def start(self) -> None:
        """Once."""

    def stop(self) -> None:
        """
        End the thread, within a tenth of a second. What it has made can still be taken.
        """

    def open(self, handle: int, content: tuple[bytes, bytes, bytes, bytes] | None, reasoning: tuple[bytes, bytes, bytes, bytes] | None, starts_in_reasoning: bool, with_ids: bool, skip_special: bool, python_ids: Sequence[int], all_python: bool, with_logprobs: bool = False) -> None:
        """
        How the request's tokens leave, see front/job.py's OutSpec. Before the request is sent.
        """

    def close(self, handle: int) -> None:
        """Forget the request: what still comes for it is stale."""

    def set_slow(self, handle: int, slow: bool) -> None:
        """
        While slow, text is kept; it leaves as one frame for each phase, pieces together.
        """

    def take(self) -> list[tuple[int, bytes, list[str | int | TokenLogprob], bytes | None, bytes, bytes, bytes, int, int]]:
        """
        All since the last take(), when fileno() is readable: for each stream one tuple
        (handle, frames, pieces, finish, text, reasoning, ids, reasoning_tokens, first_token_ns).

        pieces come behind the frames, some hundred at once: the rest with a next take(), and the finish with the
        last. finish: the last OutputRecord, whole, after which the handle is forgotten; else None; with it all ids
        (int32). text and reasoning come with the finish of a collected request; of a stream only text does, if its
        thinking has turned out to be its content. A record that is no output comes as
        (0, b'', [], payload, b'', b'', b'', its type, 0).
        """

    def fileno(self) -> int:
        """
        An eventfd, readable when there is something to take, and when writer_gone turns.
        """

    def stats(self) -> dict[str, int]:
        """Counts since the start, by name: see PumpStats."""

    @property
    def writer_gone(self) -> bool:
        """No more output will come; what came can still be taken."""

    @property
    def corrupt(self) -> bool:
        """writer_gone, because what lies in the ring cannot be read."""

def ready_rows(slots: NDArray, seq_len: NDArray, prefix_len: NDArray, end_len: NDArray, num_pages: NDArray, needs_value: NDArray, page_size: int, headroom: int, one_token: bool) -> tuple[NDArray, NDArray, NDArray]:
    """
    Of decoding slots, int32 each: (prefix_len of all, indices that sit out the next step, indices that lack pages). [R34]

    A slot whose last token is still being sampled sits out if it needs_value, if that is its last (end_len), and
    always without one_token, that is where a step may give several.
    """

def cut(slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_output: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], max_output: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ignore_eos: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], is_eos: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 2))]:
    """
    Where each row's block of tokens ends: int32 [n, 2] of (count, verdict). [R38]

    Behind the first end-of-turn id (verdict 1), or where max_output is reached (2); else the whole block (0).
    """

class TokenLog:
    """
    The ids that each slot's request has put out since it was admitted. One owner, one thread.
    """

    def __init__(self, max_slots: int) -> None: ...

    def advance(self, slots: NDArray, counts: NDArray, ids: NDArray, seq_len: NDArray, num_output: NDArray, token_ns: NDArray, now_ns: int) -> tuple[int, int]:
        """
        One step's tokens: ids[i, :counts[i]] go to slots[i], whose seq_len and num_output grow. All or nothing.

        token_ns: when each slot had its last one, 0: not yet; becomes now_ns. Returns how many tokens there were, and
        the longest time that a slot was without.
        """

    def get(self, slot: int, start: int = 0) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """A copy of the slot's ids from start on."""

    def leaving(self, slots: NDArray, num_output: NDArray, sent: NDArray, interval: NDArray, heads: NDArray, now_ns: int, all: bool) -> tuple[NDArray, NDArray, NDArray]:
        """
        Output records of those slots whose unsent ids should leave now: (slots, heads uint8 [n, record], ids of all).

        The first token at once, then every interval tokens; with all, whatever is unsent, and a head even for none.
        """

    def length(self, slot: int) -> int: ...

    def clear(self, slot: int) -> None:
        """The slot is free: its ids and their memory go."""

class StopTable:
    """
    The stop strings of the requests that run, by slot. [R38] [R40] One owner, one thread.
    """

    def __init__(self, max_slots: int, vocab: ByteVocab, end_reasoning_id: int, call_begin_id: int) -> None: ...

    def open(self, slot: int, stops: Sequence[bytes], ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], skip_special: bool, in_content: bool, before_calls: bool, keep_match: bool, min_ids: int = 0) -> int:
        """
        A request takes the slot, having put out ids; its held_bytes. ValueError when they have a stop string already.

        stops: bytes, none empty. in_content: what is before the first end_reasoning_id is not looked at. before_calls:
        nor what is from the first call_begin_id on. keep_match: what matches is shown; what is behind it never is.
        min_ids: the id that completes a string is this one, from 1 on, or a later one.
        """

    def feed(self, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 3))]:
        """
        One step's tokens, ids[i, :counts[i]] of slots[i], each open: int32 [n, 3] of (count, matched, held_bytes).

        count: the tokens up to the one that completes a stop string, matched its index; else all, and -1. held_bytes:
        of the text's end, what may be the beginning of a stop string; at a match, what is cut off.
        """

    def close(self, slot: int) -> None:
        """The slot is free. Does nothing for one without stop strings."""

class CpuLayer:
    """
    A layer for steps of a few tokens, float32, one thread. Keeps no weight alive.
    """

    def __init__(self, *, hidden: int, q_rank: int, kv_rank: int, rope: int, nope: int, value: int, heads: int, index_heads: int, index_dim: int, width: int, chosen: int, attention_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], mlp_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], kv_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], index_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, index_norm_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, from_x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], from_q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], kv_b: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], router: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)] | None, router_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, gate_up: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)]], down: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)]], floor: float, q_floor: float, kv_floor: float, index_eps: float, scaling: float) -> None:
        """
        Linears are [in, out]; kv_b is [heads * (nope + value), kv_rank]; gate_up and down are those of the routed
        experts, then of what sees every token. Norms as RmsNorm has them. Raises ValueError for a wrong size.
        """

    @property
    def all_queries(self) -> int:
        """The width of queries: those of all heads, then the indexer's."""

    def project(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, arg7: int, /) -> None:
        """
        Addresses of x, angles and locs, then of what is written: see native/include/glm53d/cpu_layer.h.
        """

    def choose(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, arg7: int, arg8: int, arg9: int, arg10: int, /) -> None:
        """Likewise; chosen and chosen_hidden are written."""

    def attend(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, /) -> None:
        """Likewise; attended is written."""

    def finish(self, arg0: int, arg1: int, arg2: int, /) -> None:
        """Likewise; x is added to."""

def set_parent_death_signal() -> None:
    """
    Have the kernel kill this process when the thread that spawned it ends. The caller then re-checks getppid(): the parent may already be gone.
    """
