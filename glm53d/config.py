"""Configuration: TOML and --set, read once into frozen structs. Every field says here what it means.

Each struct is a section of the file, each field a key; conf/reference.toml is made from here by reference_toml(). What is
found at run time (pages, limits, graph sizes) is never written into a Config: it has structs of its own.

Over 400 lines, because a field's name, type, bounds, default and meaning stand in this one place and nowhere else.
"""

import difflib
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from glm53d.errors import ConfigError


def doc(text: str, **bounds: float) -> Meta:
    """The meaning of a field, for the reference, with msgspec's bounds (ge, gt, le)."""
    return Meta(description=text, **bounds)  # type: ignore[call-overload]  # it forbids ge beside gt, as we do not


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the file."""


class Server(Section, frozen=True):
    """The HTTP side."""

    host: Annotated[str, doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, doc("Port to listen on; 0 takes a free one and logs it.", ge=0, le=65535)] = 8000
    max_requests: Annotated[int, doc("Requests in flight at most; beyond it 429 with Retry-After.", ge=1, le=65536)] = 1024
    max_body_bytes: Annotated[int, doc("Largest request body; larger: 413.", ge=1024)] = 64 << 20
    body_timeout_s: Annotated[float, doc("Time a client has to send its body; then 408.", gt=0)] = 60.0
    drain_timeout_s: Annotated[float, doc("After SIGTERM, time running requests have to finish.", ge=0)] = 30.0
    health_timeout_s: Annotated[float, doc("Time /health_generate waits for its one token.", gt=0)] = 20.0
    send_timeout_s: Annotated[float, doc("Time in which a client that has stopped reading has to go on; then it is cut off.", gt=0)] = 600.0
    keepalive_s: Annotated[float, doc("Longest silence on a stream before a comment is sent.", gt=0)] = 10.0
    control_timeout_s: Annotated[float, doc("Time a control call (/flush_cache and the like) waits for the ranks.", gt=0)] = 10.0
    api_keys: Annotated[tuple[str, ...], doc("Keys of clients; with none here and in api_keys_file, no key is needed.")] = ()
    api_keys_file: Annotated[str, doc("File with more of them, one per line.")] = ""
    admin_key: Annotated[str, doc("Key for control calls; empty: those take any key.")] = ""
    open_metrics: Annotated[bool, doc("Whether /metrics needs no key.")] = False
    cors_origins: Annotated[tuple[str, ...], doc("Origins of web pages that may call from a browser; \"*\": all.")] = ()
    tls_cert: Annotated[str, doc("Certificate chain (PEM); empty: plain HTTP.")] = ""
    tls_key: Annotated[str, doc("Its private key (PEM); empty: it is in the same file.")] = ""


class Model(Section, frozen=True):
    """What is served."""

    path: Annotated[str, doc("Checkpoint folder (config.json, *.safetensors), or \"nano\" for the built-in model.")] = "nano"
    name: Annotated[str, doc("Name in /v1/models and answers; empty takes the folder's name.")] = ""
    aliases: Annotated[tuple[str, ...], doc("Further names that clients may use.")] = ()
    owned_by: Annotated[str, doc("Owner in /v1/models; gateways choose by it how they talk to us, see docs/api.md.")] = "glm53d"
    dtype: Annotated[Literal["float32", "bfloat16"], doc("Arithmetic of the torch engine.")] = "float32"
    max_context_len: Annotated[int, doc("Prompt plus output at most; 0 takes the checkpoint's own.", ge=0)] = 0
    fp8_inputs: Annotated[bool, doc("Round the inputs of FP8 linears to FP8 as well, as kernels for it do: an emulation, exact in float32, which shows what that costs. Needs an FP8 checkpoint.")] = False  # fmt: skip
    q_kv_norm_eps: Annotated[float, doc("eps of q_a/kv_a RMSNorm; 0 takes rms_norm_eps as the big engines do; transformers uses 1e-6.", ge=0)] = 0.0  # fmt: skip


class Tokenizer(Section, frozen=True):
    """Text to ids and back."""

    path: Annotated[str, doc("tokenizer.json or its folder; empty takes the model's folder.")] = ""


class Engine(Section, frozen=True):
    """What computes."""

    kind: Annotated[Literal["torch", "sim"], doc("torch: the reference model, CPU or CUDA. sim: no model, scripted tokens and a step-time model.")] = "torch"  # fmt: skip
    device: Annotated[Literal["cpu", "cuda"], doc("Where the torch engine runs.")] = "cpu"
    graphs: Annotated[bool, doc("On CUDA, replay decoding steps from graphs captured for a few padded shapes.")] = True
    threads: Annotated[int, doc("Threads of a rank's tensor library on the CPU; 0 takes its default.", ge=0)] = 1


class Parallel(Section, frozen=True):
    """How the model lies on ranks. [R1]"""

    tp_size: Annotated[int, doc("Ranks, that is processes; one per GPU.", ge=1, le=64)] = 1
    attn_dp_size: Annotated[int, doc("Attention-DP groups, each with its own KV pool; divides tp_size.", ge=1, le=64)] = 1
    ep_size: Annotated[int, doc("Ranks that the experts are spread over; divides tp_size.", ge=1, le=64)] = 1


class Kv(Section, frozen=True):
    """The KV cache."""

    page_size: Annotated[int, doc("Tokens per page: the unit of sharing and of eviction.", ge=1, le=1024)] = 64
    num_pages: Annotated[int, doc("Pages per attention-DP rank; 0 takes what memory_bytes holds.", ge=0)] = 0
    memory_bytes: Annotated[int, doc("Memory for KV per rank; 0 takes a quarter of the free memory, or of the GPU what the weights leave, for eight full contexts at most.", ge=0)] = 0  # fmt: skip
    dtype: Annotated[Literal["auto", "fp8"], doc("auto: rows in the model's dtype. fp8: packed rows, 656 bytes for a latent and 132 for an index key of GLM-5.3.")] = "auto"  # fmt: skip


class Cache(Section, frozen=True):
    """Where pages of the KV cache go that their pool gives up, and what bringing them back may cost. [R32]"""

    host_bytes: Annotated[int, doc("Host memory of each rank for them, pinned on a GPU; 0: none, they are lost.", ge=0)] = 0
    storage_path: Annotated[str, doc("Folder of files for them, kept over restarts; one daemon at a time, and it keeps a key there. Needs host_bytes, through which they go. Empty: none.")] = ""  # fmt: skip
    storage_bytes: Annotated[int, doc("Bytes of these files at most; the least recently used go first.", ge=1)] = 1 << 36
    step_bytes: Annotated[int, doc("Bytes that one step moves into a KV pool, and out of it, at most: what moving adds to a gap.", ge=1)] = 1 << 28  # fmt: skip
    host_bytes_per_s: Annotated[float, doc("How fast pages come from host memory. They are moved only where computing them, at the measured rate, takes longer.", gt=0)] = 25e9  # fmt: skip
    storage_bytes_per_s: Annotated[float, doc("How fast files come into host memory.", gt=0)] = 2e9
    peer_bytes_per_s: Annotated[float, doc("How fast pages come from another attention-DP rank's pool; 0: a prefix that is cached on another rank is computed again.", ge=0)] = 0.0  # fmt: skip


class KvEvents(Section, frozen=True):
    """What is published about cached prefixes, for routers in front."""

    endpoint: Annotated[str, doc("ZeroMQ address to publish at, such as tcp://127.0.0.1:5557; attention-DP rank r takes the port plus r. Empty: nothing is published.")] = ""  # fmt: skip
    replay_endpoint: Annotated[str, doc("Address where subscribers ask for batches that they missed; likewise. Empty: none.")] = ""  # fmt: skip
    topic: Annotated[str, doc("Topic of each message.")] = ""
    buffer_batches: Annotated[int, doc("Batches kept for those who ask.", ge=1)] = 10_000


class Scheduler(Section, frozen=True):
    """Who computes when. [R28] [R29]"""

    max_running_requests: Annotated[int, doc("Requests that compute at once, on all ranks.", ge=1, le=4096)] = 256
    max_biased_requests: Annotated[int, doc("Of them, on each attention-DP rank, those with logit_bias, allowed_token_ids or penalties; one more waits. Each place takes 8 bytes per id of the vocabulary on the device.", ge=1, le=4096)] = 128  # fmt: skip
    max_waiting_requests: Annotated[int, doc("Requests that wait at most; beyond it 429.", ge=1)] = 4096
    max_waiting_tokens: Annotated[int, doc("Uncached prompt tokens that wait; once there are so many, 429.", ge=1)] = 1 << 24
    queue_timeout_s: Annotated[float, doc("A request not admitted after so long gets 503; 0: it waits on.", ge=0)] = 0.0
    ageing_s: Annotated[float, doc("The head start in the queue that one level of priority gives; only who comes within it overtakes.", ge=0)] = 10.0  # fmt: skip
    helper_max_tokens: Annotated[int, doc("A chat without tools or priority that asks for at most so many tokens is an agent's helper (a title, a summary): one level below others; 0: none is.", ge=0)] = 256  # fmt: skip
    max_step_tokens: Annotated[int, doc("Tokens one attention-DP rank computes in a step: decode first, prefill chunks fill the rest.", ge=16)] = 2048  # fmt: skip
    max_step_area: Annotated[int, doc("New prompt tokens times their context that one attention-DP rank computes in a step: bounds the indexer's work arrays. One row of any context always may.", ge=1 << 16)] = 1 << 30  # fmt: skip
    target_itl_ms: Annotated[float, doc("Prompts are cut into chunks that keep gaps in running streams below this, by measured step times; 0: off.", ge=0)] = 0.0  # fmt: skip
    placement: Annotated[Literal["least_cost", "round_robin", "total_requests", "total_tokens", "follow_bootstrap_room"], doc("How a request's attention-DP rank is chosen. least_cost: by queued and uncached prompt tokens and 256 for each request there, then where its session's prefix is kept, then by load. follow_bootstrap_room: the remainder of that field by their number.")] = "least_cost"  # fmt: skip
    session_ttl_s: Annotated[float, doc("How long the prefix of a turn that ends in tool calls is kept for the session's next turn; 0: not at all.", ge=0)] = 300.0  # fmt: skip
    session_share: Annotated[float, doc("Of a KV pool, what sessions may keep so; others get it when they need room.", ge=0, le=1)] = 0.5
    thinking_share: Annotated[float, doc("Of a chat's max_tokens, what may be thinking where the request has no budget of its own, so that an answer has room; 0: all.", ge=0, le=1)] = 0.0  # fmt: skip
    overlap: Annotated[bool, doc("Launch a step while the one before computes. Where that gains nothing it is not done: on the CPU, and with drafts.")] = True  # fmt: skip
    watchdog_s: Annotated[float, doc("A step older than this makes /health answer 503 and ends the daemon; the log gets all stacks.", gt=0)] = 300.0
    debug_checks: Annotated[bool, doc("Check the books after every step; slow, for tests.")] = False


class Text(Section, frozen=True):
    """Template and tokenizer work."""

    threads: Annotated[int, doc("Threads of the text pool.", ge=1, le=64)] = 2
    max_queued: Annotated[int, doc("Text jobs that wait at most; beyond it 429.", ge=1)] = 1024
    cache_tokens: Annotated[int, doc("Ids kept of texts seen before, 4 bytes each; 0: none.", ge=0)] = 1 << 22
    allow_auto_truncate: Annotated[bool, doc("A raw prompt that is too long loses its beginning, and the answer says so; a chat never does.")] = False  # fmt: skip


class Template(Section, frozen=True):
    """The chat template. [R16] [R17]"""

    path: Annotated[str, doc("A Jinja template of one's own; empty: GLM-5.3's, or the checkpoint's where that differs.")] = ""
    parsers: Annotated[Literal["auto", "glm", "none"], doc("How answers are read: as GLM-5.3 writes thinking and calls, or all as content. auto is glm; beside a path, say which.")] = "auto"  # fmt: skip
    literal_control_tokens: Annotated[bool, doc("Control tokens that clients spell in a chat become control tokens, as in other engines.")] = False  # fmt: skip
    strip_lines: Annotated[tuple[str, ...], doc("Lines at the head of the system prompt that begin so are taken out: they change in each request, and no cached page behind them could be used.")] = ("x-anthropic-billing-header:",)  # fmt: skip


class Grammar(Section, frozen=True):
    """Forms of output: schemas, regexes, forced tools. [R35]"""

    compile_s: Annotated[float, doc("CPU time that compiling a grammar may take; beyond it the request is a 400.", gt=0)] = 1.0
    processes: Annotated[int, doc("Grammars that are compiled at once: first in a process each, that can be killed, then in rank 0.", ge=1, le=64)] = 2  # fmt: skip
    max_cached: Annotated[int, doc("Grammars kept compiled; the one used longest ago goes first.", ge=1)] = 128
    threads: Annotated[int, doc("Threads of rank 0 that compute which tokens are legal next.", ge=1, le=64)] = 4
    auto_calls: Annotated[bool, doc("Calls that the model may make are held to their tools' schemas as well, as if all tools were strict; else only calls that it must make are.")] = False  # fmt: skip


class Output(Section, frozen=True):
    """How tokens leave. [R37]"""

    stream_interval: Annotated[int, doc("Tokens per frame of a stream; the first goes at once.", ge=1)] = 1
    plain_interval: Annotated[int, doc("Tokens per hand-over of a request that is not streamed.", ge=1)] = 64


class Sim(Section, frozen=True):
    """The simulated engine: a step really takes base_ms + per_prefill_token_us x tokens + per_decode_row_us x rows."""

    base_ms: Annotated[float, doc("Time of an empty step.", ge=0)] = 5.0
    per_prefill_token_us: Annotated[float, doc("Time per prompt token.", ge=0)] = 20.0
    per_decode_row_us: Annotated[float, doc("Time per decoding request.", ge=0)] = 10.0
    draft_acceptance: Annotated[float, doc("How often each of speculation.num_draft_tokens is right.", ge=0, le=1)] = 0.75
    text: Annotated[str, doc("What every request answers, control tokens spelled out; empty: ids drawn from the seed.")] = ""
    after_tools: Annotated[str, doc("What one answers instead whose last message, as far as it was not cached, is a tool's; empty: the same.")] = ""
    num_pages: Annotated[int, doc("Pages of each simulated pool.", ge=1)] = 16384
    kv_bytes_per_token: Annotated[int, doc("What a token takes in it: for the other tiers' sizes, and the time that moving pages takes. GLM-5.3's in fp8.", ge=1)] = 53940  # fmt: skip
    max_context_len: Annotated[int, doc("Prompt plus output at most.", ge=16)] = 262144


class Speculation(Section, frozen=True):
    """Drafts by the checkpoint's MTP layer, verified by the model: the same tokens in fewer steps. [R36]"""

    num_draft_tokens: Annotated[int, doc("Tokens drafted and verified per request and step; 0: none. Needs a checkpoint with an MTP layer.", ge=0, le=5)] = 0  # fmt: skip


