"""Info: what the server says about itself. None of it waits for a rank but /health_generate. [R4] [R8] [R15]

/server_info, /model_info, /get_load, /v1/loads and /version have the fields that gateways read from SGLang's and vLLM's
workers, beside our own.
"""

import time
from typing import Any

from aiohttp import web

from glm53d.config import Config, split_endpoint
from glm53d.errors import ModelNotFound
from glm53d.front.engine import Engine
from glm53d.obs import metrics
from glm53d.server import body
from glm53d.server.exchange import SERVICE, Service
from glm53d.version import VERSION

_STARTED = int(time.time())
_MODEL_TYPE = "glm_moe_dsa"  # of config.json, and the class that transformers has for it
_ARCHITECTURE = "GlmMoeDsaForCausalLM"


async def root(request: web.Request) -> web.Response:
    """Handle HEAD /: some clients look for a server before their first request. (F-J2)"""
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """Handle GET /health: whether the ranks live and step. [R4]"""
    return _state(request, *request.app[SERVICE].engine.health())


async def health_generate(request: web.Request) -> web.Response:
    """Handle GET /health_generate: one token through everything. [R4]"""
    await request.app[SERVICE].engine.health_generate()
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Handle GET /ready: whether work is accepted; with phase and percent while loading. [R4]"""
    return _state(request, *request.app[SERVICE].engine.ready())


async def live(request: web.Request) -> web.Response:
    """Handle GET /live: the loop turns. [R4]"""
    return _json({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    """Handle GET /v1/models."""
    service = request.app[SERVICE]
    return _json({"object": "list", "data": [_card(service, name) for name in service.engine.models]})


async def model(request: web.Request) -> web.Response:
    """Handle GET /v1/models/{model}."""
    service, name = request.app[SERVICE], request.match_info["model"]
    if name not in service.engine.models:
        raise ModelNotFound(f"The model `{name}` is not served here.", "model")
    return _json(_card(service, name))


async def server_info(request: web.Request) -> web.Response:
    """Handle GET /server_info: the layout, what is in flight and held."""
    service = request.app[SERVICE]
    engine, config = service.engine, service.config
    facts = {
        "version": VERSION,
        "served_model_name": engine.models[0],
        "model_path": config.model.path,
        "tokenizer_path": config.tokenizer.path or config.model.path,
        "tp_size": config.parallel.tp_size,
        "dp_size": config.parallel.attn_dp_size,
        "ep_size": config.parallel.ep_size,
        "pp_size": 1,
        "load_balance_method": config.scheduler.placement,
        "disaggregation_mode": "null",
        "context_length": engine.limits.max_context_len or None,
        "max_running_requests": config.scheduler.max_running_requests,
        "max_total_num_tokens": sum(_capacity(row, config) for row in engine.loads()),
        "page_size": config.kv.page_size,
        "kv_events": _kv_events(config),
    }
    return _json(facts | engine.server_info())


def _kv_events(config: Config) -> dict[str, Any] | None:
    """Where a router finds what is cached, in SGLang's words; None: nothing is published."""
    events = config.kv_events
    if not events.endpoint:
        return None
    (host, port), replay = split_endpoint(events.endpoint), events.replay_endpoint
    return {
        "publisher": "zmq",
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": events.topic,
        "block_size": config.kv.page_size,
        "dp_size": config.parallel.attn_dp_size,
        "replay_endpoint_port_base": split_endpoint(replay)[1] if replay else None,
    }


async def model_info(request: web.Request) -> web.Response:
    """Handle GET /model_info: what kind of model answers."""
    service = request.app[SERVICE]
    engine, config = service.engine, service.config
    return _json(
        {
            "model_path": config.model.path,
            "served_model_name": engine.models[0],
            "tokenizer_path": config.tokenizer.path or config.model.path,
            "model_type": _MODEL_TYPE,
            "architectures": [_ARCHITECTURE],
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "context_length": engine.limits.max_context_len or None,
            "preferred_sampling_params": engine.defaults,
        }
    )


async def version(request: web.Request) -> web.Response:
    """Handle GET /version."""
    return _json({"version": VERSION})


async def get_loads(request: web.Request) -> web.Response:
    """Handle GET /get_loads: a row of the load board per attention-DP rank. [R8]"""
    return _json(request.app[SERVICE].engine.loads())


async def v1_loads(request: web.Request) -> web.Response:
    """Handle GET /v1/loads: the same in the words that gateways read."""
    service = request.app[SERVICE]
    loads = [_load(row, service.config) for row in service.engine.loads()]
    envelope = {"timestamp": time.time(), "version": VERSION, "dp_rank_count": len(loads), "loads": loads}
    counts = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens", "max_total_num_tokens")
    return _json(envelope | {"aggregate": {name: sum(load[name] for load in loads) for name in counts}})


async def get_load(request: web.Request) -> web.Response:
    """Handle GET /get_load: the short form that older gateways read."""
    service = request.app[SERVICE]
    loads = [_load(row, service.config) for row in service.engine.loads()]
    return _json(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
            for load in loads
        ]
    )


async def prometheus(request: web.Request) -> web.Response:
    """Handle GET /metrics."""
    text = request.app[SERVICE].metrics.render()
    return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})


def _state(request: web.Request, good: bool, state: dict[str, Any]) -> web.Response:
    """Of a route that is open to all: details only for who has a key. [F-H13]"""
    if not request.app[SERVICE].keys.admits(request):
        state = {"state": state["state"]}
    return _json(state, 200 if good else 503)


def _card(service: Service, name: str) -> dict[str, Any]:
    engine: Engine = service.engine
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": service.config.model.owned_by,
        "root": engine.models[0],
        "max_model_len": engine.limits.max_context_len or None,  # null until the ranks have said what fits [R3]
    }
    if service.config.engine.kind == "sim":
        card["description"] = "simulated: no model is asked, answers are scripted"
    elif service.config.model.path == "nano":
        card["description"] = "nano: 3 million parameters, trained to show what the server does, and knows nothing else"
    return card


def _load(row: dict[str, Any], config: Config) -> dict[str, Any]:
    """A row of the board in gateways' words. Throughput is left out: a rate needs two readings."""
    used, capacity = (row["pages_locked"] + row["pages_owned"]) * config.kv.page_size, _capacity(row, config)
    computed = row["cached_tokens"] + row["prefill_tokens"]
    most = config.scheduler.max_running_requests
    return {
        "dp_rank": row["dp_rank"],
        "num_running_reqs": row["num_running"],
        "num_waiting_reqs": row["num_waiting"],
        "num_waiting_uncached_tokens": row["num_waiting_tokens"],
        "num_total_reqs": row["num_running"] + row["num_waiting"],
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity if capacity else 0.0,
        "cache_hit_rate": row["cached_tokens"] / computed if computed else 0.0,
        "utilization": row["num_running"] / most,
        "max_running_requests": most,
        "host_used_tokens": row["host_pages_used"] * config.kv.page_size,
        "host_total_tokens": row["host_pages_total"] * config.kv.page_size,
        "storage_used_tokens": row["file_pages_used"] * config.kv.page_size,
        "cached_tokens_details": {
            "device": row["cached_tokens"] - row["cached_host_tokens"] - row["cached_storage_tokens"],
            "host": row["cached_host_tokens"],
            "storage": row["cached_storage_tokens"],
        },
    }


def _capacity(row: dict[str, Any], config: Config) -> int:
    """Tokens whose KV the rank's pool holds; 0 until it has loaded."""
    return row["pages_total"] * config.kv.page_size


def _json(value: Any, status: int = 200) -> web.Response:
    return body.json_response(body.encode(value), status)
