"""Text to ids: segments of a rendered chat, or a raw prompt. int32 arrays throughout. [R17] [R18]

One encoder, built from the tokenizer.json without its added tokens, encodes plain text; ids of control tokens are put
between. So what a chat's text spells never becomes a control token, and a raw prompt, where a spelled one is meant, is
cut at them first. Both give the ids of encoding the whole text at once, because a tokenizer cuts there too before it
looks at anything else.

    segments -> texts -> slices -> the cache; what it lacks in batches to the library -> ids, control ids between

The one wanted exception is what the model itself wrote: as text of a later turn it has the ids that it was written in,
so that the turn extends the cached pages. [R52]
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from threading import Lock

import numpy as np

from glm53d._native import ByteVocab, Decoder
from glm53d.errors import ContextTooLong, InvalidRequest
from glm53d.text import backend, cuts
from glm53d.text.cache import IdCache, key_of
from glm53d.text.decode import decode
from glm53d.text.spellings import Spellings
from glm53d.text.vocab import Vocab

WRITES_AFTER = ("<think>", "</think>", "<tool_call>", "<arg_key>", "<arg_value>")
"""Control tokens behind which the text of an assistant's turn is what the model wrote."""

ANY = 1 << 48  # no prompt has so many ids

TIMES_COUNTED = 4
"""Of a prompt that is too long all tokens are counted up to so many times what may be, to tell by how much it is."""

MAX_BATCH_BYTES = 1 << 18  # handed to the library at once: it copies them under the GIL
MAX_BATCH_TEXTS = 512


class Encoder:
    """Text -> ids of one tokenizer. Any number of threads may use it at once; the work runs without the GIL."""

    def __init__(self, path: Path, vocab: Vocab, max_threads: int, cache_tokens: int = 0):
        """Build from a tokenizer.json; takes seconds for a file of 20 MB.

        Args:
            vocab: of the same file; its added tokens are those of raw prompts.
            max_threads: threads of the tokenizer library for one batch. Its pool belongs to the process: the first
                Encoder decides, or FASTOKENS_BPE_THREADS and RAYON_NUM_THREADS when they are set.
            cache_tokens: ids kept of texts seen before, 0: none.
        Raises:
            CheckpointError: the file cannot be read or is no tokenizer.
        """
        os.environ.setdefault("FASTOKENS_BPE_THREADS", str(max_threads))
        os.environ.setdefault("RAYON_NUM_THREADS", str(max_threads))
        self._backend, self._can_cut = backend.load(path)
        self._cache = IdCache(cache_tokens)
        self._bytes = ByteVocab(vocab.token_bytes, vocab.special)
        self._added = vocab.added
        self._is_added = np.zeros(len(vocab.token_bytes), bool)
        self._is_added[list(vocab.added.values())] = True
        self._writes_after = {vocab.added[spelling] for spelling in WRITES_AFTER if spelling in vocab.added}
        self._spellings = Spellings(vocab.added)
        self._written: deque[tuple[int, np.ndarray]] = deque()  # turns that have ended, not yet in the cache
        self._written_lock = Lock()

    @property
    def backend(self) -> str:
        """The library that encodes: "fastokens", or "tokenizers" when that one is missing or differed."""
        return self._backend.name

    def stats(self) -> dict[str, int]:
        """Hits, misses and contents of the cache of texts."""
        return self._cache.stats()

    def split(self, text: str) -> list[str | int]:
        """A text as segments: what spells an added token is that token."""
        return [self._added.get(part, part) for part in self._spellings.split(text) if part]

    def encode_text(self, text: str, longest: int = ANY) -> np.ndarray:
        """Ids of a raw prompt: what spells an added token is that token. Else as encode_segments()."""
        return self._encode(self.split(text), longest, may_be_written=False)

    def encode_segments(self, segments: Sequence[str | int], longest: int = ANY) -> np.ndarray:
        """Ids of a chat's texts and control ids in their order. Text is only ever text, whatever it spells.

        Args:
            longest: of a prompt with more ids nothing is put into the cache, where it would drive out what is of use.
        Raises:
            InvalidRequest: for text with a lone surrogate, which has no UTF-8 form.
            ContextTooLong: once there are more than TIMES_COUNTED times `longest`.
        """
        self._learn_written()
        return self._encode(segments, longest, may_be_written=True)

    def decode(self, ids: np.ndarray, *, skip_special: bool) -> str:
        """The text of ids, int32; those outside the vocabulary have none."""
        return decode(self._bytes, ids, skip_special=skip_special)

    def remember(self, ids: np.ndarray, after: int) -> None:
        """A turn has ended in which the model wrote these ids behind the control id `after`. Returns at once.

        From now on encode_segments() gives each of its texts, where it stands behind the same control id, in these ids.
        """
        self._written.append((after, ids))

    def _learn_written(self) -> None:
        # A later turn comes through here before it looks anything up, and behind the lock: its texts are in by then.
        if not self._written:
            return
        with self._written_lock:
            while self._written:
                after, ids = self._written[0]
                self._cache.put(list(self._written_texts(ids, after)))
                self._written.popleft()  # not before: who finds none here does not wait for the lock

    def _written_texts(self, ids: np.ndarray, after: int) -> Iterator[tuple[bytes, np.ndarray]]:
        """The texts between a turn's control ids, as entries of the cache."""
        decoder = Decoder(self._bytes, True)
        ids = ids[(ids >= 0) & (ids < len(self._is_added))]
        borders = self._is_added[ids].nonzero()[0].tolist()
        for before, border in pairwise([-1, *borders, len(ids)]):
            run = ids[before + 1 : border]
            if before >= 0:
                after = int(ids[before])
            if len(run) and after in self._writes_after:
                yield key_of((decoder.feed(run), decoder.finish()), after), run.copy()

    def _encode(self, segments: Sequence[str | int], longest: int, *, may_be_written: bool) -> np.ndarray:
        """The ids of segments; of texts behind WRITES_AFTER perhaps those that the model wrote them in."""
        writes_after = self._writes_after if may_be_written else ()
        parts: list[_Text | int] = []
        after = None
        for segment in segments:
            if isinstance(segment, str):
                slices = list(cuts.slices(segment)) if self._can_cut else [segment]
                parts.append(_Text.of(slices, after if after in writes_after else None))
            else:
                parts.append(segment)
                after = segment
                _check_number(len(parts), longest)
        texts = [part for part in parts if isinstance(part, _Text)]
        self._find_written(texts)
        made = self._find_or_encode([text for text in texts if not text.ids], longest)
        ids = _joined(parts)
        if len(ids) <= longest:
            self._cache.put(made)
        return ids

    def _find_written(self, texts: "Sequence[_Text]") -> None:
        keyed = [(text, text.written_key) for text in texts if text.written_key is not None]
        found = self._cache.get([key for _, key in keyed], count_misses=False)
        for (text, _), ids in zip(keyed, found, strict=True):
            if ids is not None:
                text.ids = [ids]

    def _find_or_encode(self, texts: "Sequence[_Text]", longest: int) -> list[tuple[bytes, np.ndarray]]:
        """Give the texts their ids; those that were not in the cache, as its entries."""
        keys = [key for text in texts for key in text.keys]
        slices = [piece for text in texts for piece in text.slices]
        found = self._cache.get(keys)
        lacking = [i for i, ids in enumerate(found) if ids is None]
        num_ids = sum(len(ids) for ids in found if ids is not None)
        for batch in _batches(lacking, slices):
            ids, starts = self._backend.encode([slices[i] for i in batch])
            for i, (start, end) in zip(batch, pairwise(starts.tolist()), strict=True):
                found[i] = ids[start:end].copy()  # a view would keep the whole batch alive
            num_ids += len(ids)
            _check_number(num_ids, longest)
        whole = [ids for ids in found if ids is not None]
        rest = iter(whole)
        for text in texts:
            text.ids = list(islice(rest, len(text.keys)))
        return [(keys[i], whole[i]) for i in lacking]


