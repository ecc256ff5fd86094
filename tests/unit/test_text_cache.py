"""The cache of texts, and what the model wrote coming back in its own ids. [R18] [R52]"""

import threading
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from glm53d.text.cache import ENTRY_TOKENS, IdCache, key_of
from glm53d.text.cuts import MAX_SLICE_BYTES
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

NANO = Path(str(files("glm53d.nano") / "tokenizer.json"))
VOCAB = Vocab.load(NANO)
THINK, THINK_END, USER = (VOCAB.added[spelling] for spelling in ("<think>", "</think>", "<|user|>"))


@pytest.fixture
def encoder():
    return Encoder(NANO, VOCAB, max_threads=1, cache_tokens=100_000)


def ids(count: int, value: int = 1) -> np.ndarray:
    return np.full(count, value, np.int32)


def split_up(text: str) -> np.ndarray:
    """A text byte by byte: ids that no encoder gives."""
    single = {bytes: i for i, bytes in enumerate(VOCAB.token_bytes) if len(bytes) == 1}
    return np.array([single[bytes([byte])] for byte in text.encode()], np.int32)


def test_the_oldest_go_when_tokens_are_too_many():
    cache = IdCache(3 * (10 + ENTRY_TOKENS))
    cache.put([(bytes([i]), ids(10, i)) for i in range(3)])
    assert cache.get([b"\0"])[0] is not None  # now the youngest
    cache.put([(b"\3", ids(10, 3))])
    found = cache.get([bytes([i]) for i in range(4)])
    assert [None if x is None else int(x[0]) for x in found] == [0, None, 2, 3]
    assert cache.stats() == {
        "hits": 4, "hit_tokens": 40, "misses": 1, "evictions": 1, "entries": 3, "tokens": 30,
    }  # fmt: skip


def test_what_is_larger_than_the_cache_is_not_kept_and_what_is_put_again_is_replaced():
    cache = IdCache(100 + ENTRY_TOKENS)
    cache.put([(b"a", ids(50))])
    cache.put([(b"b", ids(101))])
    assert cache.get([b"a", b"b"])[1] is None
    cache.put([(b"a", ids(20, 7))])
    assert cache.get([b"a"])[0].tolist() == [7] * 20
    assert cache.stats()["tokens"] == 20 and cache.stats()["evictions"] == 0


def test_keys_differ_by_text_and_by_who_wrote_it():
    keys = {key_of([b"ab"]), key_of([b"ba"]), key_of([b"ab"], THINK), key_of([b"ab"], THINK_END)}
    assert len(keys) == 4
    assert key_of([b"a", b"b"], THINK) == key_of([b"ab"], THINK)


def test_the_second_time_a_text_comes_from_the_cache(encoder):
    """[R18] Slices of a long text count one by one, so a text that has grown encodes its end only."""
    long = "one two, three.\n" * (4 * MAX_SLICE_BYTES // 16)
    first = encoder.encode_segments([1, "system prompt", 2, long])
    misses = encoder.stats()["misses"]
    assert misses >= 5
    again = encoder.encode_segments([1, "system prompt", 2, long + "and more"])
    assert again[: len(first) - 10].tolist() == first[: len(first) - 10].tolist()
    assert encoder.stats()["misses"] == misses + 1
    assert encoder.stats()["hits"] == misses - 1
    assert encoder.encode_text(long).tolist() == encoder.encode_segments([long]).tolist()


def test_what_the_model_wrote_comes_back_in_the_ids_it_wrote(encoder):
    """[R52] At its place; behind other control ids, and in raw prompts, the text is encoded plainly."""
    reasoning, content = split_up("I think, therefore."), split_up("Hello 世界!")
    plain = {text: encoder.encode_segments([text]).tolist() for text in ("I think, therefore.", "Hello 世界!")}
    assert plain["I think, therefore."] != reasoning.tolist()
    encoder.remember(np.concatenate([reasoning, [THINK_END], content, [USER]]).astype(np.int32), after=THINK)
    turn = [THINK, "I think, therefore.", THINK_END, "Hello 世界!", USER, "Hello 世界!"]
    assert encoder.encode_segments(turn).tolist() == [
        THINK, *reasoning, THINK_END, *content, USER, *plain["Hello 世界!"],
    ]  # fmt: skip
    assert encoder.encode_segments([USER, "I think, therefore."]).tolist() == [USER, *plain["I think, therefore."]]
    assert encoder.encode_text("<think>I think, therefore.").tolist() == [THINK, *plain["I think, therefore."]]


def test_a_cut_off_turn_and_one_with_calls_are_remembered_part_by_part(encoder):
    """[R52]"""
    call, key = VOCAB.added["<tool_call>"], VOCAB.added["<arg_key>"]
    name, argument = split_up("get_weather"), split_up("city")
    written = [THINK_END, call, *name, key, *argument]
    encoder.remember(np.array(written, np.int32), after=THINK)
    assert encoder.encode_segments([call, "get_weather", key, "city"]).tolist() == written[1:]


def test_the_end_of_a_character_that_was_cut_is_remembered_as_it_was_shown(encoder):
    """[R52] The client has U+FFFD and sends it back."""
    half = split_up("世")[:2]
    encoder.remember(half, after=THINK)
    assert encoder.encode_segments([THINK, "\ufffd"]).tolist() == [THINK, *half]


def test_a_turn_is_found_by_another_thread_that_comes_while_it_is_put_in(encoder, monkeypatch):
    """[R52]"""
    written, found, put = split_up("Hello"), [], encoder._cache.put
    met = threading.Event()  # the other thread is done, or waits for this one

    class Lock:
        def __init__(self):
            self._lock = threading.Lock()

        def __enter__(self):
            if threading.current_thread() is other:
                met.set()
            self._lock.acquire()

        def __exit__(self, *_):
            self._lock.release()

    def look():
        found.extend(encoder.encode_segments([THINK_END, "Hello"]).tolist())
        met.set()

    def put_slowly(entries):
        if threading.current_thread() is not other:
            other.start()
            met.wait()
        put(entries)

    other = threading.Thread(target=look)
    monkeypatch.setattr(encoder, "_written_lock", Lock())
    monkeypatch.setattr(encoder._cache, "put", put_slowly)
    encoder.remember(written, after=THINK_END)
    encoder._learn_written()
    other.join()
    assert found == [THINK_END, *written]


def test_ids_outside_the_vocabulary_are_no_part_of_what_is_remembered(encoder):
    """They have no text, and the next turn is another client's perhaps."""
    written = split_up("Hello")
    encoder.remember(np.array([-1, *written, VOCAB.size, 1 << 30], np.int32), after=THINK_END)
    assert encoder.encode_segments([THINK_END, "Hello"]).tolist() == [THINK_END, *written]
