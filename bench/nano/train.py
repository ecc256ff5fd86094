"""Trains the nano model on CPU cores, one process each. Interrupted, the same command goes on from its checkpoint.

    python -m bench.nano.train WORK_FOLDER [--steps 9300] [--ranks 2]

WORK_FOLDER holds the tokenizer (bench/nano/tokenizer.py), and gets train.pt and train.log. Phases are shares of
--steps, which may change between runs as long as the phase does not:

    0.00   short samples, and drills of copying and of finding tools; loss on all tokens
    0.20   samples and drills of all lengths, loss on what the model writes alone; on every other batch indexers learn
           from what attention looks at
    0.25   learning rates begin to fall, to nothing at the end
    0.45   on the other batches, the MTP layer too
    0.50   attention sees only what indexers choose, where these learn; what drills and the losses for tools have taught
           stays without most of them: fewer, and two fifths of the weight
"""

import argparse
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor

from bench.nano.batches import Batches, Padded
from bench.nano.data import SEED, Codec
from bench.nano.layers import Moe
from bench.nano.model import COPYING, FINDING, Nano
from bench.nano.muon import Muon
from glm53d.model.config import ModelConfig

TOKENS = 2048  # of a batch, per rank
MUON_LR, ADAM_LR, WARMUP = 0.01, 3e-3, 50
ALL_FROM, FALL_FROM, MTP_FROM, LATE_FROM = 0.2, 0.25, 0.45, 0.45
SHORT, DRILLS, LATE_DRILLS = 384, 0.3, 0.05
OTHERS_WEIGHT = 0.5
MTP_WEIGHT = 0.3
FINDING_WEIGHT, LATE_FINDING_WEIGHT = 0.5, 0.2
FINDING_TOKENS = 256  # of a batch, per rank
BALANCE = 1e-3
SAVE_EVERY, EVALUATE_EVERY, LOG_EVERY = 25, 250, 25
HELD_OUT = 12  # batches of the split "held out"


@dataclass(slots=True)
class Losses:
    """Of one batch, or sums over some."""

    tokens: int = 0
    text: float = 0.0
    mtp: float = 0.0
    index: float = 0.0
    tools: float = 0.0
    copies: float = 0.0
    found: float = 0.0


@dataclass(slots=True)
class State:
    """What a checkpoint holds beside weights."""

    step: int = 0
    tokens: int = 0  # of all ranks, padding included
    cpu_s: float = 0.0  # of all ranks
    recent: list[Losses] = field(default_factory=list)


