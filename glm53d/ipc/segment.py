"""Shared memory by descriptor: what main creates, a rank maps after it is spawned. [R5]

A Segment has no name in the file system, so nothing is left behind whatever dies. It can be pickled only while a
process is being spawned: the descriptor then goes along by inheritance. The header in front of every segment (magic,
ABI version, kind, world id) and the liveness words are described in native/include/glm53d/segment.h and ring.h.
"""

from multiprocessing import context, reduction
from typing import Any

from glm53d._native import Segment

__all__ = ["Segment"]


def _reduce(segment: Segment) -> tuple[Any, ...]:
    # Outside a spawn DupFd would start a server thread with a socket; that is never what we want.
    context.assert_spawning(segment)
    return _attach, (reduction.DupFd(segment.fd),)


def _attach(descriptor: Any) -> Segment:
    return Segment.attach(descriptor.detach())


reduction.register(Segment, _reduce)
