"""Ctrl-C ends a command within seconds and with one line, whatever its processes are doing.

sm100_sim and fa4_hd256 share this file by a link.

NOTE [who ends what].  `command` says "interrupted" and kills the worker processes at the first
SIGINT, then raises KeyboardInterrupt, so that the command can clean up.  Native code that does not
return, or a pool that waits for its threads, is ended by a watchdog, a forked process that the
signal wakes even where the interpreter is not running.  Workers see no SIGINT, which would make
each print a traceback, and the kernel ends them with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["CLOSED", "INTERRUPTED", "command", "end_with_parent", "starting_workers"]

#: Exit status of a command that Ctrl-C has ended.
INTERRUPTED = 130
#: Exit status of a command whose output is not read to its end, as of one that SIGPIPE ends.
CLOSED = 141
#: Seconds that a command has for cleaning up.
_GRACE = 2.0
_PR_SET_PDEATHSIG = 1


def command(main: Callable[[], int]) -> int:
    """Run a command in this process and return its exit status, 130 after Ctrl-C.

    The caller exits at once with it: workers are gone, and nothing may wait for them.
    """
    _start_watchdog()
    signal.signal(signal.SIGINT, _interrupt)
    # The process that unlinks the semaphores of a pool gets these options.  It would warn of those
    # that an interrupt leaves to it, a second line.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _is_unread():
            raise
        return CLOSED
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # threads of a pool that is broken are not waited for


def _is_unread() -> bool:
    """Return True where whoever read stdout has left; the rest of it then goes nowhere."""
    place, seen = sys.stdout.fileno(), select.poll()
    seen.register(place, 0)
    if not any(event & select.POLLERR for _, event in seen.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), place)
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("interrupted", file=sys.stderr, flush=True)
    # Threads of a pool whose workers are gone, and of its queues, would print errors.
    sys.stderr = open(os.devnull, "w")
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
    raise KeyboardInterrupt


def _start_watchdog() -> None:
    """Fork a process that ends this one `_GRACE` seconds after SIGINT; it ends with this one.

    Called before there are threads.  Python writes the number of each signal to the pipe as soon as
    it arrives.
    """
    watched = os.getpid()
    read, write = os.pipe()
    os.set_blocking(write, False)
    if os.fork():
        os.close(read)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(write)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    while seen := os.read(read, 1):
        if seen[0] == signal.SIGINT:
            time.sleep(_GRACE)
            if os.getppid() == watched:
                os.kill(watched, signal.SIGKILL)
            break
    os._exit(0)


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Processes that are started inside see no SIGINT; one that arrives meanwhile is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(then: Callable[[], None] | None = None) -> None:
    """Initialise a worker: the kernel kills it when the process that started it ends.

    then: what else initialises it.  PR_SET_PDEATHSIG, prctl(2).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then()
