"""`python -m lab fp8`: keys and values in e4m3: errors by method, what a step costs, and decoding
beside that of a bf16 cache.

Errors are of attention in PyTorch with the operands rounded as each method rounds them, and of our
compiled kernel in the simulator; clocks of our kernels by the timing model.
"""

from __future__ import annotations

import argparse

from bench.tables.origin import simulator_machine
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256.kernels.forward.tiles import DECODE_ROWS as TILE_ROWS
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.measure.e4m3 import CASES, OURS, Case, Errors, errors
from lab.model.machines import B200
from lab.model.origin import modelled_machine
from lab.model.studies.e4m3_steps import Steps, steps_of
from sm100_sim.timing import Machine, load, mma_cost

ERRORS = (
    Column("case"),
    Column("keys"),
    Column("method"),
    Column("max_error", format=".2e", title="max error"),
    Column("rel_l2", format=".2e", title="relative L2"),
    Column("rel_l2_of_values", format=".2e", title="relative L2 to values before e4m3"),
)
COSTS = (
    Column("method"),
    Column("hbm_bytes", "KiB", ".0f", "from HBM"),
    Column("hbm_clocks", "clocks", ".0f", "of HBM"),
    Column("smem_bytes", "KiB", ".0f", "through shared memory"),
    Column("smem_clocks", "clocks", ".0f", "of its port"),
    Column("products", format=".0f", title="tensor core, slices"),
    Column("product_clocks", "clocks", ".0f", "of these"),
)

DECODING = (
    Column("rows", title="query rows of a tile"),
    Column("kv", title="KV type"),
    Column("step", "clocks", ".0f", "step, from L2"),
    Column("hbm", "clocks", ".0f", "of HBM"),
    Column("ends", "clocks", ".0f", "begin and end of a tile"),
    Column("clocks", "clocks", ".0f", "tile of 8,192 keys, from HBM"),
    Column("ratio", format=".2f", title="tokens a second, of bf16's"),
)

KEYS, ROWS = 128, 16
#: Keys of a sequence that a CTA has, for the table of decoding.
KEYS_OF_A_TILE = 8192
#: Rate of an SM's part of HBM, in bytes per clock at 1.85 GHz.
HBM_BYTES_A_CLOCK = B200.hbm_bytes_per_second / B200.sms / 1.85e9
SMEM_BYTES_A_CLOCK = 128
KIB = 1024


def error_table(cases: tuple[Case, ...] = CASES) -> Table:
    """A row for each case and method."""
    of_cases = ([_error_row(case, *one) for one in errors(case).items()] for case in cases)
    found = results(of_cases, len(cases), ERRORS, lambda rows: rows, "simulating")
    rows = [row for of_case in found for row in of_case]
    notes = (
        "One query, 16 heads, one KV head. Max error and relative L2 are against float64 attention "
        "of what the codes stand for; the last column against that of the values before they "
        "became codes. Methods are emulated: operands rounded, products and sums in float64, no "
        "rounding of out. Our kernels' rows are of their compiled code, simulated, out in bf16: "
        "two parts Blackwell's, float16 Hopper's. P in one part is scaled so that the largest of a "
        "row is 2^8.",
    )
    return Table("fp8", "Error of attention over K and V in e4m3, by method", ERRORS, rows, notes)


def _error_row(case: Case, method: str, found: Errors) -> dict[str, object]:
    machine = simulator_machine() if method in OURS else "PyTorch, emulated"
    return {
        "case": case.name, "keys": case.keys, "method": method, "max_error": found.max_error,
        "rel_l2": found.rel_l2, "rel_l2_of_values": found.rel_l2_of_values,
        BASIS: "measured", MACHINE: machine,
    }  # fmt: skip


def cost_table() -> Table:
    """Tabulate the bytes that a step of 128 keys moves, for 16 query rows."""
    tile = 2 * KEYS * HEAD_DIM
    rows = [
        _cost_row("bf16 cache", 2 * tile, 2 * tile, 2, 1),
        # Bytes are read, and bf16 is written, by a warp.
        _cost_row("e4m3 converted to bf16", tile, tile + tile + 2 * tile, 2, 1),
        _cost_row("e4m3: Q and P in one part", tile, tile, 1, 1),
        _cost_row("e4m3: Q and P in two parts", tile, tile, 1, 2),
    ]
    notes = (
        f"Of a step of {KEYS} keys of one KV head and {ROWS} query rows. From HBM: K and V once; "
        f"clocks at {HBM_BYTES_A_CLOCK:.1f} bytes a clock, an SM's part of 8 TB/s. Through shared "
        "memory: what TMA writes, what a conversion reads and writes, and what the products read "
        f"of both operands, {SMEM_BYTES_A_CLOCK} bytes a clock. A slice: {KEYS} rows x 32 bytes of "
        f"K or V, by the timing model's clocks of an instruction with {ROWS} columns for a part.",
    )
    return Table("fp8_costs", "A step over K and V in e4m3, by method", COSTS, rows, notes)


def _cost_row(
    method: str, hbm: int, filled: int, element_bytes: int, parts: int
) -> dict[str, object]:
    """hbm: bytes from there; filled: through shared memory until operands lie there; element_bytes,
    parts: of the operands of the products."""
    slices = 2 * HEAD_DIM * element_bytes // 32
    # A of every slice once; B of Q, and of P for both halves of O.
    read = slices * (KEYS + parts * ROWS) * 32
    smem = filled + read
    return {
        "method": method, "hbm_bytes": hbm / KIB, "hbm_clocks": hbm / HBM_BYTES_A_CLOCK,
        "smem_bytes": smem / KIB, "smem_clocks": smem / SMEM_BYTES_A_CLOCK, "products": slices,
        "product_clocks": slices * mma_cost(KEYS, parts * ROWS, 1, False).interval,
        BASIS: "computed", MACHINE: "this code",
    }  # fmt: skip


def decoding_table(machine: Machine) -> Table:
    """Our kernels for both types of K and V."""

    def of_rows(count: int) -> list[dict[str, object]]:
        of_bf16, of_e4m3 = (steps_of(count, e4m3, machine) for e4m3 in (False, True))
        return [_decoding_row(count, "bf16", of_bf16, of_bf16, machine),
                _decoding_row(count, "e4m3", of_e4m3, of_bf16, machine)]  # fmt: skip

    found = results(map(of_rows, TILE_ROWS), len(TILE_ROWS), DECODING, lambda rows: rows)
    rows = [row for of_count in found for row in of_count]
    notes = (
        "Steps of 128 keys of one CTA, replayed alone with an SM's share of L2; where keys come "
        "from HBM a step takes an SM's share of that at least. Begin and end: what a tile takes "
        "besides, loads of its first step among it. Tokens a second: of tiles of 8,192 keys each, "
        "all SMs at work, without launch and combining.",
    )
    return Table("fp8_decoding", "Decoding by KV type, our kernels", DECODING, rows, notes)


def _decoding_row(
    rows: int, kv: str, found: Steps, of_bf16: Steps, machine: Machine
) -> dict[str, object]:
    clocks = found.of_keys(KEYS_OF_A_TILE)
    return {
        "rows": rows, "kv": kv, "step": found.step, "hbm": found.hbm, "ends": found.ends,
        "clocks": clocks, "ratio": of_bf16.of_keys(KEYS_OF_A_TILE) / clocks,
        BASIS: "modelled", MACHINE: modelled_machine(machine),
    }  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    emit([error_table(), cost_table(), decoding_table(load(arguments.machine))], arguments)
    return 0
