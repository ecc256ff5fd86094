"""The native page hash against SipHash written out in Python."""

import numpy as np
import pytest

from glm53d._native import page_hashes

MASK = (1 << 64) - 1
KEY = bytes(range(16))


def siphash128(key: bytes, data: bytes, c: int, d: int) -> bytes:
    """SipHash-c-d with 128-bit output, as in the paper's reference."""

    def rotl(x: int, n: int) -> int:
        return (x << n | x >> (64 - n)) & MASK

    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rounds(n: int) -> None:
        for _ in range(n):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = rotl(v[1], 13) ^ v[0]
            v[0] = rotl(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = rotl(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = rotl(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = rotl(v[1], 17) ^ v[2]
            v[2] = rotl(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        rounds(c)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(d)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(d)
    return low.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def chain(ids: np.ndarray, page_size: int, seed: bytes) -> np.ndarray:
    hashes = []
    for i in range(len(ids) // page_size):
        seed = siphash128(KEY, seed + ids[i * page_size : (i + 1) * page_size].tobytes(), 1, 3)
        hashes.append(np.frombuffer(seed, np.uint64))
    return np.array(hashes, np.uint64).reshape(-1, 2)


def test_the_reference_gives_the_published_siphash_vectors():
    assert siphash128(KEY, b"", 2, 4).hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash128(KEY, bytes(range(15)), 2, 4).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("seed", [b"", b"abc", bytes(range(16)), bytes(300)])
def test_every_full_page_hash_equals_the_reference_chain(page_size, seed):
    """[R19]"""
    ids = np.random.default_rng(page_size).integers(0, 1 << 31, 5 * page_size + page_size // 2, np.int32)
    hashes = page_hashes(ids, page_size, KEY, seed)
    assert hashes.dtype == np.uint64
    assert np.array_equal(hashes, chain(ids, page_size, seed))


def test_a_chain_goes_on_from_the_hash_of_the_page_before():
    ids = np.arange(64 * 7, dtype=np.int32)
    whole = page_hashes(ids, 64, KEY, b"fingerprint")
    rest = page_hashes(ids[64 * 3 :], 64, KEY, whole[2].tobytes())
    assert np.array_equal(rest, whole[3:])


def test_one_changed_id_changes_its_page_and_all_behind_it():
    ids = np.arange(64 * 4, dtype=np.int32)
    before = page_hashes(ids, 64, KEY, b"")
    ids[64] += 1
    after = page_hashes(ids, 64, KEY, b"")
    assert np.array_equal(before[0], after[0])
    assert all((before[i] != after[i]).any() for i in (1, 2, 3))


def test_another_key_or_seed_shares_no_page():
    ids = np.arange(128, dtype=np.int32)
    base = page_hashes(ids, 64, KEY, b"")
    assert (page_hashes(ids, 64, bytes(16), b"") != base).all()
    assert (page_hashes(ids, 64, KEY, b"salt") != base).all()


def test_wrong_arguments_are_refused():
    ids = np.arange(64, dtype=np.int32)
    with pytest.raises(ValueError, match="16 bytes"):
        page_hashes(ids, 64, b"short", b"")
    with pytest.raises(ValueError, match="page_size"):
        page_hashes(ids, 0, KEY, b"")
    with pytest.raises(TypeError):
        page_hashes(ids.astype(np.int64), 64, KEY, b"")
