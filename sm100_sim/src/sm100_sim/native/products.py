"""tcgen05.mma of kind::f16 with float32 accumulators and 128 rows per CTA, in native code.

The same products as `tensor_core` makes, with the same BLAS routine and arguments, hence the same
bits: D^T (N, 128) = B (N, K) @ A^T (K, 128) for each CTA over the K of a whole accumulator chain.
What does not fit here is left to Python (`tcgen05`, `tensor_core`), before anything is changed.
"""

from __future__ import annotations

from .barriers import barrier_at, change, in_python
from .fragments import TMEM_COLUMNS, TMEM_LANES, owned
from .language import (
    Signature,
    boolean,
    cycles,
    f32,
    half_to_float,
    i32,
    i64,
    invoke,
    native,
    ptr,
    stack,
    u16,
    u32,
    u64,
    widen_bf16,
    widen_f16,
)
from .layout import CHAIN_LIMIT, Chain, Context, Cta, Operation
from .operand_layout import LAYOUT, LEADING, SPAN, STRIDE, chunk_at, read_layout
from .operands import DONE, PYTHON, operand

#: Context.chain_length while Python has the chain of the warp (`tmem.Tmem.open_chains`).
CHAIN_IN_PYTHON = 0xFFFFFFFF
#: K of one instruction, rows of A in one CTA.
K_STEP = 16
ROWS = 128

SGEMM_WIDE = Signature(
    None,
    (i32, i32, i32, i64, i64, i64, f32, ptr[f32], i64, ptr[f32], i64, f32, ptr[f32], i64),
)
SGEMM = Signature(
    None,
    (i32, i32, i32, i32, i32, i32, f32, ptr[f32], i32, ptr[f32], i32, f32, ptr[f32], i32),
)
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
#: Up to this K, which no BLAS divides, a product is added to D as a whole: the bits are those of a
#: sum that follows. A longer one may be added part by part.
ADDED_AT_ONCE = 128


@native
def matrix_is_valid(raw: u64) -> boolean:
    """Return True if a matrix descriptor passes all checks of `descriptors.decode_matrix`."""
    # What only some targets read, or none, is for `descriptors.issued_matrix`.
    return raw >> 46 & 0x7FFF == 1 and raw >> 61 & 1 == 0 and raw & 0xC000C000 == 0


@native
def instruction_is_covered(raw: u32, group: u32, a_in_tmem: u32) -> boolean:
    """Return True if these routines do what an instruction descriptor requests."""
    if raw & 0x2080604F != 0 or raw >> 4 & 3 != 1 or raw >> 7 & 7 > 1 or raw >> 10 & 7 > 1:
        return False
    n = (raw >> 17 & 63) << 3
    if n == 0 or n > 256 or n & 15 != 0 or (raw >> 24 & 31) << 4 != ROWS * group:
        return False
    return a_in_tmem == 0 or (raw >> 15 & 1 == 0 and n % (16 * group) == 0)


@native
def widen(out: ptr[f32], source: ptr[u16], bf16: u32) -> None:
    """Eight bf16 or f16 elements to float32."""
    if bf16 == 1:
        widen_bf16(out, source)
    else:
        widen_f16(out, source)


@native
def operand_inside(
    cta: ptr[Cta], raws: ptr[u64], count: u64, extent: u64, mn_major: u32
) -> boolean:
    """Return True if native code can read an operand: its descriptors differ in their start alone,
    and it lies in shared memory by a bound that counts whole rows of 128 bytes."""
    first = raws[0]
    farthest: u64 = 0
    for j in range(count):
        if raws[j] >> 14 != first >> 14:
            return False
        start = (raws[j] & 0x3FFF) << 4
        farthest = start if start > farthest else farthest
    layout = stack(u64, LAYOUT)
    read_layout(layout, first)
    plain = layout[SPAN] == 0
    atom = u64(16) if plain else layout[SPAN]
    leading = layout[LEADING]
    stride = layout[STRIDE]
    if mn_major == 0:
        farthest += 7 * atom + ((extent >> 3) - 1) * stride + (leading if plain else u64(16))
    else:
        across = atom >> 4
        far = stride if plain else leading
        deep = leading if plain else stride
        farthest += atom - 16 + ((extent >> 3) - 1) // across * far + 7 * atom + deep
    return (farthest | 127) < cta.smem_bytes


