"""Where everything lies: weights and KV of each rank. Arithmetic on config.json: no GPU, no torch. [R1]

What attention and dense MLPs split over is the attention group; the vocabulary is split over all ranks; norms, routers,
indexers and the down-projections to latents stand on every rank. A latent has no heads to split by, so each rank of an
attention group stores the KV of all the group's requests.
"""

import os
import re
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import msgspec

from glm53d.config import AUTO_CONTEXTS, KEPT_BYTES, KEPT_SHARE, Config
from glm53d.errors import ConfigError, StartError
from glm53d.model.config import GLM_5_3, ModelConfig, refuse_unfit
from glm53d.model.layout import Layout
from glm53d.runner.base import Loaded, available_bytes, host_pages
from glm53d.sched.limits import TokenIds
from glm53d.text.vocab import Vocab
from glm53d.worker.room import check_rings, limits_of
from glm53d.world.checkpoint import read_checkpoint

H200_BYTES = 143_771 << 20
"""What an H200 reports. A plan made without a GPU at hand assumes it."""

CONTEXTS = {"1M": 1 << 20, "200K": 200_000, "32K": 1 << 15}
"""The request sizes a plan counts."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank holds; all ranks of a layout hold the same amounts."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_pages: int  # of one attention-DP rank's pool
    page_size: int
    num_pools: int
    max_context_len: int  # prompt + output of the longest request: what the model allows and one pool holds

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV one pool holds."""
        return self.num_pages * self.page_size

    def num_requests(self, context_len: int) -> int:
        """How many requests of this length fit at once, in all pools."""
        if context_len > self.max_context_len:
            return 0
        return self.num_pools * (self.num_pages // -(-context_len // self.page_size))


def layout(config: Config) -> list[Layout]:
    """Every rank's place, in order of rank."""
    parallel = config.parallel
    return [
        Layout(rank, parallel.tp_size, parallel.attn_dp_size, parallel.ep_size) for rank in range(parallel.tp_size)
    ]


def memory_plan(model: ModelConfig, config: Config, memory_bytes: int, *, mtp: bool) -> MemoryPlan:
    """The plan for memory_bytes a rank: a GPU's whole memory, or of the host's what KV may take.

    mtp: the checkpoint's MTP layers are loaded too. Raises StartError when the layout does not divide the model, or
    when the weights leave no room.
    """
    weights, per_token = weight_bytes(model, config, mtp=mtp), kv_bytes_per_token(model, config, mtp=mtp)
    refuse_unfit(config, model)
    longest = config.model.max_context_len or model.max_position_embeddings
    room, on_gpu = memory_bytes, config.engine.device == "cuda"
    if on_gpu:
        room = int(memory_bytes * (1 - KEPT_SHARE)) - KEPT_BYTES - weights
    kv = config.kv
    page_bytes = per_token * kv.page_size
    if kv.num_pages or kv.memory_bytes:
        num_pages = kv.num_pages or kv.memory_bytes // page_bytes
    else:
        num_pages = min(room // page_bytes, AUTO_CONTEXTS * -(-longest // kv.page_size))
    if not num_pages and kv.memory_bytes:
        raise ConfigError(f"kv.memory_bytes {kv.memory_bytes} does not hold one page of {page_bytes} bytes")
    if num_pages < 1 or (on_gpu and num_pages * page_bytes > room):
        raise ConfigError(f"no room for KV: weights take {_size(weights)} of a rank's {_size(memory_bytes)}")
    longest = min(longest, num_pages * kv.page_size - 2 * config.speculation.num_draft_tokens)  # what drafts write
    return MemoryPlan(weights, per_token, num_pages, kv.page_size, config.parallel.attn_dp_size, longest)


def kv_bytes_per_token(model: ModelConfig, config: Config, *, mtp: bool) -> int:
    """One token's latent rows in all layers and index keys in those with an indexer.

    FP8 rows: the latent with an FP32 scale per 128, the rotated key in BF16; index keys with one FP32 scale.
    """
    num_mtp = model.num_nextn_predict_layers if mtp else 0
    if config.kv.dtype == "fp8":
        row = model.kv_lora_rank + 4 * -(-model.kv_lora_rank // 128) + 2 * model.qk_rope_head_dim
        index_row = model.index_head_dim + 4
    else:
        row, index_row = _itemsize(config) * model.latent_dim, _itemsize(config) * model.index_head_dim
    return row * (model.num_hidden_layers + num_mtp) + index_row * (model.num_full_layers + num_mtp)


def weight_bytes(model: ModelConfig, config: Config, *, mtp: bool, as_stored: bool = False) -> int:
    """Bytes of one rank's share, as the engine keeps it: on a GPU as they are stored, on the CPU in model.dtype.

    But kv_b_proj is always dense, as attention uses it cut in two, and the router is float32. as_stored: these, too, as
    in the checkpoint.
    """
    return _Shard(model, config, as_stored).total(mtp)


def check_machine(config: Config) -> None:
    """Raise StartError for what can be known to be missing here before a rank has loaded anything."""
    if config.engine.device == "cuda" and config.parallel.tp_size > 1 and find_spec("cupy") is None:
        raise StartError('several ranks on GPUs need cupy: install glm53d with its extra "cuda12" or "cuda13"')
    if strange := sorted(set(config.world.pin_cpus) - (ours := os.sched_getaffinity(0))):
        raise ConfigError(f"world.pin_cpus names CPU {strange[0]}; this process may use {sorted(ours)}")


def check_report(config: Config) -> str:
    """What --check prints: layout, limits, memory plan. Raises StartError when this configuration cannot be served."""
    parallel, limits, engine = config.parallel, config.scheduler, config.engine
    facts = {
        "model": config.model.path,
        "engine": engine.kind if engine.kind == "sim" else f"{engine.kind} on {engine.device}",
        "layout": f"{parallel.tp_size} ranks, {parallel.attn_dp_size} KV pools, experts over {parallel.ep_size} ranks",
        "limits": f"{config.server.max_requests:,} requests in flight, {limits.max_running_requests:,} running, "
        f"{limits.max_waiting_requests:,} waiting; {limits.max_step_tokens:,} tokens a step and KV pool",
    }
    if engine.kind == "sim":
        plan, num_ids = _simulated(config), Vocab.load(read_checkpoint(config).tokenizer).size
        plans = {"simulated": plan}
    else:
        model, found = _find_model(config)
        memory_bytes, held = _memory(config)
        facts["model"] += f" ({found})"
        facts["memory"] = f"{_size(memory_bytes)} a rank: {held}"
        plans = {"model": memory_plan(model, config, memory_bytes, mtp=False)}
        if model.num_nextn_predict_layers:
            plans["model + MTP"] = memory_plan(model, config, memory_bytes, mtp=True)
        plan, num_ids = plans["model + MTP" if config.speculation.num_draft_tokens else "model"], model.vocab_size
    _check_rings(config, plan, num_ids)
    lines = [f"{name:<8}{fact}" for name, fact in facts.items()]
    lines += ["", *_table(plans)]
    if engine.kind != "sim" and parallel.tp_size > 1:
        lines += ["", *_layouts(model, config, memory_bytes)]
    return "\n".join(lines)


def _simulated(config: Config) -> MemoryPlan:
    """The pools that configuration alone makes up."""
    sim, page_size = config.sim, config.kv.page_size
    room = sim.num_pages * page_size - 2 * config.speculation.num_draft_tokens
    longest = min(sim.max_context_len, config.model.max_context_len or room, room)
    return MemoryPlan(0, sim.kv_bytes_per_token, sim.num_pages, page_size, config.parallel.attn_dp_size, longest)


def _check_rings(config: Config, plan: MemoryPlan, num_ids: int) -> None:
    """Raise StartError for what ranks would refuse when they have loaded. num_ids: of the tokenizer, or a few more."""
    page_bytes = plan.kv_bytes_per_token * plan.page_size
    loaded = Loaded(
        plan.num_pages, plan.page_size, plan.max_context_len, plan.kv_bytes_per_token, plan.weight_bytes,
        host_pages(config.cache.host_bytes, page_bytes), page_bytes,
    )  # fmt: skip
    check_rings(config, limits_of(config, loaded, TokenIds(num_ids, (), 0, 0, ()), bytes(16)))


def _layouts(model: ModelConfig, config: Config, memory_bytes: int) -> list[str]:
    """What every layout of so many ranks would hold, and which would take more requests than this one.

    How experts are split changes no bytes, so layouts differ by their KV pools alone.
    """
    tp_size, mtp = config.parallel.tp_size, config.speculation.num_draft_tokens > 0
    plans: dict[int, MemoryPlan] = {}
    refused: dict[int, str] = {}
    for pools in (n for n in range(1, tp_size + 1) if tp_size % n == 0):
        parallel = msgspec.structs.replace(config.parallel, attn_dp_size=pools)
        try:
            plans[pools] = memory_plan(model, msgspec.structs.replace(config, parallel=parallel), memory_bytes, mtp=mtp)
        except StartError as error:
            refused[pools] = error.message
    mine = config.parallel.attn_dp_size
    kinds = "".join(f"{name:>7}" for name in CONTEXTS)
    lines = [f"{'KV pools':<10}{'weights a rank':>16}{'tokens in all':>16}{'largest context':>17}   requests of{kinds}"]
    for pools in sorted(plans | refused):
        name = f"{pools}{' *' if pools == mine else ''}"
        if pools in refused:
            lines.append(f"{name:<10}{refused[pools]}")
            continue
        plan = plans[pools]
        fits = "".join(f"{plan.num_requests(size):>7,}" for size in CONTEXTS.values())
        lines.append(
            f"{name:<10}{_size(plan.weight_bytes):>16}{plan.pool_tokens * plan.num_pools:>16,}"
            f"{plan.max_context_len:>17,}{'':14}{fits}"
        )
    drafts = f"{config.speculation.num_draft_tokens} drafts" if mtp else "no drafts"
    lines.append(f"* this configuration, with {drafts}. {_better(plans, mine)}")
    return lines


def _better(plans: dict[int, MemoryPlan], mine: int) -> str:
    """For each size of request, the layout that takes most, where that is not this one."""
    told = []
    for name, size in CONTEXTS.items():
        counts = {pools: plan.num_requests(size) for pools, plan in plans.items()}
        best = max(counts, key=lambda pools: (counts[pools], pools == mine))
        if counts[best] == 0:
            told.append(f"of {name} none holds any")
        elif best != mine:
            told.append(f"of {name} {counts[best]:,} with {best} pool{'s' if best > 1 else ''}")
    return "More requests: " + (", ".join(told) if told else "no other layout holds more") + "."


def _find_model(config: Config) -> tuple[ModelConfig, str]:
    """The dimensions to plan with, and where they are from."""
    path = Path(config.model.path)
    if config.model.path == "nano":
        return ModelConfig.load(Path(str(resources.files("glm53d.nano")))), "built in"
    if not (path / "config.json").exists() and re.search(r"glm-?5\.3", path.name, re.IGNORECASE):
        return GLM_5_3, "no config.json there: planned as GLM-5.3's official FP8 checkpoint"
    return ModelConfig.load(path), "its config.json"


def _memory(config: Config) -> tuple[int, str]:
    """The memory to plan with, and what it is."""
    if config.engine.device == "cuda":
        return H200_BYTES, "assumed, an H200"
    available = available_bytes()
    share = f"a quarter of the {_size(available)} free now"
    tp_size = config.parallel.tp_size
    return available // 4 // tp_size, share if tp_size == 1 else f"its part of {share}"


def _table(plans: dict[str, MemoryPlan]) -> list[str]:
    columns = [_column(plan) for plan in plans.values()]
    lines = [" " * 26 + "".join(f"{name:>16}" for name in plans)]
    return lines + [f"{name:<26}" + "".join(f"{column[name]:>16}" for column in columns) for name in columns[0]]


def _column(plan: MemoryPlan) -> dict[str, str]:
    column = {
        "weights a rank": _size(plan.weight_bytes),
        "KV bytes a token": f"{plan.kv_bytes_per_token:,}",
        f"pages of {plan.page_size} a pool": f"{plan.num_pages:,}",
        "tokens a pool": f"{plan.pool_tokens:,}",
        "tokens in all pools": f"{plan.pool_tokens * plan.num_pools:,}",
        "largest context": f"{plan.max_context_len:,}",
        "requests of it at once": f"{plan.num_requests(plan.max_context_len):,}",
    }
    return column | {f"requests of {name} at once": f"{plan.num_requests(size):,}" for name, size in CONTEXTS.items()}


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class _Shard:
    """Sizes of one rank's share of each part of the model; tensor shapes as in the official checkpoint."""

    def __init__(self, model: ModelConfig, config: Config, as_stored: bool):
        self._model, self._as_stored = model, as_stored
        on_gpu = config.engine.device == "cuda"
        self._block = model.quantization_config.weight_block_size if on_gpu and model.quantization_config else None
        self._itemsize = _itemsize(config)
        place = layout(config)[0]  # its parts begin at 0
        self._heads = place.attn_part("num_attention_heads", model.num_attention_heads).stop
        self._dense = place.attn_part("intermediate_size", model.intermediate_size).stop
        shared = model.moe_intermediate_size * model.n_shared_experts
        self._shared = place.attn_part("shared experts' width", shared).stop
        self._experts = place.expert_part(model.n_routed_experts).stop
        self._expert = place.expert_width_part(model.moe_intermediate_size).stop
        self._vocab = place.vocab_shard(model.vocab_size)

    def total(self, mtp: bool) -> int:
        model = self._model
        total = 2 * self._plain(self._vocab * model.hidden_size) + self._plain(model.hidden_size)
        for indexer, mlp in zip(model.indexer_types, model.mlp_layer_types, strict=True):
            total += self._layer(full=indexer == "full", sparse=mlp == "sparse")
        if mtp:
            joined = self._plain(
                2 * model.hidden_size * model.hidden_size + 3 * model.hidden_size
            )  # eh_proj and its norms
            total += model.num_nextn_predict_layers * (joined + self._layer(full=True, sparse=True))
        return total

    def _layer(self, full: bool, sparse: bool) -> int:
        model, linear, plain = self._model, self._linear, self._plain
        total = plain(2 * model.hidden_size + model.q_lora_rank + model.kv_lora_rank)  # norms
        total += linear(model.q_lora_rank, model.hidden_size) + linear(
            self._heads * model.qk_head_dim, model.q_lora_rank
        )
        total += linear(model.latent_dim, model.hidden_size)
        kv_b_rows = self._heads * (model.qk_nope_head_dim + model.v_head_dim)
        total += linear(kv_b_rows, model.kv_lora_rank) if self._as_stored else plain(kv_b_rows * model.kv_lora_rank)
        total += linear(model.hidden_size, self._heads * model.v_head_dim)
        if full:
            total += linear(model.index_n_heads * model.index_head_dim, model.q_lora_rank)
            total += linear(model.index_head_dim, model.hidden_size)
            total += plain(2 * model.index_head_dim + model.index_n_heads * model.hidden_size)  # k_norm, weights_proj
        if not sparse:
            return total + self._mlp(self._dense)
        router = model.n_routed_experts * model.hidden_size
        total += (plain(router) if self._as_stored else 4 * router) + 4 * model.n_routed_experts  # the bias is FP32
        return total + self._experts * self._mlp(self._expert) + self._mlp(self._shared)

    def _mlp(self, width: int) -> int:
        return 2 * self._linear(width, self._model.hidden_size) + self._linear(self._model.hidden_size, width)

    def _linear(self, rows: int, columns: int) -> int:
        if self._block is None:
            return self._plain(rows * columns)
        return rows * columns + 4 * -(-rows // self._block[0]) * -(-columns // self._block[1])

    def _plain(self, count: int) -> int:
        return count * self._itemsize


def _itemsize(config: Config) -> int:
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]