class World(Section, frozen=True):
    """The rank processes."""

    start_timeout_s: Annotated[float, doc("Time all ranks have to load.", gt=0)] = 1800.0
    ring_bytes: Annotated[int, doc("Size of each ring, a power of two; bounds a prompt to a quarter of it in 4-byte ids, and the context to half.", ge=1 << 16)] = 1 << 25  # fmt: skip
    spin_us: Annotated[float, doc("How long a rank's reader spins before it sleeps.", ge=0)] = 20.0
    pin_cpus: Annotated[tuple[int, ...], doc("CPU of each rank, in order; empty: the kernel chooses.")] = ()


class Log(Section, frozen=True):
    """What is written to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("Least severe line that is written.")] = "info"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a start needs to know."""

    server: Server = Server()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    engine: Engine = Engine()
    parallel: Parallel = Parallel()
    kv: Kv = Kv()
    cache: Cache = Cache()
    kv_events: KvEvents = KvEvents()
    scheduler: Scheduler = Scheduler()
    text: Text = Text()
    template: Template = Template()
    grammar: Grammar = Grammar()
    output: Output = Output()
    sim: Sim = Sim()
    speculation: Speculation = Speculation()
    world: World = World()
    log: Log = Log()


_ENDPOINT = re.compile(r"tcp://(?P<host>.+):(?P<port>[1-9][0-9]{0,4})")


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of a checked address of [kv_events]."""
    found = _ENDPOINT.fullmatch(endpoint)
    assert found is not None
    return found["host"], int(found["port"])


def load(path: str | None, overrides: list[str]) -> Config:
    """The file at path (None: all defaults, which are the built-in model on the CPU), then each `section.key=value`.

    Raises ConfigError, naming where the wrong value stands, its key and what it must be.
    """
    values: dict[str, dict[str, Any]] = {}  # section -> key -> value
    for section, keys in _read(path).items() if path is not None else ():
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {section}: unknown key{_suggestion(section)}")
        _section(section, f"{path}: ")
        for key, value in keys.items():
            name = f"{section}.{key}"
            _check(f"{path}: {name}", value, _hint(name, f"{path}: "))
        values[section] = dict(keys)
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(f"--set {override}: write it as section.key=value")
        hint = _hint(name, "--set ")
        value = _from_text(text, hint)
        _check(f"--set {name}", value, hint)
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    config = msgspec.convert(values, Config)
    validate(config)
    return config


def validate(config: Config) -> None:
    """What no field can see alone. Raises ConfigError."""
    parallel, scheduler, world = config.parallel, config.scheduler, config.world
    if parallel.tp_size % parallel.attn_dp_size:
        raise ConfigError(f"parallel.attn_dp_size {parallel.attn_dp_size} does not divide tp_size {parallel.tp_size}")
    if parallel.tp_size % parallel.ep_size:
        raise ConfigError(f"parallel.ep_size {parallel.ep_size} does not divide tp_size {parallel.tp_size}")
    decode_len = 1 + config.speculation.num_draft_tokens
    if scheduler.max_running_requests > scheduler.max_step_tokens // decode_len * parallel.attn_dp_size:
        each = "one token" if decode_len == 1 else f"{decode_len} tokens"
        raise ConfigError(
            f"scheduler.max_running_requests {scheduler.max_running_requests} do not fit a step of max_step_tokens "
            f"{scheduler.max_step_tokens} on {parallel.attn_dp_size} attention-DP ranks, {each} each"
        )
    if config.cache.storage_path and not config.cache.host_bytes:
        raise ConfigError("cache.storage_path needs cache.host_bytes: pages go to files through host memory")
    for name in ("endpoint", "replay_endpoint"):
        if (endpoint := getattr(config.kv_events, name)) and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(f"kv_events.{name} {endpoint!r} is no tcp://HOST:PORT")
    if config.kv_events.replay_endpoint and not config.kv_events.endpoint:
        raise ConfigError("kv_events.replay_endpoint is set, kv_events.endpoint is not")
    if world.ring_bytes & (world.ring_bytes - 1):
        raise ConfigError(f"world.ring_bytes {world.ring_bytes} is no power of two")
    if world.pin_cpus and len(world.pin_cpus) != parallel.tp_size:
        raise ConfigError(f"world.pin_cpus names {len(world.pin_cpus)} CPUs for {parallel.tp_size} ranks")
    if any(cpu < 0 for cpu in world.pin_cpus):
        raise ConfigError("world.pin_cpus has a negative number")
    if not config.model.path:
        raise ConfigError("model.path is empty")
    if config.template.path and config.template.parsers == "auto":
        raise ConfigError("template.path needs template.parsers beside it: glm or none")
    if "" in config.template.strip_lines:
        raise ConfigError("template.strip_lines has an empty string, with which every line begins")
    if config.server.tls_key and not config.server.tls_cert:
        raise ConfigError("server.tls_key is set, server.tls_cert is not")


def reference_toml() -> str:
    """conf/reference.toml: every section and field with its meaning, what it may be, and its default."""
    lines = [
        "# Every field of a configuration file: its meaning, what it may be, and its default. A file names only what it changes.",
        "# Made from glm53d/config.py by `make reference`.",
    ]
    for section, kind in _hints(Config).items():
        lines += ["", f"# {(kind.__doc__ or '').strip()}", f"[{section}]"]
        for key, hint in _hints(kind).items():
            lines.append(f"# {_meta(hint).description} ({_wanted(hint)})")
            lines.append(f"{key} = {_toml(getattr(kind(), key))}")
    return "\n".join(lines) + "\n"


def unknown_option(option: str) -> ConfigError:
    """To be raised for a command-line option that is not ours: names the field that was probably meant."""
    name = option.partition("=")[0]
    return ConfigError(f"{name}: unknown option{_suggestion(name.lstrip('-'))}; --set SECTION.KEY=VALUE sets any field")


KEPT_SHARE, KEPT_BYTES = 0.03, 9_000_000_000
"""Of a GPU's memory, what is left to the driver's context, workspaces, graphs and collectives."""

AUTO_CONTEXTS = 8
"""A KV pool that sizes itself holds no more full contexts than this: a small model need not take the machine."""

FOREIGN = {
    "api_key": "server.api_keys",
    "block_size": "kv.page_size",
    "chat_template": "template.path",
    "chunked_prefill_size": "scheduler.max_step_tokens",
    "context_length": "model.max_context_len",
    "data_parallel_size": "parallel.attn_dp_size",
    "dp": "parallel.attn_dp_size",
    "dp_size": "parallel.attn_dp_size",
    "enable_dp_attention": "parallel.attn_dp_size",
    "enable_expert_parallel": "parallel.ep_size",
    "ep": "parallel.ep_size",
    "expert_parallel_size": "parallel.ep_size",
    "gpu_memory_utilization": "kv.memory_bytes",
    "hicache_size": "cache.host_bytes",
    "hicache_storage_backend": "cache.storage_path",
    "kv_cache_dtype": "kv.dtype",
    "kv_offloading_size": "cache.host_bytes",
    "max_model_len": "model.max_context_len",
    "max_num_batched_tokens": "scheduler.max_step_tokens",
    "max_num_seqs": "scheduler.max_running_requests",
    "max_prefill_tokens": "scheduler.max_step_tokens",
    "max_queued_requests": "scheduler.max_waiting_requests",
    "max_total_tokens": "kv.num_pages",
    "mem_fraction_static": "kv.memory_bytes",
    "model_path": "model.path",
    "num_gpu_blocks_override": "kv.num_pages",
    "num_speculative_tokens": "speculation.num_draft_tokens",
    "served_model_name": "model.name",
    "speculative_num_steps": "speculation.num_draft_tokens",
    "ssl_certfile": "server.tls_cert",
    "swap_space": "cache.host_bytes",
    "ssl_keyfile": "server.tls_key",
    "tensor_parallel_size": "parallel.tp_size",
    "tokenizer_path": "tokenizer.path",
    "tokenizer_worker_num": "text.threads",
    "tp": "parallel.tp_size",
    "watchdog_timeout": "scheduler.watchdog_s",
}
"""What SGLang and vLLM call it -> what we do. Names that are ours but for the section are found without a table."""


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # not TOML, not UTF-8
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deep") from None


def _from_text(text: str, hint: Any) -> Any:
    """What --set gives: a TOML value, or the text as it stands where that is what the field takes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"] if len(table) == 1 else text
    return text if _is_text(hint) and not isinstance(value, str) else value


