"""The daemon on several ranks: the answers of one, and no socket that the outside could reach. [R1] [R43]"""

import asyncio
import contextlib
import os
import re
from pathlib import Path

import aiohttp
import pytest

from glm53d.nano.weights import PACKAGE
from tests.helpers.daemon import Daemon, idle_info, running
from tests.model.synthetic import make_checkpoint

PROMPTS = [list(range(start, start + length)) for start, length in ((5, 40), (5, 60), (300, 7), (5, 33), (900, 90))]
POOL = (
    "kv.num_pages=128", "kv.page_size=16",
    "scheduler.debug_checks=true", "scheduler.max_step_tokens=64", "scheduler.max_running_requests=16",
)  # fmt: skip


async def answers(session: aiohttp.ClientSession, url: str) -> list[list[int]]:
    """Some requests at once, greedy and seeded, then the first again behind its own cached prefix."""

    async def one(index: int) -> list[int]:
        temperature = 0.8 * (index % 2)
        sampling = {"temperature": temperature, "seed": index, "max_new_tokens": 10, "ignore_eos": True}
        body = {"input_ids": PROMPTS[index], "sampling_params": sampling}
        async with session.post(url + "/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["output_ids"]

    together = await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))
    return [*together, await one(0)]


def listeners(daemon: Daemon) -> list[tuple[str, int, int]]:
    """(address in hex, port, pid) of every listening TCP socket of the daemon's processes."""
    owner = {}
    for pid in daemon.pids():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                owner[os.readlink(fd)] = pid
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{daemon.process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owner:
                found.append((address, int(port, 16), owner[f"socket:[{fields[9]}]"]))
    return found


@pytest.mark.parametrize(("tp_size", "attn_dp_size", "ep_size"), [(2, 1, 2), (4, 2, 2)])
async def test_many_ranks_answer_as_one_does(nano, http, tmp_path, monkeypatch, tp_size, attn_dp_size, ep_size):
    """Equal ids from the HTTP port on; all pools empty again; listening: the HTTP port, and torch on loopback."""
    expected = await answers(http, nano.url)
    (rendezvous := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(rendezvous))
    layout = (f"parallel.tp_size={tp_size}", f"parallel.attn_dp_size={attn_dp_size}", f"parallel.ep_size={ep_size}")
    with running(*layout, *POOL, log=tmp_path / "log") as daemon:
        assert not list(rendezvous.iterdir())  # gone as soon as all ranks have met
        assert await answers(http, daemon.url) == expected
        info = await idle_info(http, daemon.url)
        assert len(info["loads"]) == attn_dp_size
        assert all(load["pages_owned"] == load["pages_locked"] == 0 for load in info["loads"])
        heard = listeners(daemon)
        assert all(address == "0100007F" for address, _, _ in heard)
        assert [port for _, port, pid in heard if pid == daemon.process.pid] == [daemon.port]
        assert {pid for _, _, pid in heard} <= set(daemon.pids())
        assert daemon.stop() == 0
    assert not list(rendezvous.iterdir())
    assert "Traceback" not in daemon.log.read_text()


async def test_drafts_of_an_official_checkpoint_change_no_answer(http, tmp_path):
    """FP8 blocks and rows, MTP layer, two KV pools: blocks of several tokens reach clients as if one by one. [R36]"""
    make_checkpoint(tmp_path / "model", 2, predictable=True, vocab_size=2048)
    model = (
        f"model.path={tmp_path / 'model'}",
        f"tokenizer.path={PACKAGE}",
        "kv.dtype=fp8",
        "model.max_context_len=512",
    )
    found, steps = [], []
    for more in ((), ("speculation.num_draft_tokens=4", "parallel.tp_size=2", "parallel.attn_dp_size=2")):
        with running(*model, *more, *POOL, log=tmp_path / "log") as daemon:
            found.append(await answers(http, daemon.url))
            steps.append((await idle_info(http, daemon.url))["loads"][0]["steps"])
            async with http.get(daemon.url + "/metrics") as answer:
                shown = await answer.text()
            assert daemon.stop() == 0
    assert found[1] == found[0]
    assert all(len(ids) == 10 for ids in found[0])
    assert steps[1] < 0.7 * steps[0]
    names = ("verified", *(f"accepted_{place}" for place in range(1, 6)))
    counts = [re.search(rf"glm53d_node_drafts_{name}_total (\d+)", shown)[1] for name in names]
    verified, *accepted = map(int, counts)
    assert accepted == sorted(accepted, reverse=True) and verified >= accepted[0] > 0 == accepted[4]
