"""Drafts change the number of steps and nothing else; the MTP layer is what its formula says. [R36]"""

import random
from pathlib import Path

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm53d.config import Config, Kv, Model, Scheduler, Speculation
from glm53d.errors import StartError
from glm53d.model.config import ModelConfig
from glm53d.model.step import Gathered, Group, plan_step
from glm53d.runner.speculate import accepted
from tests.model.synthetic import make_checkpoint
from tests.model.tiny import tiny_model
from tests.model.world import Alone, ServedWorld, serve

NUM_NEW = 16
GREEDY: dict[str, float] = {}
SEEDED = {"temperature": 0.8, "top_p": 0.95}
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}


def config_of(folder: Path, num_draft_tokens: int, num_pages: int = 128) -> Config:
    return Config(
        model=Model(path=str(folder), max_context_len=128, q_kv_norm_eps=1e-6),
        kv=Kv(page_size=2, num_pages=num_pages),
        scheduler=Scheduler(max_running_requests=4, max_step_tokens=24),
        speculation=Speculation(num_draft_tokens=num_draft_tokens),
    )


def served(config: Config) -> ServedWorld:
    return ServedWorld(Alone(), config, ModelConfig.load(Path(config.model.path)).vocab_size)


def with_oracle(world: ServedWorld, answers: list[list[int]], rng: random.Random) -> ServedWorld:
    """Random weights draft nothing right; so drafts become what is known to come, each right four times in five."""
    drafter = world.ranks.runner.drafter
    draft = drafter.draft

    def knowing(rows, step, hidden, ids, num_accepted) -> None:
        draft(rows, step, hidden, ids, num_accepted)
        for i, slot in enumerate(rows.slot[rows.sampled].tolist()):
            req = world.sched.slots.reqs[slot]
            counted = int(world.sched.slots.num_output[slot]) + int(num_accepted[i]) + 1
            coming = answers[req.handle - 1][counted : counted + drafter.drafts.shape[1]]
            for j, token in enumerate(coming):
                drafter.drafts[slot, j] = token if rng.random() < 0.8 else (token + 1) % world.vocab

    drafter.draft = knowing
    return world