class Trainer:
    """One rank. All ranks hold the same weights and take the same steps, each with a gradient of its own batches."""

    def __init__(self, folder: Path, rank: int, ranks: int, steps: int):
        self.folder, self.rank, self.ranks, self.steps = folder, rank, ranks, steps
        codec = Codec(folder / "tokenizer" / "tokenizer.json")
        torch.manual_seed(SEED)
        alike = map(torch.from_numpy, (codec.texts, codec.spaced))
        self.model = Nano(ModelConfig.load(Path(__file__).parent), *alike)
        named = dict(self.model.named_parameters())
        plain = [
            name
            for name, p in named.items()
            if p.dim() < 2 or "embed" in name or "_head" in name or name.endswith("gate")
        ]
        self.parameters = list(named.values())
        self.muon = Muon([p for name, p in named.items() if name not in plain])
        self.adam = torch.optim.AdamW([named[name] for name in plain], betas=(0.9, 0.95), weight_decay=0.0)
        self.batches = [
            (0.0, Batches(codec, TOKENS, "short", SHORT, DRILLS, together=ranks)),
            (ALL_FROM, Batches(codec, TOKENS, drills=DRILLS, together=ranks)),
            (LATE_FROM, Batches(codec, TOKENS, "late", drills=LATE_DRILLS, together=ranks)),
        ]
        self.held_out = Batches(codec, TOKENS, "held out")
        self.state = State()
        self._resume()

    def run(self) -> None:
        """To the last step."""
        while self.state.step < self.steps:
            started = time.process_time()
            self._step()
            self.state.cpu_s += (time.process_time() - started) * self.ranks
            self.state.step += 1
            step, last = self.state.step, self.state.step == self.steps
            if self.rank == 0 and (step % LOG_EVERY == 0 or last):
                self._log_losses()
            if self.rank == 0 and (step % EVALUATE_EVERY == 0 or last):
                self._log(f"held out, exact turns: {self.exact()}")
            if self.rank == 0 and (step % SAVE_EVERY == 0 or last):
                self._save()

    def _step(self) -> None:
        done = self.state.step / self.steps
        start, batches = [(start, each) for start, each in self.batches if done >= start][-1]
        is_short = start < ALL_FROM
        losses = self._gradients(
            batches[(self.state.step - round(start * self.steps)) * self.ranks + self.rank],
            others=is_short, teach=not is_short, mtp=done >= MTP_FROM, sparse=done >= LATE_FROM,
            finding_weight=LATE_FINDING_WEIGHT if done >= LATE_FROM else FINDING_WEIGHT,
        )  # fmt: skip
        self._average(losses)
        rate = min(1.0, (self.state.step + 1) / WARMUP) * min(1.0, max(0.01, (1 - done) / (1 - FALL_FROM)))
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * rate
        self.muon.step(MUON_LR * rate)
        self.adam.step()
        for module in self.model.modules():
            if isinstance(module, Moe):
                module.balance(BALANCE)
        self.state.recent.append(losses)
        self.state.tokens += losses.tokens

    def _gradients(
        self, padded: Padded, *, others: bool, teach: bool, mtp: bool, sparse: bool, finding_weight: float
    ) -> Losses:
        for parameter in self.parameters:
            parameter.grad = None
        ids, own = padded.ids, padded.own
        # Each costs a fifth of a step or more, and all learn soon enough.
        is_even = self.state.step % 2 == 0
        teach, sparse, mtp = teach and is_even, sparse and is_even, mtp and not is_even
        batch = self.model.batch(ids.shape[1], sparse=sparse, teach=teach)
        states = self.model(ids, batch)
        text = self._loss(states[:, :-1], ids[:, 1:], own[:, 1:])
        total, losses = text, Losses(ids.numel(), text.item())
        if others:
            total = total + OTHERS_WEIGHT * self._loss(states[:, :-1], ids[:, 1:], padded.others[:, 1:])
        if mtp:
            drafted = self._loss(self.model.draft(states, ids, batch)[:, :-1], ids[:, 2:], own[:, 2:])
            total, losses.mtp = total + MTP_WEIGHT * drafted, drafted.item()
        tools = self.model.tool_loss(batch, padded.tools, padded.called, padded.chosen, FINDING_TOKENS)
        copies = self.model.look_loss(batch, COPYING, padded.copied, FINDING_TOKENS)
        found = self.model.look_loss(batch, FINDING, padded.described, FINDING_TOKENS)
        total = total + finding_weight * (tools + copies + found)
        losses.tools, losses.copies, losses.found = tools.item(), copies.item(), found.item()
        if batch.losses:
            index = torch.stack(batch.losses).mean()
            total, losses.index = total + index, index.item()
        total.backward()
        return losses

    def _loss(self, states: Tensor, wanted: Tensor, own: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(states[own]), wanted[own])

    def _average(self, losses: Losses) -> None:
        """Gradients, losses and expert loads over all ranks, so that all take the same step."""
        if self.ranks == 1:
            return
        moes = [module for module in self.model.modules() if isinstance(module, Moe)]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        names = [each.name for each in fields(Losses)]
        found = [getattr(losses, name) for name in names]
        flat = torch.cat([*(g.flatten() for g in grads), *(moe.load for moe in moes), torch.tensor(found)])
        dist.all_reduce(flat)
        parts = flat.split([*(g.numel() for g in grads), *(len(moe.load) for moe in moes), len(found)])
        for grad, part in zip(grads, parts, strict=False):
            grad.copy_(part.view_as(grad) / self.ranks)
        for moe, part in zip(moes, parts[len(grads) :], strict=False):
            moe.load.copy_(part)
        for name, total in zip(names, parts[-1].tolist(), strict=True):
            setattr(losses, name, int(total) if name == "tokens" else total / self.ranks)

    @torch.no_grad()
    def exact(self) -> str:
        """Turns of each kind that greedy decoding would give to the letter: every token is the likeliest one."""
        right: dict[str, list[bool]] = {}
        for index in range(HELD_OUT):
            padded = self.held_out[index]
            sparse = self.state.step >= LATE_FROM * self.steps
            states = self.model(padded.ids, self.model.batch(padded.ids.shape[1], sparse=sparse, teach=False))
            for row, each in enumerate(padded.samples):
                best = self.model.lm_head(states[row]).argmax(-1)
                for kind, start, stop in each.kinds:
                    right.setdefault(kind, []).append(
                        bool((best[start - 1 : stop - 1] == padded.ids[row, start:stop]).all())
                    )
        return ", ".join(f"{kind} {sum(found)}/{len(found)}" for kind, found in sorted(right.items()))

    def _log_losses(self) -> None:
        state, recent = self.state, self.state.recent
        names = [each.name for each in fields(Losses) if each.name != "tokens"]
        means = [sum(getattr(each, name) for each in recent) / len(recent) for name in names]
        losses = " ".join(f"{name} {mean:.4f}" for name, mean in zip(names, means, strict=True))
        self._log(f"step {state.step} tokens {state.tokens / 1e6:.2f}M cpu {state.cpu_s / 60:.1f}min {losses}")
        recent.clear()

    def _log(self, line: str) -> None:
        print(line, flush=True)
        with (self.folder / "train.log").open("a") as file:
            print(line, file=file)

    def _save(self) -> None:
        path = self.folder / "train.pt"
        content = {
            "model": self.model.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "state": (self.state.step, self.state.tokens, self.state.cpu_s),
        }
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def _resume(self) -> None:
        path = self.folder / "train.pt"
        if not path.exists():
            return
        content = torch.load(path)
        self.model.load_state_dict(content["model"])
        self.adam.load_state_dict(content["adam"])
        for buffer, saved in zip(self.muon.buffers, content["muon"], strict=True):
            buffer.copy_(saved)
        self.state = State(*content["state"])


def _rank(rank: int, folder: Path, ranks: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder.absolute()}/meet", rank=rank, world_size=ranks)
    Trainer(folder, rank, ranks, steps).run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=9300)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    (args.folder / "meet").unlink(missing_ok=True)
    torch.multiprocessing.spawn(_rank, (args.folder, args.ranks, args.steps), args.ranks)


if __name__ == "__main__":
    main()
