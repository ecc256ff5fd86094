"""Reload: what SIGHUP makes of a configuration that has changed while the daemon runs.

A key that is withdrawn, a certificate that is renewed, a limit or a log level need no restart; for all else the log
says that it takes one. What is wrong with the new configuration is told, and then nothing of it holds.
"""

import logging
from collections.abc import Callable, Iterator

import msgspec

from glm53d.config import Config
from glm53d.errors import EngineError, StartError
from glm53d.front.engine import Engine
from glm53d.obs import log as logs
from glm53d.server.app import HttpServer

log = logging.getLogger(__name__)

RELOADED = frozenset(
    (
        "server.api_keys", "server.api_keys_file", "server.admin_key", "server.tls_cert", "server.tls_key", "log.level",
        "scheduler.max_waiting_requests", "scheduler.max_waiting_tokens",
    )
)  # fmt: skip
"""Fields that hold at once. Files that they name are read again, also where the name is the same."""


async def reload(read: Callable[[], Config], engine: Engine, site: HttpServer) -> None:
    """Take what a fresh reading of the configuration says; the log tells what came of it."""
    try:
        new = read()
        site.reload(new.server)  # before anything else: a key or certificate that cannot be had refuses it all
    except StartError as error:
        log.error("SIGHUP: nothing is changed: %s", error.message)
        return
    changed = list(differences(engine.config, new))
    engine.config = _merged(engine.config, new)
    logs.set_level(number := logs.number_of(new.log.level))
    if engine.is_open:  # ranks that still load begin with the level of the start
        try:
            await engine.control.set_log_level(number)
        except EngineError as error:
            log.error("SIGHUP: the ranks keep their log level: %s", error.message)
    taken = [name for name in changed if name in RELOADED]
    log.info("SIGHUP: keys and certificate are read again%s", "".join(f", {name} holds" for name in taken))
    if left := [name for name in changed if name not in RELOADED]:
        log.warning("SIGHUP: changed, and not taken before a restart: %s", ", ".join(left))


def differences(old: Config, new: Config) -> Iterator[str]:
    """The names of the fields that are not the same, as the file has them."""
    for section in msgspec.structs.fields(Config):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for field in msgspec.structs.fields(type(before)):
            if getattr(before, field.name) != getattr(after, field.name):
                yield f"{section.name}.{field.name}"


def _merged(old: Config, new: Config) -> Config:
    """The old configuration, with what is taken of the new one."""
    sections: dict[str, dict[str, object]] = {}
    for name in RELOADED:
        section, field = name.split(".")
        sections.setdefault(section, {})[field] = getattr(getattr(new, section), field)
    replaced = {name: msgspec.structs.replace(getattr(old, name), **fields) for name, fields in sections.items()}
    return msgspec.structs.replace(old, **replaced)
