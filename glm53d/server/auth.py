"""Auth: which key a request carries, and what that lets it do. [R14]"""

import hashlib
import hmac
import re
from enum import Enum
from pathlib import Path

from aiohttp import web

from glm53d.config import Server
from glm53d.errors import ConfigError, Forbidden, Unauthorized

_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")  # no comma: proxies join a header that came twice with one


class Access(Enum):
    """Who may call a route."""

    OPEN = "open"  # anybody: probes have no key [F-H13]
    USER = "user"  # who has any key
    ADMIN = "admin"  # who has the admin key; without one configured, who has any key


class Keys:
    """The configured keys. With none, everybody may do everything but, when there is an admin key, what it guards."""

    def __init__(self, server: Server):
        """Raises ConfigError for a file that cannot be read, and for what cannot stand in a header."""
        keys = [*server.api_keys, *(_read(server.api_keys_file) if server.api_keys_file else ())]
        for key in (*keys, *([server.admin_key] if server.admin_key else ())):
            if not _KEY.fullmatch(key):
                raise ConfigError("a key in server.api_keys or server.admin_key has blanks, commas or is not ASCII")
        if server.api_keys_file and not keys:
            raise ConfigError(f"server.api_keys_file {server.api_keys_file} holds no key")
        self._users = [_digest(key) for key in keys]
        self._admin = _digest(server.admin_key) if server.admin_key else None

    def check(self, request: web.Request, access: Access) -> None:
        """Raise Unauthorized without a good key, Forbidden when a good one is not enough."""
        if access is Access.OPEN or not self._is_guarded(access):
            return
        given = _given(request)
        if self._admin is not None and _any_equal(given, [self._admin]):
            return
        if not _any_equal(given, self._users):
            raise Unauthorized("A valid key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        if access is Access.ADMIN and self._admin is not None:
            raise Forbidden("This needs the admin key.")

    def admits(self, request: web.Request) -> bool:
        """Whether the request may see what needs a key, on a route that is open."""
        try:
            self.check(request, Access.USER)
        except Unauthorized:
            return False
        return True

    def _is_guarded(self, access: Access) -> bool:
        return bool(self._users) or (access is Access.ADMIN and self._admin is not None)


def _given(request: web.Request) -> list[bytes]:
    """Digests of the keys that a request carries: routers add an Authorization header to the client's own."""
    keys = request.headers.getall("x-api-key", [])
    for value in ",".join(request.headers.getall("Authorization", [])).split(","):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            keys.append(key.strip())
    return [_digest(key) for key in keys]


def _any_equal(given: list[bytes], known: list[bytes]) -> bool:
    """Compares every pair, each in constant time: how long it takes says nothing about a key."""
    return sum(hmac.compare_digest(ours, theirs) for ours in known for theirs in given) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # of one length, whatever the key's is


def _read(path: str) -> list[str]:
    """One key per line; blank lines and those that start with # are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"server.api_keys_file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"server.api_keys_file {path} cannot be read: {error}") from None
    return [key for line in lines if (key := line.strip()) and not key.startswith("#")]
