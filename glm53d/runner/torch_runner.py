"""The reference engine: a rank's share of the model in plain torch, CPU or CUDA. [R1] [R43]"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm53d.config import AUTO_CONTEXTS, KEPT_BYTES, KEPT_SHARE, Config
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch, Mode, StepResult
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.model.config import ModelConfig, refuse_unfit
from glm53d.model.glm import Glm
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import ALIGNMENT, KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.model.mtp import Mtp
from glm53d.model.step import Step, last_tokens, plan_split, plan_step
from glm53d.model.weights import Checkpoint
from glm53d.nano.weights import nano_folder
from glm53d.runner import logprobs
from glm53d.runner.base import Loaded, Progress, available_bytes, host_pages
from glm53d.runner.cuda_ipc import CudaDriver, CudaMailbox, Driver, Upload
from glm53d.runner.graphs import Backend, CudaGraphs, Graphs, SlotState
from glm53d.runner.kv_copy import KvCopies
from glm53d.runner.mailbox import IdExchange, Mailbox, PeerPages, ShmMailbox, check_fits
from glm53d.runner.masks import Masks
from glm53d.runner.rows import Rows, within
from glm53d.runner.sampler import Sampler
from glm53d.runner.speculate import Drafter, ShareIds, accepted
from glm53d.runner.tables import SamplingTables

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, eq=False)
class Launched:
    """A step between launch and collect."""

    step: int
    rows: Rows
    samples: Tensor  # of the sampled rows, on the host, but there only
    num_accepted: Tensor
    is_done: torch.cuda.Event | None  # behind this; None: at once
    asked: list[logprobs.Asked]
    top_logprobs: np.ndarray
    start_ns: int
    wait_us: int


class TorchRunner:
    """A Runner over Glm. Slot arrays live on the device: block tables, sampling parameters, last ids, drafts.

    A rank computes the rows of its attention-DP group; experts, embedding and head are computed by all ranks together,
    so every rank runs every step, if only with the tokens of others. A row's id is sampled by its group's first rank
    and goes to all ranks, whose embeddings need it next.

    On the CPU a step has run when launch returns; on CUDA it is queued, and collect waits for it; with drafts it waits
    once more, for how many were accepted.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        max_slots: int,
        tokenizer_size: int,
        rendezvous: Path | None = None,
        eos_ids: Sequence[int] = (),
        mailbox_ends: MailboxEnds | None = None,
    ):
        """Args:
        max_slots: request slots a Batch may name.
        tokenizer_size: ids from here on are never sampled.
        eos_ids: those that end a turn, which is not before min_new_tokens.
        rendezvous: a folder where the ranks of this world, and nobody else, find each other; of one rank, none.
        mailbox_ends: likewise, what its ranks share.
        """
        self.device = torch.device("cpu")
        if config.engine.device == "cuda":
            if torch.cuda.device_count() <= rank:
                raise StartError(f'engine.device is "cuda", and torch finds no CUDA device for rank {rank}')
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and prompts have many
        self.config = config
        self.max_slots = max_slots
        self.tokenizer_size = tokenizer_size
        self.eos_ids = eos_ids
        self.dtype = DTYPES[config.model.dtype]
        parallel = config.parallel
        self.layout = Layout(rank, parallel.tp_size, parallel.attn_dp_size, parallel.ep_size)
        self.ranks = RankGroups(self.layout)
        self.rendezvous = rendezvous
        self._mailbox_ends = mailbox_ends
        self._mailbox: Mailbox | None = None
        self._driver: Driver | None = CudaDriver(self.device) if self.device.type == "cuda" else None
        self._upload: Upload | None = None
        self._copies: KvCopies | None = None
        self.share_ids: ShareIds = self.ranks.share_ids
        self.peer_pages: PeerPages | None = None
        self.graphs: Graphs | None = None
        self.drafter: Drafter | None = None
        on_gpu = self.device.type == "cuda"
        self.graph_backend: Backend | None = CudaGraphs() if on_gpu and config.engine.graphs else None
        self._launched: deque[Launched] = deque()

    def load(self, progress: Progress) -> Loaded:
        """Weights, then the KV pool. Raises CheckpointError or StartError, naming what is wrong."""
        if self.config.engine.threads:
            torch.set_num_threads(self.config.engine.threads)
        path = self.config.model.path
        folder = nano_folder() if path == "nano" else Path(path)
        model_config = ModelConfig.load(folder)
        context = self.config.model.max_context_len or model_config.max_position_embeddings
        num_drafts = self.config.speculation.num_draft_tokens
        refuse_unfit(self.config, model_config)
        progress("rendezvous", 0)
        self.ranks.connect(self.rendezvous, self.device, self.config.world.start_timeout_s)
        progress("weights", 0)
        num_mtp = int(num_drafts > 0)
        checkpoint = Checkpoint(
            folder, model_config, self.dtype, self.device,
            with_mtp=num_mtp > 0, keep_fp8=self.device.type == "cuda", fp8_inputs=self.config.model.fp8_inputs,
        )  # fmt: skip
        layers = model_config.num_hidden_layers
        eps = self.config.model.q_kv_norm_eps or model_config.rms_norm_eps
        self.model = Glm(
            model_config, checkpoint, self.ranks, eps, lambda done: progress("weights", 100 * done // layers)
        )
        mtp = Mtp(model_config, checkpoint, self.ranks, self.model, eps) if num_mtp else None
        checkpoint.close()

        self.state = SlotState.zeros(self.max_slots, num_drafts, self.device)
        num_table_rows = self.config.scheduler.max_biased_requests if self.layout.owns_rows else 0
        tokenizer_size = min(self.tokenizer_size, model_config.vocab_size)
        tables = SamplingTables(num_table_rows, tokenizer_size, self.layout.attn_dp_rank, self.state.drafts)
        self.sampler = Sampler(self.max_slots, tables, self.eos_ids)

        progress("kv cache", 0)
        loaded = self._make_pools(model_config, context, checkpoint.bytes_read)
        if self.graph_backend is not None:
            self.graphs = Graphs(self.graph_backend, self.model, self.cache, self.state, self.layout, self._index)
        if mtp is not None:
            self.drafter = Drafter(mtp, self.cache, self.sampler, self.share_ids, self.state.drafts)
        progress("kv cache", 100)
        return loaded

    def _make_pools(self, model_config: ModelConfig, context: int, weight_bytes: int) -> Loaded:
        """Memory for KV, here and in the host, and the ways of other ranks to it and of steps to the device."""
        num_drafts, page_size = self.config.speculation.num_draft_tokens, self.config.kv.page_size
        num_mtp = int(num_drafts > 0)
        shape = KvShape(model_config, page_size, self.dtype, fp8=self.config.kv.dtype == "fp8", num_mtp=num_mtp)
        num_pages = self._num_pages(sum(shape.page_bytes), -(-context // page_size), weight_bytes)
        num_pages = self.ranks.least(num_pages, self.device)  # the scheduler knows one size of pool
        max_ids = self.max_slots * (1 + num_drafts)
        pools_at = IdExchange.room_bytes(max_ids)
        num_padding = int(self.graph_backend is not None)  # a page and a slot that no request ever has
        memory = self._shared_memory(pools_at + shape.memory_bytes(num_pages + num_padding))
        self.cache = KvCache(
            shape, memory[pools_at:], num_pages=num_pages + num_padding, max_slots=self.max_slots + num_padding,
            max_context_len=context + 2 * num_drafts,
        )  # fmt: skip
        if self._driver is not None:
            ring = self._mailbox_ends.ring if self._mailbox_ends is not None else None
            self._upload = Upload(self._driver, ring.array() if ring is not None else None)
        if self._mailbox is not None:
            self.peer_pages = PeerPages(self._mailbox, self.cache, self.layout, pools_at)
            if self._driver is None:
                self.share_ids = IdExchange(self._mailbox, self.layout, max_ids).share_ids
        tiers = self.config.cache
        num_host_pages = host_pages(tiers.host_bytes, sum(shape.page_bytes))
        storage = Path(tiers.storage_path) if tiers.storage_path else None
        self._copies = KvCopies(self.cache, num_host_pages, storage, self.peer_pages, self.layout, self._driver)
        page_bytes = sum(shape.page_bytes)
        return Loaded(num_pages, page_size, context, shape.bytes_per_token, weight_bytes, num_host_pages, page_bytes)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """Start a step; the batch's arrays may be reused once this returns."""
        start_ns = time.monotonic_ns()
        if len(batch.inits) or len(batch.tables):
            self.sampler.init_slots(batch)
        if len(batch.run_slot):
            self.cache.append_pages(batch.run_slot, batch.run_start, batch.run_count, batch.pages)
        assert self._copies is not None, "load comes first"
        self._copies.begin_step(batch.moves)
        rows = Rows.of(batch, self.layout)
        samples, num_accepted, asked = self._run(batch, rows)
        # To pinned memory, behind this step: the next one may be queued before anybody asks.
        samples, num_accepted = (part.to("cpu", non_blocking=True) for part in (samples, num_accepted))
        is_done = None
        if self.device.type == "cuda":
            is_done = torch.cuda.Event()
            is_done.record()
        top = batch.top_logprobs.copy()
        self._launched.append(
            Launched(batch.step, rows, samples, num_accepted, is_done, asked, top, start_ns, batch.wait_us)
        )
        if self._upload is not None:
            self._upload.settle()

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; waits for it."""
        launched = self._launched.popleft()
        if launched.is_done is not None:
            launched.is_done.synchronize()
        owned, sampled = launched.rows.owned, launched.rows.sampled
        counts = np.zeros(len(owned), np.int32)
        ids = np.full((len(owned), launched.samples.shape[1]), -1, np.int32)
        counts[owned] = launched.num_accepted.numpy()[owned[sampled]] + 1
        ids[owned] = launched.samples.numpy()[owned[sampled]]
        found = logprobs.collect(launched.asked, launched.top_logprobs, counts)
        assert self._copies is not None
        done, failed = self._copies.ended(launched.wait_us)
        return StepResult(
            launched.step, counts, ids, launched.start_ns, time.monotonic_ns(), found, done, failed
        )

    def close(self) -> None:
        """Drop steps not collected and leave the world, however far load came. The memory goes with this object."""
        self._launched.clear()
        self.graphs = None  # NCCL does not leave while a graph is there that has one of its collectives
        if self._copies is not None:
            self._copies.close()
        if self._upload is not None:
            self._upload.close()
        if self._mailbox is not None:
            self._mailbox.close()
        self.ranks.close()

    def _run(self, batch: Batch, rows: Rows) -> tuple[Tensor, Tensor, list[logprobs.Asked]]:
        """Of all groups' rows that sample: what was sampled [n, 1 + k], and how many drafts of it are accepted [n].

        Then the logprobs that this rank's own rows ask for.
        """
        num_sampled = int(np.count_nonzero(rows.sampled))
        samples = torch.full((num_sampled, 1 + self.state.drafts.shape[1]), -1, device=self.device)
        if not batch.num_rows:
            return samples, samples[:, 0], []
        step, hidden, logits = self._forward(batch, rows)
        asked: list[logprobs.Asked] = []
        if len(batch.targets):
            asked += logprobs.of_prompts(
                self.model, batch, rows, hidden, self.tokenizer_size, is_normed=self.drafter is not None
            )
        ids, num_accepted = samples[:0, 0], samples[:, 0]
        if num_sampled:
            num_logits = rows.num_logits[rows.owned]
            slots = np.repeat(rows.slot[rows.owned], num_logits)
            positions, masks = rows.sampled_positions(rows.owned), Masks.of(batch, rows)
            own_ids = self.sampler.sample(logits, slots, positions, within(num_logits), masks)
            if len(batch.top_logprobs):
                asked += logprobs.of_samples(batch, rows, logits, own_ids, self.tokenizer_size)
            ids = self.share_ids(own_ids, rows.dp_num_logits)
            count = rows.num_logits[rows.sampled]
            samples[self._index(np.repeat(np.arange(num_sampled), count)), self._index(within(count))] = ids
            slot, state = self._index(rows.slot[rows.sampled]), self.state
            fed = self._index((rows.fed & ~rows.masked)[rows.sampled].astype(np.int32)) > 0
            num_accepted = accepted(samples, self.state.drafts[slot], fed)
            state.last_id[slot] = samples.gather(1, num_accepted[:, None])[:, 0]
            prompt_len = self._index(np.where(rows.fed, -1, rows.seq_len)[rows.sampled])
            state.length[slot] = torch.where(prompt_len < 0, state.length[slot] + num_accepted, prompt_len) + 1
            self.sampler.tables.count(rows.slot[rows.sampled], samples, num_accepted)
        if self.drafter is not None and step is not None:
            self.drafter.draft(rows, step, hidden, ids, num_accepted)
        return samples, num_accepted, asked

    def _forward(self, batch: Batch, rows: Rows) -> tuple[Step | None, Tensor, Tensor]:
        """The step as the model sees it, which the drafter wants; of this group's tokens the states behind the last
        layer, or with drafts behind the last norm; and logits of the rows that want them, at their owner."""
        key = self.graphs.choose(rows) if self.graphs is not None and batch.mode is Mode.DP else None
        step = self._plan(batch, rows) if key is None or self.drafter is not None else None
        if key is not None and self.graphs is not None:
            return step, *self.graphs.run(key, rows)
        assert step is not None
        hidden = self.model.forward(step, self.cache)
        if self.drafter is not None:
            hidden = self.model.norm(hidden)  # of every token, for the MTP layer
            states = hidden[step.logits_idx]
        else:
            states = self.model.norm(hidden[step.logits_idx])
        return step, hidden, self.model.logits(self.model.at_owner(step, states), rows.dp_num_logits)

    def _plan(self, batch: Batch, rows: Rows) -> Step:
        input_ids = self._index(batch.input_ids)
        if rows.fed.any():
            tokens = last_tokens(rows.ends[rows.fed], rows.extend_len[rows.fed])
            slot = self._index(rows.slot[rows.fed])
            input_ids.index_copy_(0, self._index(tokens), self.state.inputs(slot).flatten())
        if batch.mode is Mode.CP:
            return plan_split(
                self.cache, input_ids, rows.dp_num_tokens, self.layout.attn_dp_rank, int(batch.row_dp_rank[0]),
                int(rows.slot[0]), int(rows.prefix_len[0]), wants_logits=bool(rows.sampled[0]),
            )  # fmt: skip
        own = rows.own
        return plan_step(
            self.cache, input_ids, rows.dp_num_tokens, rows.dp_num_logits,
            rows.slot[own], rows.prefix_len[own], rows.extend_len[own], rows.num_logits[own],
        )  # fmt: skip

    def _index(self, values: np.ndarray) -> Tensor:
        """A copy on the device as int64, which is what torch indexes with."""
        if self._upload is None:
            return torch.from_numpy(values.astype(np.int64))
        return self._upload.put(values).long()

    def _shared_memory(self, num_bytes: int) -> Tensor:
        """Zeros on the device, which the other ranks can read, if there are any."""
        if self._mailbox_ends is None:
            is_cpu = self.device.type == "cpu"
            return _own_memory(num_bytes) if is_cpu else torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        ends, timeout_s = self._mailbox_ends, self.config.scheduler.watchdog_s
        if self._driver is None:
            self._mailbox = ShmMailbox(ends, num_bytes, timeout_s)
        else:
            self._mailbox = CudaMailbox(ends, num_bytes, timeout_s, self._driver)
        return self._mailbox.local

    def _num_pages(self, page_bytes: int, pages_per_context: int, weight_bytes: int) -> int:
        """As configured, else what memory allows."""
        if self.config.kv.num_pages:
            return self.config.kv.num_pages
        if self.config.kv.memory_bytes:
            memory_bytes = self.config.kv.memory_bytes
            pages = memory_bytes // page_bytes
        else:
            memory_bytes = self._free_bytes(weight_bytes)
            pages = min(memory_bytes // page_bytes, AUTO_CONTEXTS * pages_per_context)
        if pages == 0:
            raise StartError(f"{memory_bytes} bytes for KV do not hold one page of {page_bytes} bytes")
        return pages

    def _free_bytes(self, weight_bytes: int) -> int:
        """This rank's part of a quarter of the machine's available memory; of a GPU, what --check plans with."""
        if self.device.type == "cuda":
            return max(0, int(torch.cuda.mem_get_info()[1] * (1 - KEPT_SHARE)) - KEPT_BYTES - weight_bytes)
        return available_bytes() // 4 // self.layout.tp_size


def _own_memory(num_bytes: int) -> Tensor:
    """Zeros of this process alone. They take neither time nor memory before they are written to; so what there is no
    memory for would not be refused by the kernel, but ended by it, later. Raises StartError.
    """
    check_fits(num_bytes)
    memory = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT - 1, np.uint8))
    return memory[-memory.data_ptr() % ALIGNMENT :][:num_bytes]
