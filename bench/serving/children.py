"""Processes that answer `orders`: started together, asked one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Characters of a process's last words that an error has.
LAST_WORDS = 600


class Failed(RuntimeError):
    """An engine ended instead of answering; the text has its last words."""


class Child:
    """One engine. log: the file that gets what it writes; program: its command."""

    def __init__(self, log: Path, program: Sequence[str]) -> None:
        self._log = log
        with open(log, "ab") as sink:
            # A session of its own: what it starts ends with it.
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
                start_new_session=True,
            )  # fmt: skip

    def tell(self, **order: Any) -> None:
        """Send an order, whose answer `hear` returns."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None

    def hear(self) -> dict[str, Any]:
        """Wait for an answer. Raises Failed if the process ends first."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear()

    def end(self) -> None:
        """End the process and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _last_words(self) -> str:
        """Return the last line of its log that is no traceback's, and the name of the log."""
        self._process.wait()
        text = self._log.read_text(errors="replace").strip()[-LAST_WORDS:]
        errors = [line for line in text.splitlines() if "Error" in line]
        last = (errors or text.splitlines() or ["nothing"])[-1].strip()
        return f"ended with {self._process.returncode}: {last} ({self._log})"
