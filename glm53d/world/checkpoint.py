"""What main needs of the model's folder: tokenizer, end-of-turn ids, sampling defaults, names. No weights, no torch."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from glm53d.config import Config
from glm53d.errors import CheckpointError, ConfigError, StartError

FAMILY = "glm-5.3"
NANO = "glm-5.3-nano"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Read once at start."""

    tokenizer: Path  # tokenizer.json
    eos_ids: tuple[int, ...]
    defaults: dict[str, float]  # temperature, top_p
    models: tuple[str, ...]  # names it is served under, the first is its own
    chat_template: str | None  # the Jinja source that came with it
    own_template: str | None  # that of template.path
    chain_seed: bytes  # 16 bytes; pages of two configurations with equal seeds are interchangeable [R19]


def read_checkpoint(config: Config) -> Checkpoint:
    """Raises CheckpointError, naming the file, when one is missing or wrong."""
    folder = Path(str(resources.files("glm53d.nano"))) if config.model.path == "nano" else Path(config.model.path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder (model.path)")
    tokenizer = Path(config.tokenizer.path) if config.tokenizer.path else folder
    if tokenizer.is_dir():
        tokenizer = tokenizer / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(f"{tokenizer}: there is no tokenizer (tokenizer.path, or the folder of model.path)")
    generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(i, int) and i >= 0 for i in eos_ids):
        raise CheckpointError(f"{folder / 'generation_config.json'}: eos_token_id is {eos!r}, not ids")
    own = config.model.name or (NANO if config.model.path == "nano" else folder.name)
    return Checkpoint(
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        defaults={name: float(generation[name]) for name in ("temperature", "top_p") if name in generation},
        models=tuple(dict.fromkeys([own, *config.model.aliases, FAMILY])),
        chat_template=_read_template(folder / "chat_template.jinja", CheckpointError, may_lack=True),
        own_template=_read_template(Path(config.template.path), ConfigError) if config.template.path else None,
        chain_seed=_chain_seed(config, folder),
    )


def _read_template(path: Path, error: type[StartError], may_lack: bool = False) -> str | None:
    if may_lack and not path.is_file():
        return None
    try:
        return path.read_text("utf-8")
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None
    except UnicodeDecodeError as fault:
        raise error(f"{path}: {fault}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _chain_seed(config: Config, folder: Path) -> bytes:
    """From the checkpoint and what decides a page's bytes. Pages in files outlive this start, so weights count too."""
    digest = hashlib.blake2b(digest_size=16)
    model, kv, has_mtp = config.model, config.kv, config.speculation.num_draft_tokens > 0
    parts: list[object] = [folder.resolve(), config.engine.kind, model.dtype, model.fp8_inputs]
    parts += [model.q_kv_norm_eps, kv.dtype, kv.page_size, has_mtp]
    for path in sorted(folder.glob("*.safetensors")):  # by what a copy over them changes: reading them takes minutes
        stat = path.stat()
        parts += [path.name, stat.st_size, stat.st_mtime_ns]
    for part in parts:
        digest.update(f"{part}\0".encode())
    config_json = folder / "config.json"
    if config_json.is_file():
        digest.update(config_json.read_bytes())
    return digest.digest()
