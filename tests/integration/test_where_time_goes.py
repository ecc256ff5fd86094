"""What a client waits for shows in numbers, from the last byte of its request on. [R23] [R24]"""

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from glm53d.front.job import STAGES
from tests.helpers.daemon import running

PROMPT = "A prompt of some length, so that there is something to compute. " * 20


async def samples(http, url: str) -> dict[str, float]:
    """Of the daemon's own metrics, over all labels, and of stages each by itself."""
    async with http.get(url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if "stage" in sample.labels and sample.name.endswith("_sum"):
                found[sample.labels["stage"]] = sample.value
    return found


async def test_waiting_is_part_of_the_time_to_first_token_that_is_measured(tmp_path, http):
    """[F-I8] 32 requests at once for one place: the metric has what clients see."""
    settings = ("scheduler.max_running_requests=1", "sim.base_ms=2")

    async def ask(i: int) -> tuple[float, dict]:
        body = {"model": "glm-5.3-nano", "prompt": f"{i} {PROMPT}", "max_tokens": 2, "ignore_eos": True}
        start = time.monotonic()
        async with http.post(daemon.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            timings = (await answer.json())["timings"]
        return time.monotonic() - start, timings

    with running(*settings, config="sim.toml", log=tmp_path / "log") as daemon:
        before = await samples(http, daemon.url)
        asked = await asyncio.gather(*(ask(i) for i in range(32)))
        after = await samples(http, daemon.url)
    ttft = [timings["first_token_latency"] for _, timings in asked]
    queued = [timings["queue_time"] for _, timings in asked]
    assert all(seen >= first >= waited > 0 for (seen, _), first, waited in zip(asked, ttft, queued, strict=True))
    for name, values in (("glm53d_ttft_seconds", ttft), ("glm53d_queue_seconds", queued)):
        grown = {end: after[f"{name}_{end}"] - before[f"{name}_{end}"] for end in ("sum", "count")}
        assert grown["count"] == 32
        assert abs(grown["sum"] - sum(values)) < 1e-3 * sum(values)
    stages = [after[stage] for stage, _ in STAGES]
    assert stages.count(0) == 1, "a text is not rendered"
    assert abs(sum(stages) - after["glm53d_ttft_seconds_sum"]) < 1e-6 * sum(stages)
    assert sum(queued) > 10 * min(ttft), "the last waits for all the others, and that is no secret"


async def test_a_long_prompt_among_streams_is_not_the_event_loops_work(tmp_path, http):
    """[F-I6] How late the loop is, is a metric; rendering and encoding happen in threads of the text pool."""
    long = {"messages": [{"role": "user", "content": f"{i} words and more of them " * 8000} for i in range(4)]}
    with running(config="sim.toml", log=tmp_path / "log") as daemon:
        body = {"model": "glm-5.3-nano", "prompt": "words", "max_tokens": 500, "ignore_eos": True}
        streams = [asyncio.create_task(http.post(daemon.url + "/v1/completions", json=body)) for _ in range(16)]
        counted, meanwhile = asyncio.create_task(http.post(daemon.url + "/tokenize", json=long)), 0
        while not counted.done():
            async with http.get(daemon.url + "/live") as answer:
                meanwhile += answer.status == 200
        assert (await (await counted).json())["count"] > 100_000
        assert meanwhile >= 4, "the loop had nothing else to do than that prompt"
        for stream in streams:
            assert (await (await stream).json())["usage"]["completion_tokens"] == 500
        found = await samples(http, daemon.url)
    assert found["glm53d_loop_lag_seconds_count"] > 0
