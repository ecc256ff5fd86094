"""Sampling fields as each dialect has them -> one SamplingParams, and that -> what the scheduler reads. [R14] [R36]"""

import numpy as np
import pytest

from glm53d.config import Config
from glm53d.front.job import Job, SamplingParams
from glm53d.front.prompt import Prompt
from glm53d.front.wire import generate_record
from glm53d.ipc.records import BIAS
from glm53d.sched.req import Req

HI = [{"role": "user", "content": "hi"}]
GOOD = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/generate": {"text": "hi"},
}
FIELDS = {
    "frequency_penalty": -2,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -100, "0": 1.5},
    "allowed_token_ids": [7, 5, 7],
}


async def sampling_of(client, path: str, fields: dict) -> SamplingParams:
    if path == "/generate":
        fields = {"sampling_params": fields}
    answer = await client.post(path, GOOD[path] | fields)
    assert answer.status == 200, answer.body
    return client.engine.jobs[-1].sampling


@pytest.mark.parametrize("path", GOOD)
async def test_every_dialect_has_the_fields_by_the_same_names(client, path):
    sampling = await sampling_of(client, path, FIELDS)
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
    assert penalties == (-2.0, 0.5, 1.25)
    assert sampling.logit_bias == ((5, -100.0), (0, 1.5))
    assert sampling.allowed_ids == (7, 5)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "neutral",
    [
        dict.fromkeys(FIELDS),
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}},
        {"bad_words": [], "stop_regex": None, "use_beam_search": False, "length_penalty": 1.0},
        {"spaces_between_special_tokens": False},
    ],
)
async def test_what_changes_nothing_is_taken_for_absent(client, path, neutral):
    assert await sampling_of(client, path, neutral) == await sampling_of(client, path, {})


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"logit_bias": {"9999999": 5}}, "logit_bias.9999999"),
        ({"allowed_token_ids": [9999999]}, "allowed_token_ids[0]"),
    ],
)
async def test_an_id_outside_the_vocabulary_is_refused_before_it_reaches_an_engine(client, path, fields, where):
    """F-G7"""
    if path == "/generate":
        fields, where = {"sampling_params": fields}, f"sampling_params.{where}"
    answer = await client.post(path, GOOD[path] | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, where)
    assert not client.engine.jobs


async def test_generate_has_the_native_name_of_the_seed_and_refuses_parameters_that_there_are_not(client):
    assert (await sampling_of(client, "/generate", {"sampling_seed": 5, "seed": 4})).seed == 5
    assert (await sampling_of(client, "/generate", {"seed": 4})).seed == 4
    answer = await client.post("/generate", {"text": "a", "sampling_params": {"temprature": 0.5}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "sampling_params.temprature")


def req_of(sampling: SamplingParams) -> Req:
    prompt = Prompt(np.arange(5, dtype=np.int32), np.empty((0, 2), np.uint64), 0)
    record = generate_record(1, Job("r", 0, sampling=sampling), prompt, 1000, bytes(16), Config())
    return Req.from_record(b"".join(record), 0, 0)


def test_the_scheduler_reads_what_the_dialects_wrote():
    req = req_of(SamplingParams(frequency_penalty=-2.0, logit_bias=((5, -100.0), (0, 1.5)), stop_ids=(8,), stop=("x",)))
    assert req.head["frequency_penalty"] == -2.0 and req.head["repetition_penalty"] == 1.0
    assert req.logit_bias.tolist() == [(5, -100.0), (0, 1.5)] and req.logit_bias.dtype == BIAS
    assert (req.stop_ids.tolist(), req.stop_strings, req.rid) == ([8], [b"x"], "r")


def test_ids_that_alone_are_allowed_keep_their_bias():
    req = req_of(SamplingParams(logit_bias=((5, 2.5), (6, 1.0)), allowed_ids=(7, 5)))
    assert req.logit_bias.tolist() == [(7, 0.0), (5, 2.5)] and req.needs_table


def test_an_id_has_one_bias_the_last_that_was_given():
    """A tag that must not come is biased last."""
    req = req_of(SamplingParams(logit_bias=((5, 2.5), (6, 1.0), (5, float("-inf")))))
    assert req.logit_bias.tolist() == [(5, float("-inf")), (6, 1.0)]


@pytest.mark.parametrize(
    ("sampling", "needs_table", "is_penalised"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(temperature=0.5, top_k=3, min_new_tokens=4, stop_ids=(8,)), False, False),
        (SamplingParams(logit_bias=((5, 0.0),)), True, False),
        (SamplingParams(allowed_ids=(5,)), True, False),
        (SamplingParams(frequency_penalty=0.1), True, True),
        (SamplingParams(presence_penalty=-0.1), True, True),
        (SamplingParams(repetition_penalty=0.9), True, True),
    ],
)
def test_only_who_asks_for_it_takes_a_row_of_the_sampling_tables(sampling, needs_table, is_penalised):
    req = req_of(sampling)
    assert (req.needs_table, req.is_penalised) == (needs_table, is_penalised)