@native
def gather_k_major(
    out: ptr[f32], cta: ptr[Cta], raws: ptr[u64], count: u64, extent: u64, bf16: u32
) -> None:
    """float32 [extent, 16 count] of a K-major operand."""
    layout = stack(u64, LAYOUT)
    for j in range(count):
        read_layout(layout, raws[j])
        for row in range(extent):
            target = out + (row * count + j) * K_STEP
            for half in range(2):
                source = ptr[u16](cta.smem + chunk_at(layout, u32(0), row, half))
                widen(target + half * 8, source, bf16)


@native
def gather_mn_major(
    out: ptr[f32], width: u64, cta: ptr[Cta], raws: ptr[u64], count: u64, extent: u64, bf16: u32
) -> None:
    """float32 [16 count, extent] of an MN-major operand, into rows of `width` elements."""
    layout = stack(u64, LAYOUT)
    for j in range(count):
        read_layout(layout, raws[j])
        for k in range(K_STEP):
            line = out + (j * K_STEP + k) * width
            for chunk in range(extent >> 3):
                source = ptr[u16](cta.smem + chunk_at(layout, u32(1), k, chunk))
                widen(line + chunk * 8, source, bf16)


@native
def gather_tmem(out: ptr[f32], cta: ptr[Cta], addresses: ptr[u64], count: u64, bf16: u32) -> None:
    """float32 [16 count, 128] of A in tensor memory: two elements in a cell, the lower k low."""
    for j in range(count):
        cells = cta.tensor_memory.cells + addresses[j] * TMEM_LANES
        for column in range(K_STEP // 2):
            source = cells + column * TMEM_LANES
            low = out + (j * K_STEP + 2 * column) * ROWS
            high = low + ROWS
            if bf16 == 1:
                even = ptr[u32](low)
                odd = ptr[u32](high)
                for lane in range(ROWS):
                    even[lane] = source[lane] << 16
                    odd[lane] = source[lane] & 0xFFFF0000
            else:
                for lane in range(ROWS):
                    low[lane] = half_to_float(u16(source[lane]))
                    high[lane] = half_to_float(u16(source[lane] >> 16))


@native
def multiply(
    c: ptr[Context], b_order: i32, a_order: i32, n: u64, k: u64, target: ptr[f32], beta: f32
) -> None:
    """target (n, 128) = beta target + B @ A^T by BLAS, A and B in the machine's scratch memory."""
    m = c.cluster.machine
    ldb = k if b_order == PLAIN else n
    lda = ROWS if a_order == PLAIN else k
    one: f32 = 1.0
    started = cycles()
    if m.wide == 1:
        invoke(
            SGEMM_WIDE, m.product, ROW_MAJOR, b_order, a_order, i64(n), i64(ROWS), i64(k), one,
            m.values_b, i64(ldb), m.values_a, i64(lda), beta, target, i64(ROWS),
        )  # fmt: skip
    else:
        invoke(
            SGEMM, m.product, ROW_MAJOR, b_order, a_order, i32(n), i32(ROWS), i32(k), one,
            m.values_b, i32(ldb), m.values_a, i32(lda), beta, target, i32(ROWS),
        )  # fmt: skip
    spent = cycles() - started
    m.product_ticks += spent
    m.operand_ticks -= spent


@native
def accumulate(c: ptr[Context], chain: ptr[Chain], cta: ptr[Cta], b_order: i32, k: u64) -> None:
    """D^T (+)= B @ A^T of one CTA, its B in scratch memory already."""
    m = c.cluster.machine
    descriptor = chain.descriptor
    bf16 = descriptor >> 7 & 1
    count = k // K_STEP
    a_order: i32 = PLAIN
    if chain.a_in_tmem == 1:
        gather_tmem(m.values_a, cta, chain.a, count, bf16)
    elif descriptor >> 15 & 1 == 1:
        gather_mn_major(m.values_a, u64(ROWS), cta, chain.a, count, u64(ROWS), bf16)
    else:
        gather_k_major(m.values_a, cta, chain.a, count, u64(ROWS), bf16)
        a_order = TRANSPOSED
    n = u64(descriptor >> 17 & 63) << 3
    target = ptr[f32](cta.tensor_memory.cells + (chain.d & 0xFFFF) * TMEM_LANES)
    if chain.accumulate == 0:
        multiply(c, b_order, a_order, n, k, target, f32(0))
    elif k <= ADDED_AT_ONCE:
        multiply(c, b_order, a_order, n, k, target, f32(1))
    else:
        multiply(c, b_order, a_order, n, k, m.product_space, f32(0))
        for i in range(n * ROWS):
            target[i] = target[i] + m.product_space[i]


@native
def chain_is_covered(c: ptr[Context], chain: ptr[Chain], count: u64) -> boolean:
    """Return True if all operands of the warp's chain are where they may be."""
    descriptor = chain.descriptor
    group = chain.group
    n = descriptor >> 17 & 63
    k = c.cluster
    first = c.cta.rank & ~(group - 1)
    if first + group > k.cta_count or chain.d >> 16 != 0 or k.machine.product == 0:
        return False
    extent = (u64(n) << 3) // u64(group)
    for p in range(group):
        cta = k.ctas[first + u32(p)]
        memory = cta.tensor_memory
        if owned(memory, chain.d & 0xFFFF, n << 3) == 0:
            return False
        if not operand_inside(cta, chain.b, count, extent, descriptor >> 16 & 1):
            return False
        if chain.a_in_tmem == 0:
            if not operand_inside(cta, chain.a, count, u64(ROWS), descriptor >> 15 & 1):
                return False
        else:
            for j in range(count):
                if chain.a[j] >= TMEM_COLUMNS or owned(memory, u32(chain.a[j]), u32(8)) == 0:
                    return False
    return True


@native
def perform_chain(c: ptr[Context], chain: ptr[Chain], count: u64) -> boolean:
    """Perform an accumulator chain of a warp; False if `isa.tensor.tensor_core` must."""
    descriptor = chain.descriptor
    m = c.cluster.machine
    group = chain.group
    if not chain_is_covered(c, chain, count):
        return False
    first = c.cta.rank & ~(group - 1)
    n = u64(descriptor >> 17 & 63) << 3
    extent = n // u64(group)
    k = count * K_STEP
    bf16 = descriptor >> 10 & 1
    b_order: i32 = PLAIN
    started = cycles()
    for p in range(group):
        cta = c.cluster.ctas[first + u32(p)]
        if descriptor >> 16 & 1 == 1:
            gather_mn_major(m.values_b + p * extent, n, cta, chain.b, count, extent, bf16)
            b_order = TRANSPOSED
        else:
            gather_k_major(m.values_b + p * extent * k, cta, chain.b, count, extent, bf16)
    for p in range(group):
        accumulate(c, chain, c.cluster.ctas[first + u32(p)], b_order, k)
    m.operand_ticks += cycles() - started
    return True


@native
def perform_issued(c: ptr[Context], chain: ptr[Chain], count: u64) -> boolean:
    """`perform_chain` of instructions that Python has issued and that take effect now."""
    if not instruction_is_covered(chain.descriptor, chain.group, chain.a_in_tmem):
        return False
    for i in range(count):
        if not matrix_is_valid(chain.b[i]):
            return False
        if chain.a_in_tmem == 0 and not matrix_is_valid(chain.a[i]):
            return False
    return perform_chain(c, chain, count)


@native
def end_chain(c: ptr[Context]) -> boolean:
    """Perform the warp's accumulator chain, if it has one; False if Python must."""
    count = u64(c.chain_length)
    if count == 0:
        return True
    if count == CHAIN_IN_PYTHON or not perform_chain(c, c.chain, count):
        return False
    c.chain_length = u32(0)
    return True


@native
def continues(
    chain: ptr[Chain], d: u32, descriptor: u32, o: ptr[Operation], enabled: u32
) -> boolean:
    """Return True if an MMA belongs to the accumulator chain before it."""
    return (
        enabled == 1
        and chain.d == d
        and chain.descriptor == descriptor
        and u64(chain.group) == o.form[0]
        and u64(chain.a_in_tmem) == o.form[1]
    )


@native
def tensor_mma(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.mma.kind::f16 [d], [a] or a, b, descriptor, enable-input-d: operands 0 to 4.

    form[0]: cta_group. form[1]: 1 if A is in tensor memory. form[5]: block.
    """
    if lanes & (lanes - 1) != 0 or not c.chain or c.chain_length == CHAIN_IN_PYTHON:
        return PYTHON
    group = u32(o.form[0])
    a_in_tmem = u32(o.form[1])
    d = u32(operand(c, lanes, o.operands[0]))
    a = operand(c, lanes, o.operands[1])
    b = operand(c, lanes, o.operands[2])
    descriptor = u32(operand(c, lanes, o.operands[3]))
    enabled = u32(1) if operand(c, lanes, o.operands[4]) != 0 else u32(0)
    if not matrix_is_valid(b) or not (a_in_tmem == 1 or matrix_is_valid(a)):
        return PYTHON
    chain = c.chain
    count = c.chain_length
    if count > 0:
        if continues(chain, d, descriptor, o, enabled):
            if count == CHAIN_LIMIT:
                return PYTHON
            chain.a[count] = a
            chain.b[count] = b
            c.chain_length = count + 1
            return DONE
        if not end_chain(c):
            return PYTHON
    if not instruction_is_covered(descriptor, group, a_in_tmem):
        return PYTHON
    chain.d = d
    chain.descriptor = descriptor
    chain.accumulate = enabled
    chain.group = group
    chain.a_in_tmem = a_in_tmem
    chain.block = u32(o.form[5])
    chain.a[0] = a
    chain.b[0] = b
    c.chain_length = u32(1)
    return DONE


@native
def commit_ranks(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u64:
    """Mask of the CTAs in which a commit arrives; 0 if Python must do it (see `tensor_commit`)."""
    if lanes & (lanes - 1) != 0 or not c.chain:
        return 0
    address = operand(c, lanes, o.operands[0])
    ranks = u64(1) << (address >> 24 & 15)
    if o.form[0] == 1:
        ranks = operand(c, lanes, o.operands[1]) & 0xFFFF
    k = c.cluster
    if address >> 28 != 0 or ranks >> u64(k.cta_count) != 0:
        return 0
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            b = barrier_at(k, rank << 24 | address & 0xFFFFFF)
            if not b or in_python(b, u64(1), i64(0)):
                return 0
    return ranks


@native
def tensor_commit(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.commit at mbarrier [0], with form[0] = 1 in all CTAs of mask [1]."""
    ranks = commit_ranks(c, lanes, o)
    if ranks == 0 or not end_chain(c):
        return PYTHON
    address = operand(c, lanes, o.operands[0])
    k = c.cluster
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            change(barrier_at(k, rank << 24 | address & 0xFFFFFF), u64(1), i64(0))
    return DONE


@native
def fence_before(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.fence::before_thread_sync: the accumulator chain of this warp ends here."""
    if c.chain and end_chain(c):
        return DONE
    return PYTHON
