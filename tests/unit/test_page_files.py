"""Page files: whole or not there, whatever has happened to them. [R32]"""

import logging
import os
import threading

import numpy as np
import pytest

from glm53d.ipc.records import PAGE_MOVE, MoveKind
from glm53d.runner.page_files import HEAD, FileMoves, PageFiles

PAGE_BYTES = 5000
NAME = (5, (1 << 64) - 2)


def page(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def path_of(folder, lo: int, hi: int):
    return folder / f"{hi:016x}{lo:016x}.kv"


def moves(*rows: tuple[MoveKind, int, int, int]) -> np.ndarray:
    """(kind, host page, lo, id)."""
    array = np.zeros(len(rows), PAGE_MOVE)
    for move, (kind, at, lo, move_id) in zip(array, rows, strict=True):
        move["kind"], move["source"], move["target"], move["hash_lo"], move["id"] = kind, at, at, lo, move_id
    return array


def test_what_is_written_is_read_by_its_name_and_no_other(tmp_path):
    files, got = PageFiles(tmp_path, PAGE_BYTES), np.zeros(PAGE_BYTES, np.uint8)
    files.write(*NAME, memoryview(page(1)))
    PageFiles(tmp_path, PAGE_BYTES).read(*NAME, memoryview(got))
    assert np.array_equal(got, page(1))
    assert os.stat(path_of(tmp_path, *NAME)).st_mode & 0o077 == 0
    path_of(tmp_path, *NAME).rename(path_of(tmp_path, 6, 6))
    with pytest.raises(ValueError, match="damaged"):
        files.read(6, 6, memoryview(got))
    with pytest.raises(OSError, match="No such file"):
        files.read(*NAME, memoryview(got))


@pytest.mark.parametrize("at", [0, 8, 16, 31, HEAD.size, HEAD.size + PAGE_BYTES - 1])
def test_a_flipped_bit_anywhere_is_found(tmp_path, at):
    files = PageFiles(tmp_path, PAGE_BYTES)
    files.write(*NAME, memoryview(page(1)))
    data = bytearray(path_of(tmp_path, *NAME).read_bytes())
    data[at] ^= 4
    path_of(tmp_path, *NAME).write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        files.read(*NAME, memoryview(np.zeros(PAGE_BYTES, np.uint8)))


@pytest.mark.parametrize("length", [0, 10, HEAD.size, HEAD.size + PAGE_BYTES - 1, HEAD.size + PAGE_BYTES + 1])
def test_a_file_of_another_length_is_found_and_gone_at_the_next_start(tmp_path, length):
    files = PageFiles(tmp_path, PAGE_BYTES)
    files.write(*NAME, memoryview(page(1)))
    data = path_of(tmp_path, *NAME).read_bytes() + b"more"
    path_of(tmp_path, *NAME).write_bytes(data[:length])
    with pytest.raises(ValueError, match="not as long"):
        files.read(*NAME, memoryview(np.zeros(PAGE_BYTES, np.uint8)))
    assert len(files.scan()) == 0 and not path_of(tmp_path, *NAME).exists()


def test_a_scan_gives_names_by_last_use_and_sweeps_up_what_a_crash_left(tmp_path):
    files = PageFiles(tmp_path, PAGE_BYTES)
    for lo in (3, 1, 2):
        files.write(lo, 7, memoryview(page(lo)))
        os.utime(path_of(tmp_path, lo, 7), ns=(lo, lo))
    files.read(1, 7, memoryview(np.zeros(PAGE_BYTES, np.uint8)))
    (tmp_path / "abc.kv.12.new").write_bytes(b"half")
    (tmp_path / "key").write_bytes(b"ours, but no page")
    assert files.scan().tolist() == [[2, 7], [3, 7], [1, 7]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".kv") == ["key"]


def test_a_write_that_fails_leaves_nothing(tmp_path):
    files = PageFiles(tmp_path, PAGE_BYTES)
    path_of(tmp_path, *NAME).mkdir()  # the rename cannot replace it
    with pytest.raises(OSError, match="directory"):
        files.write(*NAME, memoryview(page(1)))
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, *NAME).name]