def _check_number(num_ids: int, longest: int) -> None:
    if num_ids > (most := TIMES_COUNTED * longest):
        raise ContextTooLong(f"The prompt has more than {most} tokens; at most {longest} fit.")


@dataclass(slots=True)
class _Text:
    """One text on its way to its ids."""

    slices: list[str]
    keys: list[bytes]  # of each slice
    written_key: bytes | None  # of the whole, as what the model wrote
    ids: list[np.ndarray]

    @classmethod
    def of(cls, slices: list[str], after: int | None) -> "_Text":
        try:
            utf8 = [piece.encode() for piece in slices]
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has a lone surrogate (U+{ord(error.object[error.start]):04X}), which is not valid Unicode."
            ) from None
        return cls(slices, [key_of([data]) for data in utf8], None if after is None else key_of(utf8, after), [])


def _batches(places: Sequence[int], slices: Sequence[str]) -> Iterator[list[int]]:
    """The places in groups whose slices may be handed over together."""
    batch: list[int] = []
    num_bytes = 0
    for i in places:
        size = len(slices[i]) if slices[i].isascii() else 4 * len(slices[i])
        if batch and (num_bytes + size > MAX_BATCH_BYTES or len(batch) == MAX_BATCH_TEXTS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(i)
        num_bytes += size
    if batch:
        yield batch


def _joined(parts: "Sequence[_Text | int]") -> np.ndarray:
    """Ids of texts and control ids, one after the other."""
    out = np.empty(sum(sum(map(len, part.ids)) if isinstance(part, _Text) else 1 for part in parts), np.int32)
    at = 0
    for part in parts:
        if isinstance(part, int):
            out[at] = part
            at += 1
            continue
        for ids in part.ids:
            out[at : at + len(ids)] = ids
            at += len(ids)
    return out
