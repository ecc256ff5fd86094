"""Metrics: counters and histograms of the HTTP side, and values of the ranks read at scrape time. For Prometheus.

What is counted here is counted once per request, never per token.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

_LAG_EVERY_S = 0.1

# Fields of a load row that only grow while a world lives. They are the node's, the same in each row, so a sum over rows
# would count everything several times. All other numbers of a row are gauges.
_GROWING = frozenset(
    (
        "received",
        "steps",
        "prefill_tokens",
        "cached_tokens",
        "decode_tokens",
        "finished",
        "aborted",
        "retracted",
        "expired",
        "dropped",
        "thinking_forced",
        "drafts_verified",
        *(f"drafts_accepted_{place}" for place in range(1, 6)),
        "cached_host_tokens",
        "cached_storage_tokens",
        "pages_saved",
        "pages_loaded",
        "pages_copied",
        "pages_stored",
        "pages_fetched",
        "files_failed",
        "sessions_kept",
        "sessions_resumed",
        "sessions_expired",
        "sessions_evicted",
        "stale_records",
        "books_checked",
    )
)


class Metrics:
    """All metrics of one application, in a registry of their own."""

    def __init__(
        self,
        model: str,
        page_size: int,
        loads: Callable[[], list[dict[str, Any]]],
        text_stats: Callable[[], dict[str, int]],
    ):
        """model and page_size are told to routers. The other two are called at each scrape: `loads` for a dict of
        numbers per attention-DP rank, `text_stats` for the counts of the cache of texts.
        """
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=_SECONDS)

        self._requests = counter(
            "glm53d_requests", "Requests by route and status; 499: the client left.", "endpoint", "status"
        )
        self._finished = counter("glm53d_generations", "Generations that ended, by reason.", "endpoint", "reason")
        self._failed = counter("glm53d_stream_errors", "Streams that ended with an error event.", "endpoint")
        self._dropped = counter(
            "glm53d_dropped_tool_calls", "Calls by the model of tools that the request does not have.", "endpoint"
        )
        tokens = counter(
            "glm53d_tokens", "Tokens of ended generations; cached is part of prompt, reasoning of completion.", "kind"
        )
        self._tokens = {kind: tokens.labels(kind) for kind in ("prompt", "cached", "completion", "reasoning")}
        self._ttft = histogram("glm53d_ttft_seconds", "Last body byte read to first token.")
        self._e2e = histogram("glm53d_e2e_seconds", "Last body byte read to last token.")
        self._queue = histogram("glm53d_queue_seconds", "Waiting for the scheduler, all stretches.")
        self._stage = Histogram(
            "glm53d_stage_seconds", "Parts of the time to the first token.", ("stage",),
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._loop_lag = histogram("glm53d_loop_lag_seconds", "How late the event loop was, every 0.1 s.")
        registry.register(_Loads(loads))
        registry.register(_ForRouters(model, page_size, loads))
        registry.register(_TextCache(text_stats))

    def request(self, endpoint: str, status: int) -> None:
        """Count a request when its response is decided."""
        self._requests.labels(endpoint, str(status)).inc()

    def stream_error(self, endpoint: str) -> None:
        """Count a stream that ended with an error event."""
        self._failed.labels(endpoint).inc()

    def dropped_calls(self, endpoint: str, count: int) -> None:
        """Count tool calls of a generation that its client does not see."""
        self._dropped.labels(endpoint).inc(count)

    def finished(
        self,
        endpoint: str,
        reason: str,
        *,
        tokens: dict[str, int],
        ttft_s: float | None,
        stages_s: dict[str, float],
        queue_s: float,
        e2e_s: float,
    ) -> None:
        """Count a generation that has ended; `tokens` by kind: prompt, cached, completion, reasoning; `stages_s` are
        the parts of ttft_s by name.
        """
        self._finished.labels(endpoint, reason).inc()
        for kind, count in tokens.items():
            if count:
                self._tokens[kind].inc(count)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        for stage, seconds in stages_s.items():
            self._stage.labels(stage).observe(seconds)
        self._queue.observe(queue_s)
        self._e2e.observe(e2e_s)

    async def watch_loop(self) -> None:
        """See by how much the running loop is late, until cancelled: what blocks it delays everybody."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._loop_lag.observe(max(0.0, loop.time() - due))

    def render(self) -> bytes:
        """Everything in the text format, CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Loads(Collector):
    """The load rows: a gauge per number and attention-DP rank, and the counters of the node, once."""

    def __init__(self, loads: Callable[[], list[dict[str, Any]]]):
        self._loads = loads

    def describe(self) -> list[Metric]:
        return []  # the names come with the rows; without this the registry would scrape once to learn them

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        for i, row in enumerate(self._loads()):
            for name, value in row.items():
                if name == "dp_rank" or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if name in _GROWING:
                    if not i:
                        yield CounterMetricFamily(f"glm53d_node_{name}", f"Load board: {name}.", value=value)
                    continue
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(f"glm53d_rank_{name}", f"Load board: {name}.", labels=["dp_rank"])
                gauges[name].add_metric([str(row.get("dp_rank", i))], value)
        yield from gauges.values()


class _ForRouters(Collector):
    """What routers and autoscalers ask every model server for, by the names they know of vLLM."""

    def __init__(self, model: str, page_size: int, loads: Callable[[], list[dict[str, Any]]]):
        self._model, self._page_size, self._loads = model, page_size, loads

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that compute.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", labels=labels)
        pool = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool.", labels=[*labels, "block_size", "num_gpu_blocks"]
        )
        for i, row in enumerate(self._loads()):
            engine = [self._model, str(row.get("dp_rank", i))]
            running.add_metric(engine, row["num_running"])
            waiting.add_metric(engine, row["num_waiting"])
            used, total = row["pages_locked"] + row["pages_owned"], row["pages_total"]
            usage.add_metric(engine, used / total if total else 0.0)
            pool.add_metric([*engine, str(self._page_size), str(total)], 1)
        yield from (running, waiting, usage, pool)


class _TextCache(Collector):
    """The cache of texts that have been encoded."""

    def __init__(self, stats: Callable[[], dict[str, int]]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats().items():
            kind = GaugeMetricFamily if name in ("entries", "tokens") else CounterMetricFamily
            yield kind(f"glm53d_text_cache_{name}", f"Texts seen before and their ids: {name}.", value=value)
