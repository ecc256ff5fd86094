"""The checker: a process that tries the grammars of requests before main takes them. [R35] [F-G12] [F-G13]

    main ──text──► checker ──fork──► child: compiles it, says how that went, ends
                      ◄── or is ended by the kernel: by its CPU time, by its memory, by a stack that is too deep

What a client sends may take a compiler minutes, or end it; and no thread can be stopped from outside. So a text is
tried where that costs nobody anything, and main knows the verdict before its answer begins. Rank 0 compiles once more
what has passed, in a thread: it took less than the limit here, and with less stack than there.

The checker has made the vocabulary's tables when it forks, so a new grammar costs 2 ms beside its own time. It has one
thread, so forking is safe. Main's half is front/grammar.py.
"""

import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

from glm53d._native import set_parent_death_signal
from glm53d.errors import InvalidRequest
from glm53d.grammar.compiler import Compiler
from glm53d.text.vocab import Vocab

FRAME = struct.Struct("<II")
"""Before a text to try: its number, its bytes. Before a verdict, "" for a good one, likewise."""

_MEMORY_BYTES = 1 << 30  # that a compiler may take
_STACK_BYTES = 1 << 20  # rank 0's threads have twice that, llguidance's own, or more


def serve(main: socket.socket, compiler: Compiler, cpu_s: float) -> None:
    """Try what main sends, each text in a child, until main closes its end."""
    selector = selectors.DefaultSelector()
    selector.register(main, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is main:
                head = main.recv(FRAME.size, socket.MSG_WAITALL)
                if len(head) < FRAME.size:
                    return
                number, size = FRAME.unpack(head)
                pid, verdict = _fork(main.recv(size, socket.MSG_WAITALL), main, compiler, cpu_s)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (number, pid, verdict))
            else:
                number, pid, verdict = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                said = _collect(pid, verdict, cpu_s).encode()
                main.sendall(FRAME.pack(number, len(said)) + said)


def _fork(text: bytes, main: socket.socket, compiler: Compiler, cpu_s: float) -> tuple[int, int]:
    """A child that tries the text: its pid, and where its verdict can be read once it has ended."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            main.close()  # else main would see our death only with the last child's
            _limit(cpu_s)
            thread = threading.Thread(target=lambda: os.write(writes, b"\n" + _try(text, compiler).encode()))
            thread.start()
            thread.join()
        finally:
            os._exit(0)
    os.close(writes)
    return pid, reads


def _limit(cpu_s: float) -> None:
    """From here on the kernel ends this process where it takes too much, and prefers others to it."""
    os.nice(10)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # counts CPU time: a busy machine makes no grammar a bad one
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)


def _try(text: bytes, compiler: Compiler) -> str:
    try:
        compiler.compile(text.decode())
    except InvalidRequest as error:
        return error.message
    except BaseException as error:  # a panic of the library is no Exception
        return f"The grammar cannot be used: {type(error).__name__}."
    return ""


def _collect(pid: int, verdict: int, cpu_s: float) -> str:
    """The verdict of a child that has ended, or what its end means."""
    _, status = os.waitpid(pid, 0)
    with os.fdopen(verdict, "rb") as pipe:
        said = pipe.read()
    if said.startswith(b"\n"):
        return said[1:].decode(errors="replace")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"The grammar is too complex: compiling it takes more than {cpu_s:g} s (grammar.compile_s)."
    return "The grammar is too complex: compiling it takes too much memory, or it is too large or nested too deep."


def main(argv: list[str]) -> None:
    """As front/grammar.py starts it: main's pid, the socket to it, tokenizer.json, eos ids, seconds of CPU time."""
    parent, fd, tokenizer, eos_ids, cpu_s = argv
    set_parent_death_signal()
    if os.getppid() != int(parent):
        return  # main died before the signal was set
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a group-wide signal is main's to act on
    vocab = Vocab.load(Path(tokenizer))
    compiler = Compiler(vocab.token_bytes, vocab.num_base, [int(i) for i in eos_ids.split(",")])
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(fd)), compiler, float(cpu_s))


if __name__ == "__main__":
    main(sys.argv[1:])
