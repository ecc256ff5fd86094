"""A router that has subscribed finds the prompt it sends in what it was told. [R31]"""

import msgspec
import zmq
import zmq.asyncio

from tests.helpers.daemon import free_port, running

PROMPT = list(range(100, 300))


async def test_the_pages_of_a_prompt_are_published_and_a_flush_takes_them_back(tmp_path, http):
    port, replay = free_port(), free_port()
    settings = (f"kv_events.endpoint=tcp://127.0.0.1:{port}", f"kv_events.replay_endpoint=tcp://127.0.0.1:{replay}")
    with running(*settings, "kv.page_size=16", config="sim.toml", log=tmp_path / "log") as daemon:
        async with http.get(daemon.url + "/server_info") as answer:
            where = (await answer.json())["kv_events"]
        assert (where["publisher"], where["block_size"], where["dp_size"]) == ("zmq", 16, 1)
        assert (where["endpoint_port_base"], where["replay_endpoint_port_base"]) == (port, replay)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        async with http.post(daemon.url + "/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
        async with http.post(daemon.url + "/flush_cache") as answer:
            assert (await answer.json())["pages"] == 12

        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.rcvtimeo, asker.linger = 20_000, 0
            asker.connect(f"tcp://127.0.0.1:{replay}")
            events = []
            while not events or events[-1]["type"] != "BlockRemoved":  # the leader publishes behind its answer
                events.clear()
                await asker.send_multipart([b"", bytes(8)])
                while (answer := await asker.recv_multipart())[2] != b"\xff" * 8:
                    events += msgspec.msgpack.decode(answer[3])[1]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert events[1]["token_ids"] == PROMPT[:192]
    assert sorted(events[1]["block_hashes"]) == sorted(events[2]["block_hashes"])
