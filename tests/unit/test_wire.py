"""What main writes into a request's record, and reads from its last one."""

import numpy as np
import pytest

from glm53d.chat.constraint import Grammar
from glm53d.chat.conversation import Conversation
from glm53d.config import Config, Scheduler
from glm53d.errors import DeadlineExceeded, EngineError, GrammarFailed, QueueTimeout
from glm53d.front.health import Waiting
from glm53d.front.job import Job, OutSpec, Routing, SamplingParams
from glm53d.front.prompt import Prompt
from glm53d.front.wire import generate_record, read_finish
from glm53d.ipc.records import GENERATE, HELPER, OUTPUT, STOP_BEFORE_CALLS, FinishReason, GrammarKind
from glm53d.sched.req import Req
from glm53d.server.openai_common import usage_object

TOOL = {"type": "function", "function": {"name": "f"}}


def head_of(job: Job, config: Config = Config()) -> np.void:  # noqa: B008  frozen
    prompt = Prompt(np.arange(5, dtype=np.int32), np.empty((0, 2), np.uint64), 0)
    return np.frombuffer(generate_record(1, job, prompt, 1000, bytes(16), config)[0], GENERATE)[0]


@pytest.mark.parametrize(
    ("tools", "sampling", "is_helper"),
    [
        (None, SamplingParams(max_new_tokens=64), True),
        (None, SamplingParams(max_new_tokens=32_000), False),
        (None, SamplingParams(), False),
        (None, SamplingParams(max_new_tokens=64, priority=1), False),  # the client has said what it wants
        ([TOOL], SamplingParams(max_new_tokens=64), False),
    ],
)
def test_a_small_chat_without_tools_is_a_helper(tools, sampling, is_helper):
    """[F-J3]"""
    chat = Conversation([{"role": "user", "content": "hi"}], tools)
    assert bool(head_of(Job("r", 0, conversation=chat, sampling=sampling))["flags"] & HELPER) is is_helper


@pytest.mark.parametrize(
    ("chats", "sampling", "budget"),
    [
        (True, SamplingParams(max_new_tokens=101), 75),
        (True, SamplingParams(max_new_tokens=101, thinking_budget=90), 90),
        (True, SamplingParams(), -1),
        (False, SamplingParams(max_new_tokens=101), -1),
    ],
)
def test_a_share_of_a_chats_tokens_is_for_the_answer(chats, sampling, budget):
    """[R46]"""
    config = Config(scheduler=Scheduler(thinking_share=0.75))
    job = Job("r", 0, text="hi", sampling=sampling, out=OutSpec(starts_in_reasoning=chats))
    assert head_of(job, config)["thinking_budget"] == budget
    assert head_of(job)["thinking_budget"] == (sampling.thinking_budget or -1)


def test_stop_strings_leave_calls_alone_where_main_reads_them():
    for ids in ((7,), ()):
        job = Job("r", 0, text="hi", out=OutSpec(starts_in_reasoning=True, python_ids=ids))
        assert bool(head_of(job)["flags"] & STOP_BEFORE_CALLS) is bool(ids)


@pytest.mark.parametrize(("asked", "sent"), [(None, 995), (10_000, 995), (7, 7), (0, 0)])
def test_what_is_not_said_of_the_most_tokens_is_what_the_context_leaves(asked, sent):
    assert head_of(Job("r", 0, text="hi", sampling=SamplingParams(max_new_tokens=asked)))["max_new_tokens"] == sent


def test_a_raw_prompt_is_no_helper():
    assert not head_of(Job("r", 0, text="hi", sampling=SamplingParams(max_new_tokens=1)))["flags"] & HELPER


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        (None, GrammarKind.NONE),
        (Grammar("start: /é+/", after_thinking=False), GrammarKind.FROM_START),
        (Grammar("start: /é+/", after_thinking=True), GrammarKind.AFTER_THINKING),
    ],
)
def test_a_grammar_goes_with_the_request(grammar, kind):
    """[R35]"""
    head, *tail = generate_record(
        1, Job("rid", 0, text="hi", sampling=SamplingParams(grammar=grammar, stop_ids=(7,))),
        Prompt(np.arange(5, dtype=np.int32), np.empty((0, 2), np.uint64), 0), 1000, bytes(16), Config(),
    )  # fmt: skip
    fields = np.frombuffer(head, GENERATE)[0]
    assert fields["grammar_kind"] == kind
    text = "" if grammar is None else grammar.text
    assert tail[-2][: fields["grammar_bytes"]].decode() == text and tail[-1].startswith(b"rid")
    assert Req.from_record(b"".join([head, *tail]), 0, 0).rid == "rid"


@pytest.mark.parametrize(
    ("error", "kind", "status", "message"),
    [
        ("queue_timeout: too long", QueueTimeout, 503, "too long"),
        ("deadline_exceeded: too late", DeadlineExceeded, 504, "too late"),
        ("grammar_failed: stuck", GrammarFailed, 500, "stuck"),
        ("something: else", EngineError, 500, "something: else"),
        ("", EngineError, 500, "The scheduler failed."),
    ],
)
def test_what_the_scheduler_says_has_its_own_status(error, kind, status, message):
    head = np.zeros(1, OUTPUT)
    head["finish_reason"], head["error_bytes"] = FinishReason.ERROR, len(error)
    with pytest.raises(EngineError) as raised:
        read_finish(Job("r", 0), {}, head.tobytes() + error.encode(), b"", b"", [], b"", 0, 0)
    assert (type(raised.value), raised.value.status, raised.value.message) == (kind, status, message)


@pytest.mark.parametrize(
    ("waiting", "seconds"),
    [
        (Waiting(3, 0, 0, 0, 3), 1),
        (Waiting(9, 5000, 0, 0, 9), 1),
        (Waiting(9, 5001, 1000, 0, 9), 6),
        (Waiting(9, 10**9, 1000, 0, 9), 60),
    ],
)
def test_clients_are_told_to_come_back_when_the_queue_has_drained(waiting, seconds):
    assert waiting.drain_s == seconds


@pytest.mark.parametrize("num_accepted", [0, 7])
def test_accepted_drafts_are_in_the_usage_of_those_that_have_any(num_accepted):
    """[R42]"""
    head = np.zeros(1, OUTPUT)
    head["finish_reason"], head["num_output_ids"], head["num_accepted"] = FinishReason.LENGTH, 20, num_accepted
    head["matched_id"] = head["matched_stop"] = -1
    usage = read_finish(Job("r", 0), {}, head.tobytes(), b"", b"", [], b"", 3, 0).usage
    details = usage_object(usage)["completion_tokens_details"]
    assert details == {"reasoning_tokens": 3} | ({"accepted_prediction_tokens": 7} if num_accepted else {})


@pytest.mark.parametrize(("seconds", "deadline_ns"), [(None, 0), (0.5, 1_500_000_000), (1e6, 10**15 + 10**9)])
def test_a_timeout_for_the_first_token_is_a_deadline_from_the_body_on(seconds, deadline_ns):
    assert head_of(Job("r", 10**9, text="hi", first_token_timeout_s=seconds))["deadline_ns"] == deadline_ns


def test_a_bootstrap_room_goes_with_the_request():
    """[R25]"""
    for room in (None, 0, 2**63 - 1):
        head = head_of(Job("r", 0, text="hi", routing=Routing(bootstrap_room=room)))
        assert head["bootstrap_room"] == (-1 if room is None else room)
