"""How fast the built-in model answers on one CPU core, through HTTP: greedy, alone and eight at once.

    python -m bench.nano.speed [--plain FOLDER] [--rounds 5] [--json]

For daemons that differ in their number of MTP drafts, all with one engine thread; `make serve` takes none. Rounds
alternate between the daemons. Answers are to held-out prompts, of up to some hundred tokens and ten times as long as
their answers; streams are short questions whose answers go on, past their end, to MAX_TOKENS tokens. --plain, an export
with --plain, is what transformers then generates from, in this process and with one thread, one prompt after the other:
what ours is measured against.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from bench.measure import Row, make_parser, report
from bench.nano.evaluate import Case, cases
from bench.nano.faq import ABOUT, SMALL_TALK
from tests.helpers.daemon import running

DRAFTS = (0, 1)
AT_ONCE = 8
AIMS = {1: 250, AT_ONCE: 1000}  # tokens/s
NUMBER = 64  # prompts of a round at eight at once; alone an eighth of them
FIXED = 2 * len(SMALL_TALK + ABOUT)  # questions that come first
MAX_TOKENS = 200


async def rate(url: str, asked: list[Case], at_once: int, *, past_end: bool) -> float:
    """Tokens generated per second, prompts included."""
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession() as session:

        async def one(case: Case) -> int:
            body = case.body | {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": past_end}
            async with gate, session.post(url + "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                return int((await response.json())["usage"]["completion_tokens"])

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(case) for case in asked)))
        return tokens / (time.perf_counter() - started)


async def prompts(url: str, asked: list[Case]) -> list[list[int]]:
    """Their ids, which the daemon tells."""
    async with aiohttp.ClientSession() as session:
        found = []
        for case in asked:
            async with session.post(url + "/tokenize", json=case.body) as response:
                response.raise_for_status()
                found.append((await response.json())["tokens"])
        return found


def transformers_rate(folder: Path, asked: list[list[int]]) -> float:
    """Tokens per second of GlmMoeDsaForCausalLM.generate."""
    import torch
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it has no use for the MTP layer, and says so by the page
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(ids: list[int], number: int) -> int:
        given = torch.tensor([ids])
        return int(model.generate(given, max_new_tokens=number, do_sample=False, top_p=None).shape[1] - len(ids))

    generate(asked[0], 8)
    started = time.perf_counter()
    tokens = sum(generate(ids, MAX_TOKENS) for ids in asked)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plain", type=Path)
    parser.set_defaults(rounds=5)
    args = parser.parse_args()
    every = list(cases(NUMBER))
    questions, asked = every[: 2 * AT_ONCE], every[FIXED:]
    alone = asked[::AT_ONCE]
    loads = [("answers", 1, alone), ("answers", AT_ONCE, asked)]
    loads += [("streams", 1, questions[:2]), ("streams", AT_ONCE, questions)]
    found: dict[tuple[int, str, int], list[float]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as temp:
        urls = {}
        for drafts in DRAFTS:
            settings = (f"speculation.num_draft_tokens={drafts}", "engine.threads=1")
            daemon = stack.enter_context(running(*settings, config="nano-cpu.toml", log=Path(temp) / f"{drafts}.log"))
            urls[drafts] = daemon.url
        for _ in range(args.rounds):
            for drafts, url in urls.items():
                for load, at_once, some in loads:
                    measured = asyncio.run(rate(url, some, at_once, past_end=load == "streams"))
                    found.setdefault((drafts, load, at_once), []).append(measured)
        ids = asyncio.run(prompts(urls[0], alone))
    against = {("answers", 1): transformers_rate(args.plain, ids)} if args.plain else {}
    rows = [
        Row(
            f"{drafts} drafts, {at_once} at once, {load}", "tokens/s", statistics.median(rates), min(rates), max(rates),
            "transformers, alone" if (load, at_once) in against else "", against.get((load, at_once)), AIMS[at_once],
            "more",
        )
        for (drafts, load, at_once), rates in found.items()
    ]  # fmt: skip
    report("nano on one core", rows, args.json)


if __name__ == "__main__":
    main()
