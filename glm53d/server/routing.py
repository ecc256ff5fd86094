"""Routing: what a request says of where it goes and with whom it shares pages, in any dialect. [R19] [R25] [R45]"""

from typing import Annotated, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta

from glm53d.errors import InvalidRequest
from glm53d.front.job import Routing
from glm53d.server import exchange

DpRank = Annotated[int, Meta(ge=0, le=2**31 - 1)]

Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]

DP_RANK_HEADER = "x-override-routed-dp-rank"
SESSION_HEADERS = (
    "session-id",  # Codex
    "x-claude-code-session-id",
    "x-session-affinity",  # opencode
    "x-session-id",
    "x-smg-routing-key",  # what gateways route by
)
"""Headers in which agents send a key that stays the same for a session; the first one there counts. [F-J4]"""


class RoutedFields(Protocol):
    """The fields of a body that routing() reads."""

    @property
    def data_parallel_rank(self) -> int | None: ...
    @property
    def routed_dp_rank(self) -> int | None: ...
    @property
    def bootstrap_room(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def extra_key(self) -> str | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...


def routing(request: web.Request, fields: RoutedFields, session: str = "") -> Routing:
    """Where the request goes: a header overrides the body. Raises InvalidRequest for a rank that is not there.

    session: a key that the dialect has of its own, for requests with none of the others.
    """
    return Routing(
        dp_rank=_dp_rank(request, fields),
        bootstrap_room=fields.bootstrap_room,
        session=fields.prompt_cache_key or _session_header(request) or session,
        salt=_salt(fields.cache_salt, fields.extra_key),
    )


def _dp_rank(request: web.Request, fields: RoutedFields) -> int | None:
    num_ranks = request.app[exchange.SERVICE].config.parallel.attn_dp_size
    header = request.headers.get(DP_RANK_HEADER)
    given = {
        DP_RANK_HEADER: None if header is None else _number(header),
        "data_parallel_rank": fields.data_parallel_rank,
        "routed_dp_rank": fields.routed_dp_rank,
    }
    for param, rank in given.items():
        if rank is not None:
            if not 0 <= rank < num_ranks:
                raise InvalidRequest(f"`{param}` must be an attention-DP rank from 0 to {num_ranks - 1}.", param)
            return rank
    return None


def _number(text: str) -> int:
    """The number that a header spells, -1 for what is none that a rank could have."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _session_header(request: web.Request) -> str:
    return next((request.headers[name] for name in SESSION_HEADERS if request.headers.get(name)), "")


def _salt(cache_salt: str | None, extra_key: str | None) -> bytes:
    """Both in one, so that no two pairs are the same."""
    return msgspec.json.encode((cache_salt, extra_key)) if cache_salt or extra_key else b""
