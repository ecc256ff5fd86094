"""How good a nano checkpoint is: held-out conversations through the daemon, greedy, compared to the letter.

    python -m bench.nano.evaluate FOLDER [--plain FOLDER] [--number 600]

FOLDER is served with FP8 rows and MTP drafts, which change no token; once more with attention to every token, for the
prompts that have more of them than indexers choose. --plain, an export with --plain, is served as it is, and its texts
are compared with FOLDER's. Prints a table and ends with 1 when an aim is missed.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.nano.chats import Json, Turn, known
from bench.nano.data import EFFORTS, sample
from bench.nano.faq import ABOUT, SMALL_TALK
from tests.helpers.daemon import running

SPLIT = "evaluation"
AT_ONCE = 8
TOPK = 256  # the model's index_topk: a longer context is attended to in part
FOLDER_SETTINGS = ('kv.dtype="fp8"', "speculation.num_draft_tokens=1")

AIMS = {
    "well-formed turns": 1.0,
    "tool: exact": 0.95,
    "echo: exact": 0.95,
    "recall: exact": 0.95,
    "fixed questions: exact": 0.98,
    "beyond top-k: exact, against attention to all": 0.97,
    "thinking grows with effort": 1.0,
    "FP8 gives the text of FP32": 0.97,
    "first draft accepted": 0.75,
}


@dataclass(slots=True)
class Case:
    """A prompt and what should come of it."""

    group: str
    effort: str
    body: Json
    wanted: Turn


@dataclass(slots=True)
class Given:
    """What came of it."""

    thinking: str
    answer: str
    call: tuple[str, Any] | None
    well_formed: bool
    prompt_tokens: int
    completion_tokens: int
    accepted_tokens: int

    def is_exact(self, wanted: Turn) -> bool:
        """Answer or call are to the letter. Thinking may differ."""
        return (self.answer, self.call) == (wanted.answer, wanted.call)

    @property
    def is_beyond_topk(self) -> bool:
        """Indexers had to choose."""
        return self.prompt_tokens > TOPK


def cases(number: int) -> Iterator[Case]:
    """The fixed questions, each once in each language, then held-out conversations. The same ones each time."""
    for index, entry in enumerate(SMALL_TALK + ABOUT):
        for zh, question in ((False, entry.questions[0]), (True, entry.zh_questions[0])):
            effort = EFFORTS[index % 3]
            body: Json = {"messages": [{"role": "user", "content": question}], "reasoning_effort": effort}
            yield Case("fixed questions", effort, body, known(question, index, zh))
    for index in range(number):
        drawn = sample(index, split=SPLIT)
        conversation, last = drawn.conversation, drawn.turns[-1]
        body = {"messages": _for_api(conversation.messages[:-1]), "reasoning_effort": conversation.reasoning_effort}
        if conversation.tools:
            body["tools"] = conversation.tools
        yield Case(last.kind, str(conversation.reasoning_effort), body, last)


def _for_api(messages: list[Json]) -> list[Json]:
    """Arguments as the text of JSON, calls and results with ids."""
    out, call_id = [], ""
    for number, message in enumerate(messages):
        message = dict(message)
        if message["role"] == "tool":
            message["tool_call_id"] = call_id
        if calls := message.get("tool_calls"):
            assert isinstance(calls, list)
            call_id = f"call_{number}"
            function = calls[0]["function"] | {"arguments": json.dumps(calls[0]["function"]["arguments"])}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        out.append(message)
    return out


async def answers(url: str, asked: list[Case]) -> list[Given]:
    """Greedy answers, some at once."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession() as session:

        async def one(case: Case) -> Given:
            async with gate, session.post(
                url + "/v1/chat/completions", json=case.body | {"temperature": 0, "max_tokens": 300}
            ) as response:  # fmt: skip
                response.raise_for_status()
                return _given(await response.json())

        return list(await asyncio.gather(*(one(case) for case in asked)))


def _given(body: Any) -> Given:
    choice, usage = body["choices"][0], body["usage"]
    message = choice["message"]
    answer, thinking, calls = message["content"] or "", message["reasoning_content"] or "", message.get("tool_calls")
    call = None
    well_formed = (
        choice["finish_reason"] == ("tool_calls" if calls else "stop") and bool(thinking) and "<" not in answer
    )
    if calls:
        call = calls[0]["function"]["name"], json.loads(calls[0]["function"]["arguments"])
        well_formed = well_formed and len(calls) == 1
    details = usage.get("completion_tokens_details") or {}
    return Given(
        thinking, answer, call, well_formed and bool(answer or calls), usage["prompt_tokens"],
        usage["completion_tokens"], details.get("accepted_prediction_tokens", 0),
    )  # fmt: skip


