"""
Native parts of glm53d: shared memory, prefix tree, hashing, decoding and framing.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class RecordLayout:
    """One fixed struct of records.h."""

    @property
    def size(self) -> int: ...

    @property
    def fields(self) -> list[tuple[str, str, int]]:
        """(name, numpy format, offset) of each field, in order."""

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
        """

    @staticmethod
    def attach(fd: int) -> Segment:
        """
        The memory behind a descriptor that create() made here or in the spawning process; takes fd over.
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

class PrefixTree:
    """
    Which pages of one KV pool hold which prefix. [R27] One owner, one thread. A node is an int, the root is 0;
    any but a locked one may be gone after evict(). `now` is a counter that never goes back.
    """

    def __init__(self, page_size: int) -> None: ...

    @property
    def page_size(self) -> int: ...

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

    def evict(self, n: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Drop up to n pages and return them, the least recently used leaf first, each leaf from its tail.
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

    def open(self, handle: int, content: tuple[bytes, bytes, bytes, bytes] | None, reasoning: tuple[bytes, bytes, bytes, bytes] | None, starts_in_reasoning: bool, with_ids: bool, skip_special: bool, python_ids: Sequence[int], all_python: bool) -> None:
        """
        How the request's tokens leave, see front/job.py's OutSpec. Before the request is sent.
        """

    def close(self, handle: int) -> None:
        """Forget the request: what still comes for it is stale."""

    def set_slow(self, handle: int, slow: bool) -> None:
        """
        While slow, text is kept; it leaves as one frame for each phase, pieces together.
        """

    def take(self) -> list[tuple[int, bytes, list[str | int], bytes | None, bytes, bytes, bytes, int, int]]:
        """
        All since the last take(), when fileno() is readable: for each stream one tuple
        (handle, frames, pieces, finish, text, reasoning, ids, reasoning_tokens, first_token_ns).

        pieces come behind the frames. finish: the last OutputRecord, whole, after which the handle is forgotten;
        else None; with it all ids (int32). text and reasoning come with the finish of a collected request; of a
        stream only text does, if its thinking has turned out to be its content. A record that is no output comes as
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
    The ids of each slot's request, prompt and output. One owner, one thread.
    """

    def __init__(self, max_slots: int) -> None: ...

    def reset(self, slot: int, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """A new request takes the slot; ids are all it has so far."""

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

    def __init__(self, max_slots: int, vocab: ByteVocab, end_reasoning_id: int) -> None: ...

    def open(self, slot: int, stops: Sequence[bytes], ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], skip_special: bool, in_content: bool, keep_match: bool) -> int:
        """
        A request takes the slot, having put out ids; its held_bytes. ValueError when they have a stop string already.

        stops: bytes, none empty. in_content: what is before the first end_reasoning_id is not looked at. keep_match:
        what matches is shown; what is behind it never is.
        """

    def feed(self, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 3))]:
        """
        One step's tokens, ids[i, :counts[i]] of slots[i], each open: int32 [n, 3] of (count, matched, held_bytes).

        count: the tokens up to the one that completes a stop string, matched its index; else all, and -1. held_bytes:
        of the text's end, what may be the beginning of a stop string; at a match, what is cut off.
        """

    def close(self, slot: int) -> None:
        """The slot is free. Does nothing for one without stop strings."""

def set_parent_death_signal() -> None:
    """
    Have the kernel kill this process when the thread that spawned it ends. The caller then re-checks getppid(): the parent may already be gone.
    """