@pytest.mark.parametrize("seed", range(24))
def test_output_with_drafts_is_output_without(seed, tmp_path):
    """Chunked prompts, prefix hits and, in a small pool, retractions; real drafts, and drafts that are often right."""
    rng = random.Random(seed)
    make_checkpoint(tmp_path, seed)
    sampling = (SEEDED if seed % 2 else GREEDY) | (PENALISED if seed % 3 == 2 else {})
    plain = served(config_of(tmp_path, 0))
    expected = serve(plain, seed, NUM_NEW, **sampling)
    longest = max(len(plain.prompts[handle]) + len(plain.received[handle]) for handle in plain.prompts)
    num_pages = rng.choice([128, (longest + 20) // 2])
    config = config_of(tmp_path, rng.randint(1, 5), num_pages)
    world = served(config) if seed % 4 < 1 else with_oracle(served(config), expected, rng)
    assert serve(world, seed, NUM_NEW, **sampling) == expected
    assert world.num_mixed
    assert num_pages > 100 or world.sched.counters.retracted
    if seed % 4:
        heads = world.last_heads.values()
        num_accepted = sum(int(head["num_accepted"]) for head in heads)
        assert num_accepted > 0.2 * sum(len(ids) for ids in expected)


def test_a_good_mtp_layer_saves_most_steps_and_a_last_id_is_read_once(tmp_path):
    """Real drafts, nearly all right. A slot's last id is poisoned once read, and a poisoned one never computed with."""
    make_checkpoint(tmp_path, 2, predictable=True, eos_token_id=[])
    plain = served(config_of(tmp_path, 0))
    expected = serve(plain, 0, NUM_NEW)
    world = served(config_of(tmp_path, 3))
    runner = world.ranks.runner
    plan = runner._plan

    def poisoning(batch, rows):
        step = plan(batch, rows)
        assert (step.input_ids >= 0).all()
        runner.state.last_id[rows.slot[rows.fed]] = -1
        return step

    runner._plan = poisoning
    assert serve(world, 0, NUM_NEW) == expected
    num_accepted = sum(int(head["num_accepted"]) for head in world.last_heads.values())
    assert num_accepted > 0.6 * sum(len(ids) for ids in expected)
    counters = world.sched.counters
    first, second, third, *rest = counters.drafts_accepted.tolist()
    assert counters.drafts_verified >= first >= second >= third > 0 == sum(rest)
    assert first + second + third >= num_accepted  # what ends an answer cuts off what came behind it
    assert world.sched.step < 0.6 * plain.sched.step


@pytest.mark.parametrize(
    ("samples", "drafts", "fed", "expected"),
    [
        ([7, 8, 9], [7, 8], True, 2),
        ([7, 8, 9], [7, 9], True, 1),
        ([7, 8, 9], [6, 8], True, 0),  # right behind a wrong one is worth nothing
        ([7, -1, -1], [7, -1], False, 0),  # a prompt's row has no drafts, whatever its slot still holds
        ([7], [], True, 0),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_is_not_the_sample(samples, drafts, fed, expected):
    rows = accepted(torch.tensor([samples]), torch.tensor([drafts], dtype=torch.int64), torch.tensor([fed]))
    assert rows.tolist() == [expected]


def test_the_mtp_layer_is_a_decoder_layer_over_the_joined_norms_of_next_token_and_state(tmp_path):
    """Held against transformers: a model of that one layer, whose embeddings are the joined inputs."""
    make_checkpoint(tmp_path, 3, quantization_config=None, index_topk=8)
    world = served(config_of(tmp_path, 1))
    runner, config = world.ranks.runner, ModelConfig.load(tmp_path)
    mtp, cache = runner.drafter.mtp, runner.cache
    generator = torch.Generator().manual_seed(1)
    next_ids = torch.randint(config.vocab_size, (30,), generator=generator)
    hidden = torch.randn(30, config.hidden_size, generator=generator)
    cache.block_table[0, :15] = torch.arange(40, 55)
    one_row = [torch.tensor(x).numpy() for x in ([0], [0], [30], [1])]
    states, _ = mtp.forward(plan_step(cache, next_ids, [30], [1], *one_row), hidden, cache)

    reference, tensors = one_layer_model(config, runner)
    prefix = f"model.layers.{config.num_hidden_layers}."

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensors(f"{prefix}{name}.weight")

    embedded = tensors("model.embed_tokens.weight")[next_ids]
    joined = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1) @ tensors(prefix + "eh_proj.weight").T
    with torch.inference_mode():
        expected = reference.model(inputs_embeds=joined[None]).last_hidden_state[0]
    assert (states - expected).abs().max() < 1e-4
    logits = mtp.model.logits(states[-1:], [1])
    assert (logits - expected[-1:] @ tensors("lm_head.weight").T).abs().max() < 1e-4


def alone(folder: Path, num_draft_tokens: int, prompt_len: int, on_draft) -> ServedWorld:
    """One request of so many tokens, served with its drafts looked at: on_draft(drafter, mtp's forward, arguments)."""
    world = served(config_of(folder, num_draft_tokens))
    drafter = world.ranks.runner.drafter
    forward = drafter.mtp.forward
    drafter.mtp.forward = lambda *args: on_draft(drafter, forward, args)
    world.send(1, [i * 7 % 89 + 1 for i in range(prompt_len)], NUM_NEW)
    while not world.is_idle():
        world.step()
    return world


def looked_at(group: Group) -> list[list[int]]:
    """KV rows of each query."""
    if isinstance(group, Gathered):
        return group.locs.tolist()
    assert group.hidden is not None
    return [group.locs[~row].tolist() for row in group.hidden]


def test_later_drafts_attend_to_what_the_first_one_s_indexer_chose_and_to_their_own_rows(tmp_path):
    """And they write no index keys. Context far above index_topk, so that a choice is made."""
    topk, seen = 8, []
    make_checkpoint(tmp_path, 3, index_topk=topk, eos_token_id=[])

    def on_draft(drafter, forward, args):
        step, index_k = args[0], drafter.cache.index_k[-1].data
        before = index_k.clone()
        state, chosen = forward(*args)
        if not step.keeps_choice:
            assert not torch.equal(before, index_k)
            seen.append([chosen])
        else:
            assert torch.equal(before, index_k)
            (group,) = step.groups
            visible = group.locs[0][group.hidden[0, 0] == 0].tolist()
            seen[-1].append((visible, int(step.out_cache_loc)))
        return state, chosen

    alone(tmp_path, 4, 60, on_draft)
    chains = [drafts for drafts in seen if len(drafts) > 1]
    assert len(chains) >= NUM_NEW // 5
    for chosen, *drafts in chains:
        own: list[int] = []
        for visible, loc in drafts:
            own.append(loc)
            assert visible[topk:] == own and len(visible) == topk + len(own)
            lists = [row for group in chosen for row in looked_at(group)]
            assert visible[:topk] in lists
        assert len(drafts) == 3


def test_where_everything_is_chosen_sharing_the_choice_changes_no_draft(tmp_path):
    """Contexts within index_topk: the own indexer would choose all rows, those of the chain among them."""
    found = []
    for shares in (True, False):
        drafts: list[list[int]] = []

        def on_draft(drafter, forward, args, drafts=drafts):
            drafts.append(drafter.drafts.flatten().tolist())
            return forward(*args)

        make_checkpoint(tmp_path / str(shares), 4, index_topk=128, index_share_for_mtp_iteration=shares)
        alone(tmp_path / str(shares), 4, 40, on_draft)
        found.append(drafts)
    assert len(found[0]) > 2 * NUM_NEW and found[0] == found[1]


def one_layer_model(config: ModelConfig, runner):
    """transformers' model with the MTP layer's weights as its only layer; and a reader of the checkpoint."""
    from glm53d.model.weights import Checkpoint

    checkpoint = Checkpoint(Path(runner.config.model.path), config, torch.float32, torch.device("cpu"), with_mtp=True)
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name != "quantization_config"}
    fields |= {"num_hidden_layers": 1, "indexer_types": ["full"], "mlp_layer_types": ["sparse"]}
    fields |= {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "pad_token_id": None}
    fields |= {"num_key_value_heads": config.num_attention_heads, "eos_token_id": list(config.eos_token_id)}
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields)).eval()
    prefix = f"model.layers.{config.num_hidden_layers}."
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            ours = name.replace("model.layers.0.", prefix).replace("model.norm.", prefix + "shared_head.norm.")
            if "rotary" in name or ".experts." in name:
                continue
            tensor.copy_(checkpoint.read_float32(ours))
        for i in range(config.n_routed_experts):
            gate, up, down = (
                checkpoint.read(f"{prefix}mlp.experts.{i}.{part}_proj.weight") for part in ("gate", "up", "down")
            )
            experts.gate_up_proj[i].copy_(torch.cat([gate, up]))
            experts.down_proj[i].copy_(down)
    return model, checkpoint.read


def test_drafts_without_an_mtp_layer_are_refused(tmp_path):
    tiny_model(0, tmp_path)
    with pytest.raises(StartError, match=r"speculation\.num_draft_tokens is 2, and the checkpoint has 0 MTP layers"):
        served(config_of(tmp_path, 2))
