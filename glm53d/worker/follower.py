"""Every other rank's loop: read a Batch, run our share, report; decide nothing. [R1] [R9]"""

import time
from collections.abc import Callable

import numpy as np

from glm53d.errors import EngineError
from glm53d.ipc.batch import Batch
from glm53d.ipc.channels import FollowerEnds
from glm53d.ipc.records import CONTROL, ControlOp, RecordType
from glm53d.obs.log import set_level
from glm53d.runner.base import Runner

WAIT_NS = 100_000_000


def run(runner: Runner, ends: FollowerEnds, world_id: int, spin_ns: int, beat: Callable[[int], None]) -> None:
    """Until the leader says shutdown. Raises PeerGone when it is gone, EngineError on a gap in the steps.

    beat(now_ns) shows on the board that this rank turns, at least every 100 ms between steps.
    """
    step = 0
    while True:
        beat(time.monotonic_ns())
        ends.batches.wait(spin_ns, WAIT_NS)
        if (record := ends.batches.read()) is None:
            continue
        kind, data = record
        if kind == RecordType.CONTROL:
            control = np.frombuffer(data, CONTROL, 1)[0]
            if control["op"] == ControlOp.SHUTDOWN:
                return
            if control["op"] == ControlOp.LOG_LEVEL:
                set_level(int(control["arg"]))
                continue
            raise EngineError(f"unknown control operation {control['op']} in the batch ring")
        if kind != RecordType.BATCH:
            raise EngineError(f"record of unknown type {kind} in the batch ring")
        batch = Batch.decode(data)
        if batch.step != step + 1 or batch.world_id != world_id:
            raise EngineError(f"step {batch.step} of world {batch.world_id:#x} after step {step} of {world_id:#x}")
        step = batch.step
        runner.launch(batch)
        if not ends.results.try_write(RecordType.RESULT, [runner.collect().encode(world_id)]):
            raise EngineError("the result ring is full: the leader does not read")
