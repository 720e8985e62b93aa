"""Machine code as a disassembly shows it, written by hand."""

from sm100_sim.timing.machine_code.sass import SassFunction


def control(stall=1, sets=7, frees=7, waits=0, yields=False):
    """The upper 64 bits of an encoding with this control code."""
    bits = stall | (not yields) << 4 | sets << 5 | frees << 8 | waits << 11
    return bits << 41


def function(*lines):
    """A function from lines `label:` or `instruction ;`, every control code a stall of 1."""
    text, offset = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{offset:04x}*/    {line} ;   /* 0x0000000000000000 */")
        text.append(f"                 /* 0x{control():016x} */")
        offset += 16
    return SassFunction("test", text)
