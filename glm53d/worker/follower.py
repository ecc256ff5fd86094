"""Every other rank's loop: read a Batch, run our share, report; decide nothing. [R1] [R9]"""

from collections.abc import Callable

import numpy as np

from glm53d.errors import EngineError
from glm53d.ipc.batch import Batch
from glm53d.ipc.channels import FollowerEnds
from glm53d.ipc.records import CONTROL, ControlOp, RecordType
from glm53d.obs.log import set_level
from glm53d.runner.base import Runner

WAIT_NS = 100_000_000


def run(
    runner: Runner,
    ends: FollowerEnds,
    world_id: int,
    max_in_flight: int,
    spin_ns: int,
    beat: Callable[[], None],
) -> None:
    """Until the leader says shutdown. Raises PeerGone when it is gone, EngineError on a gap in the steps.

    A step's result is waited for when max_in_flight are launched, or when the leader says that no other comes first.
    beat() shows on the board that this rank turns, at least every 100 ms between steps.
    """
    step = in_flight = 0
    while True:
        beat()
        ends.batches.wait(spin_ns, WAIT_NS)
        if (record := ends.batches.peek()) is None:
            continue
        kind, data = record  # where it lies in the ring, until pop
        if kind == RecordType.CONTROL:
            control = np.frombuffer(data, CONTROL, 1)[0]
            if control["op"] == ControlOp.SHUTDOWN:
                return
            if control["op"] == ControlOp.LOG_LEVEL:
                set_level(int(control["arg"]))
                ends.batches.pop()
                continue
            if control["op"] != ControlOp.COLLECT:
                raise EngineError(f"unknown control operation {control['op']} in the batch ring")
            ends.batches.pop()
        elif kind == RecordType.BATCH:
            batch = Batch.decode(data)
            if batch.step != step + 1 or batch.world_id != world_id:
                raise EngineError(f"step {batch.step} of world {batch.world_id:#x} after step {step} of {world_id:#x}")
            step, in_flight = batch.step, in_flight + 1
            runner.launch(batch)
            ends.batches.pop()
            if in_flight < max_in_flight:
                continue
        else:
            raise EngineError(f"record of unknown type {kind} in the batch ring")
        in_flight -= 1
        if not ends.results.try_write(RecordType.RESULT, [runner.collect().encode(world_id)]):
            raise EngineError("the result ring is full: the leader does not read")