def table(
    asked: list[Case], given: list[Given], plain: list[Given] | None = None, dense: list[Given] | None = None
) -> dict[str, float]:
    """Shares by name, those of AIMS among them. dense: for those beyond top-k."""
    pairs = list(zip(asked, given, strict=True))
    rows = {"well-formed turns": _share(each.well_formed for each in given)}
    for group in sorted({case.group for case in asked}):
        rows[f"{group}: exact"] = _exact([pair for pair in pairs if pair[0].group == group])
    within = [pair for pair in pairs if not pair[1].is_beyond_topk]
    beyond = [pair for pair in pairs if pair[1].is_beyond_topk]
    rows["within top-k: exact"], rows["beyond top-k: exact"] = _exact(within), _exact(beyond)
    if dense is not None:
        with_all = _exact([(case, each) for (case, _), each in zip(beyond, dense, strict=True)])
        rows["beyond top-k: exact, against attention to all"] = _exact(beyond) / with_all if with_all else 0.0
    lengths = [
        [len(each.thinking) for case, each in pairs if case.effort == effort and not case.wanted.zh]
        for effort in EFFORTS
    ]
    low, high, most = (sum(found) / len(found) for found in lengths)
    rows |= {"thinking, low (characters)": low, "thinking, high": high, "thinking, max": most}
    rows["thinking grows with effort"] = float(low < high < most)
    accepted = sum(each.accepted_tokens for each in given)
    drafted = sum(each.completion_tokens - 1 for each in given) - accepted
    rows["first draft accepted"] = accepted / drafted if drafted else 0.0
    if plain is not None:
        same = (
            (a.thinking, a.answer, a.call) == (b.thinking, b.answer, b.call) for a, b in zip(given, plain, strict=True)
        )
        rows["FP8 gives the text of FP32"] = _share(same)
    return rows


def _exact(pairs: list[tuple[Case, Given]]) -> float:
    return _share(each.is_exact(case.wanted) for case, each in pairs)


def _share(found: Iterator[bool]) -> float:
    every = list(found)
    return sum(every) / len(every) if every else 0.0


def served(folder: Path, asked: list[Case], *settings: str) -> list[Given]:
    """Answers of a daemon that serves the folder."""
    with tempfile.TemporaryDirectory() as temp:
        path = json.dumps(str(folder.absolute()))
        with running(f"model.path={path}", *settings, log=Path(temp) / "log") as daemon:
            return asyncio.run(answers(daemon.url, asked))


def served_dense(folder: Path, asked: list[Case]) -> list[Given]:
    """Likewise, with indexers that choose every token."""
    with tempfile.TemporaryDirectory() as temp:
        copied = Path(temp) / "dense"
        shutil.copytree(folder, copied)
        fields = json.loads((copied / "config.json").read_text())
        fields["index_topk"] = fields["max_position_embeddings"]
        (copied / "config.json").write_text(json.dumps(fields))
        return served(copied, asked, *FOLDER_SETTINGS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", type=Path)
    parser.add_argument("--number", type=int, default=600)
    parser.add_argument("--show", type=int, default=5, help="wrong answers to print")
    args = parser.parse_args()
    asked = list(cases(args.number))
    given = served(args.folder, asked, *FOLDER_SETTINGS)
    plain = served(args.plain, asked) if args.plain else None
    beyond = [case for case, each in zip(asked, given, strict=True) if each.is_beyond_topk]
    rows = table(asked, given, plain, served_dense(args.folder, beyond))
    missed = [name for name, aim in AIMS.items() if rows.get(name, aim) < aim]
    for name, value in rows.items():
        print(f"{name:55} {value:8.3f}" + (f"   aim {AIMS[name]}" if name in AIMS else ""))
    for case, each in zip(asked, given, strict=True):
        if args.show and not each.is_exact(case.wanted):
            args.show -= 1
            print(f"\n{case.group}: {case.body['messages'][-1]}\n  wanted {case.wanted.call or case.wanted.answer}")  # type: ignore[index]
            print(f"  given  {each.call or each.answer}\n  thinking {each.thinking}")
    print("\nmissed:", ", ".join(missed) or "nothing")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
