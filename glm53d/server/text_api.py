"""/tokenize and /detokenize: the ids a request would have, and the text of ids; the way of requests, without the model.

Answers carry the fields of both SGLang and vLLM, whose clients expect `text` or `prompt`.
"""

from dataclasses import replace

import msgspec
import numpy as np
from aiohttp import web

from glm53d.chat.conversation import Conversation
from glm53d.errors import ContextTooLong, InvalidRequest
from glm53d.server import body, exchange
from glm53d.server.openai_chat import ChatBody, Message, to_conversation
from glm53d.server.openai_completions import to_ids
from glm53d.server.openai_tools import to_tools
from glm53d.server.sampling import TokenId


class TokenizeBody(ChatBody, kw_only=True):
    """The request: `prompt`, raw text, or a chat as /v1/chat/completions takes it, of which only the prompt counts."""

    prompt: str | None = None
    messages: list[Message] = msgspec.field(default_factory=list)
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The request."""

    tokens: list[TokenId]
    skip_special_tokens: bool | None = None  # true
    model: str | None = None


PART = 4096
"""Ids that are made JSON in one go: 0.2 ms."""

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: web.Request) -> web.Response:
    """Handle POST /tokenize."""
    req, _ = await exchange.receive(request, _TOKENIZE)
    engine = request.app[exchange.SERVICE].engine
    exchange.choose_model(engine, req.model)
    ids = await engine.tokenize(_prompt(req))
    tokens = await engine.in_text_pool(_as_json, ids)
    answer = {"tokens": tokens, "count": len(ids), "max_model_len": engine.limits.max_context_len}
    return body.json_response(body.encode(answer))


async def detokenize(request: web.Request) -> web.Response:
    """Handle POST /detokenize."""
    req, _ = await exchange.receive(request, _DETOKENIZE)
    engine = request.app[exchange.SERVICE].engine
    exchange.choose_model(engine, req.model)
    if len(req.tokens) > (most := engine.limits.max_context_len):
        raise ContextTooLong(f"`tokens` has {len(req.tokens)} ids; at most {most} fit the context.", "tokens")
    ids = to_ids(req.tokens, engine.vocab.size, "tokens") if req.tokens else np.empty(0, np.int32)
    text = await engine.detokenize(ids, skip_special=req.skip_special_tokens is not False)
    return body.json_response(body.encode({"text": text, "prompt": text}))


def _as_json(ids: np.ndarray) -> msgspec.Raw:
    """The ids as an array. In parts, each of which holds the GIL."""
    parts = (body.encode(ids[i : i + PART].tolist())[1:-1] for i in range(0, len(ids), PART))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _prompt(req: TokenizeBody) -> Conversation | str:
    if req.prompt is not None and req.messages:
        raise InvalidRequest("`prompt` and `messages` exclude each other.", "prompt")
    if req.prompt is not None:
        return req.prompt
    if not req.messages:
        raise InvalidRequest("Either `prompt` or `messages` is required.", "prompt")
    conversation = to_conversation(req, to_tools(req))
    return replace(conversation, add_generation_prompt=req.add_generation_prompt is not False)
