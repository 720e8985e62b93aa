"""The recording of what tests and their kernels take."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from kernel_times import LEAST, Recorder, summary


def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_test_has_its_own_kernels_and_times(tmp_path):
    module = SimpleNamespace(compiled=spend)
    recorder = Recorder(tmp_path / "times")
    recorder.measure(module, "compiled", lambda seconds: f"kernel of {seconds} s")
    for name, calls in (("first", (1.5 * LEAST, 0.0)), ("second", ())):
        steps = recorder.pytest_runtest_protocol(SimpleNamespace(nodeid=name))
        next(steps)
        for seconds in calls:
            module.compiled(seconds)
        try:
            steps.send(True)
        except StopIteration as ended:
            assert ended.value is True
    first, second = map(json.loads, recorder.path.read_text().splitlines())
    ((function, kernel, seconds),) = first["kernels"]
    assert (function, kernel) == ("compiled", f"kernel of {1.5 * LEAST} s")
    assert first["seconds"] >= seconds >= 1.5 * LEAST - 0.01
    assert second["kernels"] == [] and second["seconds"] < LEAST
    text = summary(recorder.path.read_text().splitlines())
    assert text.startswith("2 tests, 0 s\ncompiled: 1 kernels, 0 s\n")
    assert text.index("first: kernel of") < text.index("second: ")
