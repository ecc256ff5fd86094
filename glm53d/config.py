"""Configuration: TOML and --set, read once into frozen structs. Every field says here what it means.

Each struct is a section of the file, each field a key; conf/reference.toml is made from this file by reference_toml(). What
is found at run time (pages, limits, graph sizes) is never written into a Config: it has structs of its own.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


def doc(text: str, **bounds: float) -> Meta:
    """The meaning of a field, for the reference, with msgspec's bounds (ge, gt, le, lt)."""
    return Meta(description=text, **bounds)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the file."""


class Server(Section):
    """The HTTP side."""

    host: Annotated[str, doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, doc("Port to listen on; 0 takes a free one and logs it.", ge=0, le=65535)] = 8000
    max_requests: Annotated[int, doc("Requests in flight at most; beyond it 429 with Retry-After.", ge=1, le=65536)] = 1024
    max_body_bytes: Annotated[int, doc("Largest request body; larger: 413.", ge=1024)] = 64 << 20
    body_timeout_s: Annotated[float, doc("Time a client has to send its body; then 408.", gt=0)] = 60.0
    drain_timeout_s: Annotated[float, doc("After SIGTERM, time running requests have to finish.", ge=0)] = 30.0
    health_timeout_s: Annotated[float, doc("Time /health_generate waits for its one token.", gt=0)] = 20.0
    keepalive_s: Annotated[float, doc("Longest silence on a stream before a comment is sent.", gt=0)] = 10.0


class Model(Section):
    """What is served."""

    path: Annotated[str, doc("Checkpoint folder (config.json, *.safetensors), or \"nano\" for the built-in model.")] = "nano"
    name: Annotated[str, doc("Name in /v1/models and answers; empty takes the folder's name.")] = ""
    aliases: Annotated[tuple[str, ...], doc("Further names that clients may use.")] = ()
    dtype: Annotated[Literal["float32", "bfloat16"], doc("Arithmetic of the torch engine.")] = "float32"
    max_context_len: Annotated[int, doc("Prompt plus output at most; 0 takes the checkpoint's own.", ge=0)] = 0
    q_kv_norm_eps: Annotated[float, doc("eps of q_a/kv_a RMSNorm; 0 takes rms_norm_eps as the big engines do; transformers uses 1e-6.", ge=0)] = 0.0  # fmt: skip


class Tokenizer(Section):
    """Text to ids and back."""

    path: Annotated[str, doc("tokenizer.json or its folder; empty takes the model's folder.")] = ""


class Engine(Section):
    """What computes."""

    kind: Annotated[Literal["torch", "sim"], doc("torch: the reference model, CPU or CUDA. sim: no model, scripted tokens and a step-time model.")] = "torch"  # fmt: skip
    device: Annotated[Literal["cpu", "cuda"], doc("Where the torch engine runs.")] = "cpu"
    threads: Annotated[int, doc("Threads of a rank's tensor library on the CPU; 0 takes its default.", ge=0)] = 1


class Parallel(Section):
    """How the model lies on ranks. [R1]"""

    tp_size: Annotated[int, doc("Ranks, that is processes; one per GPU.", ge=1, le=64)] = 1
    attn_dp_size: Annotated[int, doc("Attention-DP groups, each with its own KV pool; divides tp_size.", ge=1, le=64)] = 1
    ep_size: Annotated[int, doc("Ranks that the experts are spread over; divides tp_size.", ge=1, le=64)] = 1


class Kv(Section):
    """The KV cache."""

    page_size: Annotated[int, doc("Tokens per page: the unit of sharing and of eviction.", ge=1, le=1024)] = 64
    num_pages: Annotated[int, doc("Pages per attention-DP rank; 0 takes what memory_bytes holds.", ge=0)] = 0
    memory_bytes: Annotated[int, doc("Memory for KV per rank; 0 takes a quarter of the free memory, or of the GPU what the weights leave.", ge=0)] = 0  # fmt: skip
    dtype: Annotated[Literal["auto", "fp8"], doc("auto: rows in the model's dtype. fp8: 656-byte rows (plan only, see docs/model.md).")] = "auto"  # fmt: skip


class Scheduler(Section):
    """Who computes when. [R28] [R29]"""

    max_running_requests: Annotated[int, doc("Requests that compute at once, on all ranks.", ge=1, le=4096)] = 256
    max_waiting_requests: Annotated[int, doc("Requests that wait at most; beyond it 429.", ge=1)] = 4096
    max_step_tokens: Annotated[int, doc("Tokens one attention-DP rank computes in a step: decode first, prefill chunks fill the rest.", ge=16)] = 2048  # fmt: skip
    watchdog_s: Annotated[float, doc("A step older than this makes /health answer 503.", gt=0)] = 300.0
    debug_checks: Annotated[bool, doc("Check the books after every step; slow, for tests.")] = False


class Text(Section):
    """Template and tokenizer work."""

    threads: Annotated[int, doc("Threads of the text pool.", ge=1, le=64)] = 2
    max_queued: Annotated[int, doc("Text jobs that wait at most; beyond it 429.", ge=1)] = 1024


class Output(Section):
    """How tokens leave. [R37]"""

    stream_interval: Annotated[int, doc("Tokens per frame of a stream; the first goes at once.", ge=1)] = 1
    plain_interval: Annotated[int, doc("Tokens per hand-over of a request that is not streamed.", ge=1)] = 64


class Sim(Section):
    """The simulated engine: a step really takes base_ms + per_prefill_token_us x tokens + per_decode_row_us x rows."""

    base_ms: Annotated[float, doc("Time of an empty step.", ge=0)] = 5.0
    per_prefill_token_us: Annotated[float, doc("Time per prompt token.", ge=0)] = 20.0
    per_decode_row_us: Annotated[float, doc("Time per decoding request.", ge=0)] = 10.0
    text: Annotated[str, doc("What every request answers, control tokens spelled out; empty: ids drawn from the seed.")] = ""
    num_pages: Annotated[int, doc("Pages of each simulated pool.", ge=1)] = 16384
    max_context_len: Annotated[int, doc("Prompt plus output at most.", ge=16)] = 262144


class World(Section):
    """The rank processes."""

    start_timeout_s: Annotated[float, doc("Time all ranks have to load.", gt=0)] = 1800.0
    ring_bytes: Annotated[int, doc("Size of each ring, a power of two; bounds a prompt to a quarter of it in 4-byte ids.", ge=1 << 16)] = 1 << 25  # fmt: skip
    spin_us: Annotated[float, doc("How long a rank's reader spins before it sleeps.", ge=0)] = 20.0
    pin_cpus: Annotated[tuple[int, ...], doc("CPU of each rank, in order; empty: the kernel chooses.")] = ()


class Log(Section):
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
    scheduler: Scheduler = Scheduler()
    text: Text = Text()
    output: Output = Output()
    sim: Sim = Sim()
    world: World = World()
    log: Log = Log()
