"""Sampling: the parameters of any dialect -> one SamplingParams, and by name a no to what is not served. [R14]

Types and ranges stand in the structs; msgspec checks them while it parses and names the path of a wrong field.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.job import SamplingParams
from glm53d.server.body import join

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1)]
Budget = Annotated[int, Meta(ge=0)]
CountOrNone = Annotated[int, Meta(ge=0)]  # 0: the prompt is computed, and nothing is said
Timeout = Annotated[float, Meta(gt=0, le=1e6)]  # seconds
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

MAX_STOP_BYTES = 1024  # of one stop string, in UTF-8
MAX_BIASED_IDS = 1024  # of a request

_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def not_served(*neutral: Json) -> Meta:
    """Mark a field that clients know and we do not serve: any value but null and these is refused by its name."""
    # With their types: true equals 1 and is no number a client may mean. typing would even merge two such Metas.
    return Meta(
        description=" or ".join(["Not served: null", *(msgspec.json.encode(value).decode() for value in neutral)]),
        extra={"neutral": tuple((type(value), value) for value in neutral)},
    )


SchemaText = str | dict[str, Json]
"""A JSON Schema, or its JSON text."""
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


class StructuredOutputs(msgspec.Struct):
    """The form of the answer: exactly one of the served fields."""

    json: SchemaText | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None

    structural_tag: Annotated[Json, not_served()] = None
    whitespace_pattern: Annotated[Json, not_served()] = None
    disable_any_whitespace: Annotated[Json, not_served(False)] = None
    disable_additional_properties: Annotated[Json, not_served(False)] = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every dialect calls by the same name."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_IDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BIASED_IDS)] | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None  # [R40]
    no_stop_trim: bool | None = None  # two names of one switch: what matched stays in the text
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # of tokenizers of another kind: here it changes nothing
    json_schema: SchemaText | None = None  # the form of the answer, under SGLang's names: see constrained.py [R35]
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None  # and under vLLM's, the newer and the older ones
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None

    n: Annotated[Json, not_served(1)] = None
    bad_words: Annotated[Json, not_served([])] = None
    stop_regex: Annotated[Json, not_served([])] = None
    custom_params: Annotated[Json, not_served()] = None
    logits_processors: Annotated[Json, not_served([])] = None
    use_beam_search: Annotated[Json, not_served(False)] = None
    length_penalty: Annotated[Json, not_served(1, 1.0)] = None
    structural_tag: Annotated[Json, not_served()] = None


def refuse_not_served(fields: msgspec.Struct, at: str = "") -> None:
    """Raise InvalidRequest for the first field that asks for what is not served."""
    for name, neutral in _neutral_values(type(fields)).items():
        value = getattr(fields, name)
        if value is not None and (type(value), value) not in neutral:
            raise InvalidRequest(f"`{join(at, name)}` is not supported.", join(at, name))


def to_sampling(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    min_tokens: tuple[str, int | None] = ("", None),
    priority: int | None,
    thinking_budget: int | None = None,
    defaults: Mapping[str, Any],
    vocab_size: int,
    at: str = "",
    stop_name: str = "stop",
) -> SamplingParams:
    """The parameters of a request, normalised; max_tokens and min_tokens (with its name) are what the dialect calls so.

    `defaults` are the checkpoint's own (generation_config.json). Raises InvalidRequest.
    """
    refuse_not_served(fields, at)
    min_name, least = min_tokens
    if least and max_tokens is not None and least > max_tokens:
        raise InvalidRequest(f"`{join(at, min_name)}` is more than the most tokens asked for.", join(at, min_name))
    for name in ("stop_token_ids", "allowed_token_ids"):
        for i, token in enumerate(getattr(fields, name) or ()):
            _check_token(token, vocab_size, join(at, f"{name}[{i}]"))

    def chosen(name: str, neutral: float) -> Any:
        given = getattr(fields, name)
        return given if given is not None else defaults.get(name, neutral)

    return SamplingParams(
        temperature=float(chosen("temperature", 1.0)),
        top_p=float(chosen("top_p", 1.0)),
        top_k=max(int(chosen("top_k", 0)), 0),
        min_p=float(chosen("min_p", 0.0)),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size, join(at, "logit_bias")),
        allowed_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
        seed=None if fields.seed is None else fields.seed & (2**64 - 1),
        # Beyond any context, so a cap changes no meaning; the records hold 32 bits.
        max_new_tokens=None if max_tokens is None else min(max_tokens, 2**31 - 1),
        min_new_tokens=min(least or 0, 2**31 - 1),
        thinking_budget=None if thinking_budget is None else min(thinking_budget, 2**31 - 1),
        ignore_eos=bool(fields.ignore_eos),
        stop_ids=tuple(fields.stop_token_ids or ()),
        stop=_stop_strings(fields.stop, join(at, stop_name)),
        no_stop_trim=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        priority=priority or 0,
    )


def _check_token(token: int, vocab_size: int, path: str) -> None:
    """Raise InvalidRequest for an id that no token has. [F-G7]"""
    if token >= vocab_size:
        raise InvalidRequest(f"`{path}` is not in the vocabulary of {vocab_size} tokens.", path)


def _logit_bias(given: Mapping[str, float], vocab_size: int, at: str) -> tuple[tuple[int, float], ...]:
    """JSON has the ids as strings: their digits, in the one way that numbers are written."""
    for key in given:
        path = join(at, key)
        if not _ID.fullmatch(key):
            raise InvalidRequest(f"`{path}`: the keys of `{at}` are token ids.", path)
        _check_token(int(key), vocab_size, path)
    return tuple((int(key), bias) for key, bias in given.items())


def _stop_strings(stop: str | list[str] | None, path: str) -> tuple[str, ...]:
    strings = [(path, stop)] if isinstance(stop, str) else [(join(path, f"[{i}]"), s) for i, s in enumerate(stop or ())]
    for at, string in strings:
        if not 1 <= len(string.encode()) <= MAX_STOP_BYTES:
            raise InvalidRequest(f"`{at}` must have 1 to {MAX_STOP_BYTES} bytes.", at)
    return tuple(string for _, string in strings)


@cache
def _neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[tuple[type, Json], ...]]:
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra is not None:
                found[name] = meta.extra["neutral"]
    return found