def _check(where: str, value: Any, hint: Any) -> None:
    try:
        msgspec.convert(value, hint)
        right = not isinstance(value, float) or math.isfinite(value)  # no bound refuses nan
    except msgspec.ValidationError:
        right = False
    if not right:
        raise ConfigError(f"{where} is {_toml(value)}; it must be {_wanted(hint)}")


def _hint(name: str, where: str) -> Any:
    """The annotation of the field `section.key`. Raises ConfigError with its right name when we can guess it."""
    section, dot, key = name.partition(".")
    hints = _hints(_section(section, where)) if dot else {}
    if key not in hints:
        raise ConfigError(f"{where}{name}: unknown key{_suggestion(name)}")
    return hints[key]


def _section(name: str, where: str) -> type[Section]:
    sections = _hints(Config)
    if name not in sections:
        near = difflib.get_close_matches(name, list(sections), n=1)
        raise ConfigError(f"{where}{name}: unknown section" + (f"; did you mean {near[0]}?" if near else ""))
    return sections[name]


def _suggestion(name: str) -> str:
    """The name meant, as far as we can tell: translated, of another section, or misspelt."""
    section, _, key = name.rpartition(".")
    key = key.lower().replace("-", "_")
    if key in FOREIGN:
        return f"; glm53d calls it {FOREIGN[key]}"
    keys = {of: list(_hints(kind)) for of, kind in _hints(Config).items()}
    near = difflib.get_close_matches(key, keys.get(section, []), n=1)
    if near:
        return f"; did you mean {section}.{near[0]}?"
    near = difflib.get_close_matches(key, [field for fields in keys.values() for field in fields], n=1)
    meant = [f"{of}.{field}" for of, fields in keys.items() for field in fields if [field] == near]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _meta(hint: Any) -> Meta:
    return hint.__metadata__[0]


def _is_text(hint: Any) -> bool:
    kind = get_args(hint)[0]
    return kind is str or get_origin(kind) is Literal


def _wanted(hint: Any) -> str:
    """What a value of this field must be, in words."""
    kind, meta = get_args(hint)[0], _meta(hint)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(_toml(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of texts" if get_args(kind)[0] is str else "a list of integers"
    name = {str: "text", bool: "true or false", int: "an integer", float: "a number"}[kind]
    if meta.gt is not None:
        return f"{name} above {meta.gt}"
    if meta.ge is not None and meta.le is not None:
        return f"{name} from {meta.ge} to {meta.le}"
    return name if meta.ge is None else f"{name}, at least {meta.ge}"


def _toml(value: Any) -> str:
    """A value as TOML; JSON's form is TOML's for all that a field can be."""
    return json.dumps(value, ensure_ascii=False, default=str)
