"""Pages in host memory and in files, through a real daemon and its restart. [R32]"""

from pathlib import Path

import aiohttp

from tests.helpers.daemon import Daemon, running

PAGE = 16
SIZES = (
    f"kv.page_size={PAGE}",
    "sim.num_pages=40",
    "sim.kv_bytes_per_token=100",
    "sim.base_ms=1",
    "cache.host_bytes=640000",  # 400 pages: half of them may wait to be written, so all that is saved gets a file
)


def sized(folder: Path) -> tuple[str, ...]:
    return (*SIZES, f"cache.storage_path={folder}")


async def answer(http: aiohttp.ClientSession, url: str, first_id: int) -> dict[str, int]:
    """Ask with a prompt of 25 pages that begins with this id; its cached tokens by tier."""
    body = {"input_ids": [first_id, *range(10, 9 + 25 * PAGE)], "sampling_params": {"max_new_tokens": 2}}
    async with http.post(url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        details = (await response.json())["meta_info"]["cached_tokens_details"]
        assert (details.pop("storage_backend", None) == "file") == (details["storage"] > 0)
        return details


async def loads(http: aiohttp.ClientSession, url: str) -> dict[str, int]:
    async with http.get(url + "/get_loads") as response:
        return (await response.json())[0]


async def wait_for_files(http: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Until all that was saved is in files, which results of steps say."""
    while (row := await loads(http, url))["pages_stored"] < row["pages_saved"]:
        await answer(http, url, 1)
    return row


async def test_what_a_pool_gave_up_is_found_in_host_memory_and_after_a_restart_in_files(http, tmp_path):
    with running(*sized(tmp_path / "kv"), config="sim.toml", log=tmp_path / "first.log") as daemon:
        assert await answer(http, daemon.url, 1) == {"device": 0, "host": 0, "storage": 0}
        await answer(http, daemon.url, 2)
        cached = await answer(http, daemon.url, 1)
        assert cached["host"] > 0 and sum(cached.values()) == 24 * PAGE
        row = await wait_for_files(http, daemon.url)
        assert row["cached_host_tokens"] >= cached["host"] and row["host_pages_used"] >= row["pages_saved"] > 0
        with_key = (tmp_path / "kv" / "key").stat()
        assert with_key.st_size == 16 and with_key.st_mode & 0o077 == 0
        second = Daemon(*sized(tmp_path / "kv"), config="sim.toml", log=tmp_path / "second.log", wait=False)
        assert second.process.wait(60) == 2 and "is in use by another daemon" in second.log.read_text()
    with running(*sized(tmp_path / "kv"), config="sim.toml", log=tmp_path / "again.log") as daemon:
        cached = await answer(http, daemon.url, 1)
        assert cached["storage"] > 0 == cached["host"] == cached["device"]
        row = await loads(http, daemon.url)
        assert row["cached_storage_tokens"] == cached["storage"] and row["pages_fetched"] * PAGE == cached["storage"]
        async with http.post(daemon.url + "/flush_cache") as flushed:
            assert flushed.status == 200
        assert sum((await answer(http, daemon.url, 1)).values()) == 0, "a flush is of all tiers"


async def test_damaged_files_are_misses_and_the_log_says_so_once(http, tmp_path):
    with running(*sized(tmp_path / "kv"), config="sim.toml", log=tmp_path / "first.log") as daemon:
        await answer(http, daemon.url, 1)
        await answer(http, daemon.url, 2)
        await wait_for_files(http, daemon.url)
    for path in (tmp_path / "kv").glob("*.kv"):
        path.write_bytes(bytes(path.stat().st_size))
    with running(*sized(tmp_path / "kv"), config="sim.toml", log=tmp_path / "again.log") as daemon:
        assert await answer(http, daemon.url, 1) == {"device": 0, "host": 0, "storage": 0}
        assert (await loads(http, daemon.url))["files_failed"] > 1
        assert daemon.log.read_text().count("a page of KV is computed again") == 1