def test_moves_are_done_in_order_and_named_when_they_have_ended(tmp_path):
    host = np.stack([page(0), page(1), np.zeros(PAGE_BYTES, np.uint8)])
    threads, may_begin = FileMoves(PageFiles(tmp_path, PAGE_BYTES), host), threading.Event()
    stores = moves((MoveKind.STORE, 0, 10, 4), (MoveKind.STORE, 1, 11, 5), (MoveKind.DROP, 0, 10, 0))
    threads.submit(stores, may_begin.wait)
    assert [ids.tolist() for ids in threads.ended(0)] == [[], []] and not list(tmp_path.iterdir())
    may_begin.set()
    done: list[int] = []
    while len(done) < 2:
        done += threads.ended(0)[0].tolist()
    threads.submit(moves((MoveKind.FETCH, 2, 11, 6), (MoveKind.FETCH, 2, 12, 0)), lambda: None)
    good: list[int] = []
    bad: list[int] = []
    while len(good) + len(bad) < 2:
        for mine, ids in zip((good, bad), threads.ended(1_000_000), strict=True):
            mine += ids.tolist()
    threads.close()
    assert (done, good, bad) == ([4, 5], [6], [0])
    assert np.array_equal(host[2], page(1)) and not path_of(tmp_path, 10, 0).exists()


@pytest.mark.parametrize("kind", [MoveKind.STORE, MoveKind.FETCH])
def test_what_ends_a_thread_is_raised_where_moves_would_be_waited_for(tmp_path, kind):
    def fail() -> None:
        raise RuntimeError("the device is gone")

    threads = FileMoves(PageFiles(tmp_path, PAGE_BYTES), np.zeros((1, PAGE_BYTES), np.uint8))
    threads.submit(moves((kind, 0, 1, 0)), fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        while True:
            assert [ids.tolist() for ids in threads.ended(1000)] == [[], []]
    threads.close()


def test_a_damaged_file_is_a_failed_move_deleted_and_said_once(tmp_path, caplog):
    files, host = PageFiles(tmp_path, PAGE_BYTES), np.zeros((1, PAGE_BYTES), np.uint8)
    for lo in (1, 2):
        files.write(lo, 0, memoryview(page(lo)))
        path_of(tmp_path, lo, 0).write_bytes(b"\0" * (HEAD.size + PAGE_BYTES))
    threads, failed = FileMoves(files, host), []
    with caplog.at_level(logging.WARNING):
        threads.submit(moves((MoveKind.FETCH, 0, 1, 0), (MoveKind.FETCH, 0, 2, 1)), lambda: None)
        while len(failed) < 2:
            failed += threads.ended(1_000_000)[1].tolist()
    threads.close()
    assert failed == [0, 1] and not list(tmp_path.iterdir())
    assert len(caplog.records) == 1 and "damaged" in caplog.text


@pytest.mark.parametrize("name", [".kv", "x.kv", "g" * 32 + ".kv", "1" * 33 + ".kv", "é.kv", "key", "lost+found"])
def test_what_no_page_is_called_is_not_ours(tmp_path, name):
    """It is no reason not to start, nor to be deleted."""
    files = PageFiles(tmp_path, PAGE_BYTES)
    files.write(*NAME, memoryview(page(1)))
    (tmp_path / name).write_bytes(path_of(tmp_path, *NAME).read_bytes())
    assert files.scan().tolist() == [list(NAME)]
    assert (tmp_path / name).exists()


def test_a_link_that_leads_nowhere_is_no_page(tmp_path):
    path_of(tmp_path, *NAME).symlink_to(tmp_path / "missing")
    assert not len(PageFiles(tmp_path, PAGE_BYTES).scan())
