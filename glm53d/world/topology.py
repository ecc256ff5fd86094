"""Which processes there are and which channels join them, for people. [R2]"""

from glm53d.config import Config
from glm53d.ipc.channels import plan
from glm53d.world.plan import layout


def describe(config: Config) -> str:
    """What `glm53d topology` prints: one line per process, one per channel. Starts nothing."""
    lines = [
        "process   does",
        "main      HTTP, text pool, output pump, supervisor",
        "checker   tries grammars of requests, in forks of itself that may be killed",
    ]
    for place in layout(config):
        role = "leader: schedules for all ranks, runs" if place.rank == 0 else "follower: runs"
        lines.append(
            f"rank {place.rank:<4} {role} attention-DP rank {place.attn_dp_rank}, attention-TP {place.attn_tp_rank}, "
            f"experts {place.ep_rank}"
        )
    lines += ["", f"{'channel':<10}{'kind':<8}{'from':<12}{'to':<26}{'bytes':>14}"]
    channels = plan(config.parallel.tp_size, config.parallel.attn_dp_size, config.world.ring_bytes)
    for c in channels:
        size = f"{c.size:,}" if c.size else "found at load"
        lines.append(f"{c.name:<10}{c.kind:<8}{c.writer:<12}{', '.join(c.readers):<26}{size:>14}")
    return "\n".join(lines)
