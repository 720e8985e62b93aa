"""`python -m sm100_sim speed` and what it is made of, on a kernel in PTX."""

import numpy as np
import pytest

import sm100_sim
from sm100_sim.__main__ import main
from sm100_sim.tools import speed

PTX = """.version 8.6
.target sm_100a
.address_size 64
.visible .entry twice(.param .u64 data)
{
.reg .b64 %at, %offset;
.reg .b32 %word, %thread;
ld.param.u64 %at, [data];
mov.u32 %thread, %tid.x;
mul.wide.u32 %offset, %thread, 4;
add.u64 %at, %at, %offset;
ld.global.u32 %word, [%at];
add.u32 %word, %word, %word;
st.global.u32 [%at], %word;
ret;
}
"""
SCRIPT = f"""
import numpy as np
import sm100_sim
for _ in range(2):
    sm100_sim.launch_ptx({PTX!r}, "twice", [np.zeros(64, np.int32)], block=64)
"""


@pytest.mark.parametrize("runs", [0, 2])
def test_a_call(runs):
    data = np.arange(64, dtype=np.int32)
    found = speed.measure(lambda: sm100_sim.launch_ptx(PTX, "twice", [data], block=64), runs)
    # Once to warm up, and under the sanitizer, too.
    assert data[1] == 1 << (1 + runs + (1 + runs if runs else 0))
    assert (found.launches, found.runs) == (1, runs)
    # Eight instructions of each of two warps.
    assert found.warp_instructions == 2 * 8
    assert (found.seconds == found.first_seconds) is (runs == 0)
    assert (found.sanitized_ratio is None) is (runs == 0)
    assert set(found.spent) == set(speed.PARTS)
    with pytest.raises(ValueError, match="accepted: whole numbers from 0 on"):
        speed.measure(lambda: None, -1)


def test_a_script_and_a_module(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["speed"])
    monkeypatch.setattr("sys.path", ["."])
    script, module, empty = (tmp_path / name for name in ("a.py", "a.ptx", "empty.py"))
    script.write_text(SCRIPT)
    module.write_text(PTX)
    empty.write_text("")
    assert main(["speed", "--as-is", "--runs", "1", str(script)]) == 0
    text = capsys.readouterr().out
    assert "launches: 2, " in text and "under the sanitizer " in text
    assert main(["speed", str(module)]) == 0
    assert capsys.readouterr().out.startswith("twice: 8 instructions, parse ")
    assert main(["speed", "--as-is", "--runs", "0", str(empty)]) == 2
    assert "launched no kernel" in capsys.readouterr().err
