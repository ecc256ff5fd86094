"""Grammars are tried in a process of their own: whatever they do to it, main has a verdict. [R35] [F-G12] [F-G13]"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import glm53d.nano
from glm53d.chat.constraint import Grammar
from glm53d.config import Grammar as GrammarConfig
from glm53d.errors import EngineError, InvalidRequest
from glm53d.front.grammar import GrammarCheck

TOKENIZER = Path(glm53d.nano.__file__).with_name("tokenizer.json")
EOS = (2000, 2007, 2009)
GOOD = Grammar('start: "a"', after_thinking=False)
# Any of which may be missing: seconds of CPU time, in which the library cannot be interrupted.
ENDLESS = "start: %json " + json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(2500)}})


@pytest.fixture
async def checker() -> AsyncIterator[GrammarCheck]:
    checker = GrammarCheck(TOKENIZER, EOS, GrammarConfig(compile_s=0.3))
    checker.start()
    yield checker
    checker.close()


def pid_of(checker: GrammarCheck) -> int:
    assert checker._process is not None
    return checker._process.pid


async def test_a_good_grammar_passes_and_a_bad_one_names_its_field(checker):
    await checker.check(GOOD)
    with pytest.raises(InvalidRequest, match="unknown name") as raised:
        await checker.check(Grammar("start: nothing", after_thinking=False, param="response_format"))
    assert raised.value.param == "response_format"


async def test_one_that_takes_too_long_is_refused_and_others_do_not_wait_for_it(checker):
    """F-G13: its sender gets a 400, by CPU time, so that a busy machine makes no grammar a bad one."""
    hostile = asyncio.create_task(checker.check(Grammar(ENDLESS, after_thinking=False, param="regex")))
    await asyncio.sleep(0)
    await checker.check(GOOD)
    assert not hostile.done()
    with pytest.raises(InvalidRequest, match=r"more than 0\.3 s") as raised:
        await hostile
    assert raised.value.param == "regex"


async def test_a_verdict_is_known_the_second_time(checker):
    for grammar in (GOOD, Grammar("start: nothing", after_thinking=True)):
        for _ in range(3):
            try:
                await checker.check(grammar)
            except InvalidRequest:
                assert grammar is not GOOD
    assert checker._num_asked == 2


async def test_who_sends_the_same_text_at_once_waits_for_one_try_and_may_leave(checker):
    tasks = [asyncio.create_task(checker.check(GOOD)) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks[1:])
    assert checker._num_asked == 1 and tasks[0].cancelled()


async def test_what_nobody_waits_for_any_more_is_not_tried(checker):
    """Clients that come with hostile texts and leave would else keep others waiting for a second each."""
    tasks = [asyncio.create_task(checker.check(Grammar(ENDLESS + "\n" * i, after_thinking=False))) for i in range(9)]
    while checker._num_asked < 2:  # as many have their turn at once
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await checker.check(GOOD)
    assert checker._num_asked == 3 and len(checker._trials) <= 1, "only one may still have its turn"


async def test_who_comes_as_the_last_one_leaves_has_a_try_of_its_own(checker):
    hostile = [asyncio.create_task(checker.check(Grammar(ENDLESS + " " * i, after_thinking=False))) for i in range(2)]
    while checker._num_asked < 2:
        await asyncio.sleep(0)
    first = asyncio.create_task(checker.check(GOOD))
    await asyncio.sleep(0)
    first.cancel()
    await checker.check(GOOD)
    assert first.cancelled() and checker._num_asked == 3
    await asyncio.gather(*hostile, return_exceptions=True)


@pytest.mark.parametrize(
    "text",
    [
        "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
        "start: /" + "(" * 50_000 + "a" + ")" * 50_000 + "/",
        'start: %json {"allOf": ' * 2_000 + "{}" + "}" * 2_000,
        "start: /" + "(a|b)*a(a|b){1000}" * 20 + "c/ /((x{1,1000}){1,1000}){1,1000}/",
        "start: \0\xff",
        "",
    ],
    ids=["nested rules", "nested regex", "nested schema", "many states", "no text", "empty"],
)
async def test_what_might_bring_a_compiler_down_is_refused_or_harmless(checker, text):
    """F-G11 F-G13. Some of these a later library may take; none ends the process that tries."""
    pid = pid_of(checker)
    try:
        await checker.check(Grammar(text, after_thinking=False))
    except InvalidRequest as error:
        assert "\n" not in error.message
    await checker.check(GOOD)
    assert pid_of(checker) == pid


async def test_a_checker_that_dies_fails_who_waits_and_the_next_one_starts_another(checker):
    pid = pid_of(checker)
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(checker.check(GOOD))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await waiting
    await checker.check(GOOD)
    assert pid_of(checker) != pid


def sockets_of(pid: int) -> list[str]:
    """What its descriptors that are sockets lead to."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return sorted(link for link in links if link.startswith("socket:"))


async def test_its_death_is_seen_at_once_though_a_child_of_it_goes_on():
    """Else whoever came before the child's end would wait, and fail with it."""
    checker = GrammarCheck(TOKENIZER, EOS, GrammarConfig(compile_s=60))
    checker.start()
    pid = pid_of(checker)
    hostile = asyncio.create_task(checker.check(Grammar(ENDLESS, after_thinking=False)))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (child := children.read_text()):
        await asyncio.sleep(0.001)
    while sockets_of(int(child)) == sockets_of(pid):
        await asyncio.sleep(0.001)
    os.kill(int(child), signal.SIGSTOP)
    assert "(zombie)" not in Path(f"/proc/{child.strip()}/status").read_text(), "it had the checker's socket to its end"
    try:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended"):
            await hostile
        await checker.check(GOOD)
    finally:
        os.kill(int(child), signal.SIGKILL)
        checker.close()


async def test_nothing_is_left_of_it(checker):
    await checker.check(GOOD)
    pid = pid_of(checker)
    checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
