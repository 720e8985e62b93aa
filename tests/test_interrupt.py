"""Ctrl-C ends a command within seconds and with one line: pools, native code, clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

#: Scripts that print "ready" and then would take for ever; the pool's workers say so themselves.
SCRIPTS = {
    "a pool": """
import os, sys, time
from bench.processes import each
from fa4_hd256.interrupt import command

def work(item):
    os.write(1, b"ready\\n")
    time.sleep(600)

if __name__ == "__main__":
    sys.exit(command(lambda: each(work, range(8), 2)))
""",
    "native code that does not return": """
import collections, itertools, os, sys
from fa4_hd256.interrupt import command

def main():
    said = map(os.write, [1], [b"ready\\nready\\n"])  # when the loop in C has begun
    collections.deque(itertools.chain(said, itertools.repeat(None)), maxlen=0)

sys.exit(command(main))
""",
    "a pool that was forked": """
import os, sys, time
from types import SimpleNamespace
from fa4_hd256.interrupt import command
from sm100_sim.mutation.score import _pool

def main():
    with _pool(SimpleNamespace(work=work), 2) as each:
        list(each(work, range(8)))

def work(item):
    os.write(1, b"ready\\n")
    time.sleep(600)

sys.exit(command(main))
""",
    "a queue that breaks": """
import multiprocessing, os, sys, time
from fa4_hd256.interrupt import command

def main():
    queue = multiprocessing.get_context("fork").Queue()
    try:
        os.write(1, b"ready\\nready\\n")
        time.sleep(600)
    finally:  # as a pool does whose last worker dies while it tells them to end
        queue._reader.close()
        queue.put(None)
        queue.close()
        queue.join_thread()

sys.exit(command(main))
""",
}


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_interrupt_ends_everything(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        os.killpg(process.pid, signal.SIGINT)
        begin = time.monotonic()
        _, errors = process.communicate(timeout=60)
        seconds = time.monotonic() - begin
        if name.startswith("native"):
            assert process.returncode == -signal.SIGKILL and seconds < 10
        else:
            assert (process.returncode, errors) == (130, "interrupted\n")
        while not group_is_empty(process.pid):
            assert time.monotonic() - begin < 30
            time.sleep(0.05)
    finally:
        if not group_is_empty(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def test_what_cleans_up_does(tmp_path):
    """KeyboardInterrupt reaches the command, whose `finally` runs."""
    code = (
        "import sys, time\n"
        "from fa4_hd256.interrupt import command\n"
        "def main():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "sys.exit(command(main))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("cleaned\n", "interrupted\n")
    assert process.returncode == 130


def test_output_that_is_not_read_to_its_end():
    """`python -m fa4_hd256 plan | head -1` closes the pipe early."""
    code = (
        "import sys\n"
        "from fa4_hd256.interrupt import command\n"
        "def main():\n"
        "    print('one line\\n' * 100000)\n"
        "    return 0\n"
        "sys.exit(command(main))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "one line\n"
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141
    process.stderr.close()


@pytest.mark.parametrize(
    "package", ["fa4_hd256", "bench", "lab", "sm100_sim/src/sm100_sim", "softmax_emu"]
)
def test_commands_are_run_this_way(package):
    main = Path(ROOT, package, "__main__.py").read_text("utf-8")
    assert "sys.exit(run())" in main and "interrupt" in main.lower()
