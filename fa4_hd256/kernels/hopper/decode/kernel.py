"""The decode kernel for K and V in e4m3: a few query rows against many keys, by one CTA per tile.

One tile is 16, 32 or 64 query rows, those of all heads that share a KV head, of a few queries; one
step multiplies 128 keys with it, S^T = K Q^T and O^T += V^T P^T, K and V^T from registers, to which
they come from e4m3 to f16.  Why so: `config` NOTE [keys as M].

Timeline of a CTA; two warpgroups have 64 keys of S^T each, and 128 columns of O^T::

    queries     Q
    load        K(1) V(1) K(2) V(2) ..
    warpgroups  Q' | K(0)  QK(0)  | S(0)->P(0) | PV(0)  K(1)  QK(1)  | S(1)->P(1) | PV(1) ..
                   |       V(0)   |            |              V(1)   |            |

Q', K(i) and V(i) stand for the conversions; the last runs beside QK; at the bars all threads meet
(`consumers` NOTE [barriers of a step]).

The tables of roles, barriers and SMEM: `E4m3Config`.  NOTE [packed heads] and NOTE [split keys]:
`kernels.forward.common`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder, scheduler_class
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...problem_class import ProblemClass, query_rows
from ...rows.sequences import Sequences
from ...scalars import CallScalars
from ...scheduler_role import SchedulerRole
from ..instructions import WgmmaShape
from .config import BLOCK_KV, E4m3Config
from .consumers import P_CORE, E4m3Consumer
from .context import HopperE4m3DecodeContext
from .producers import E4m3Producer

__all__ = ["DecodeE4m3Kernel"]

TILE_COLUMNS = HEAD_DIM // 2  # of K or V, whose bytes come in twos


class DecodeE4m3Kernel(ForwardCommon, SchedulerRole, E4m3Producer, E4m3Consumer):
    """The decode kernel for one configuration.

    config: rows, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol; None for that of the problem class.

    Called under `cute.compile`; see `ForwardCommon.__call__` for the arguments at run time.
    """

    kv_bytes = 1

    def __init__(
        self, config: E4m3Config, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.scheduler = scheduler or scheduler_class(problem_class.use_clc, 1, counts=True)
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        # Rows of a query, those of padding among them, and queries of a tile.
        self.of_query = query_rows(problem_class.packed_heads, config.rows)
        self.tile_queries = config.rows // self.of_query
        self.load_keys = BLOCK_KV
        half = cutlass.Float16
        self.qk = WgmmaShape(half, config.rows, a_in_registers=True)
        self.pv = WgmmaShape(half, config.rows, a_in_registers=True, b_mn_major=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        """TMA descriptors of Q, K and V, and the plain tensors."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        keys = load, BLOCK_KV, TILE_COLUMNS
        boxes = {"q": (load, self.config.rows, HEAD_DIM), "k": keys, "v": keys}
        tmas = [
            self.tma_tensor(name, view, boxes[name])
            for name, view in zip("qkv", operands[:3], strict=True)
        ]
        return ForwardKernelTensors(*tmas, None, operands[3], lse, optional)

    @cute.kernel
    def kernel(self, tensors: Any, sizes: tuple[Int32, ...], scalars: Any, order: Any):
        """Set-up, then each warp runs its role."""
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.warps.load:
            for tma in (tensors.q, tensors.k, tensors.v):
                cpasync.prefetch_descriptor(tma.atom)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < len(self.warps.consumers):
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.softmax(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            if warp == self.warps.load:
                self.load(context)
            if warp == self.warps.scheduler:
                self.schedule(context)
            if warp == self.warps.queries:
                self.load_queries(context)

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> HopperE4m3DecodeContext:
        """Lay out shared memory as the plan says and initialise the barriers."""
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        sink, ragged = self.sink_and_ragged(tensors.optional)
        entries = self.cache_entries(tensors)
        k_descale, v_descale = self.descales(tensors.optional)
        smem, p = self._smem(memory)
        return HopperE4m3DecodeContext(
            tensors=tensors,
            barriers=self.edges.bind(memory.region("barriers", cutlass.Int64, 8)),
            sequences=Sequences(self.sequence_tensors(ragged), *sizes[:2], entries=entries),
            mask=self.problem_class.mask,
            scalars=scalars,
            heads_per_kv=sizes[2],
            order=order,
            channel=self.scheduler.setup(
                allocator, self.warps.scheduled_warps, scalars.tile_counter
            ),
            cta_rank=Int32(0),
            smem=smem,
            sink=sink,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=sizes[3] if self.problem_class.split else None,
            q=self.qk.b_operand(smem["q_halves"]),
            p=self.pv.b_operand(p),
        )

    def _smem(self, memory: SharedMemory) -> tuple[dict[str, cute.Tensor], cute.Tensor]:
        """Return (buffers by name, P^T as rows x keys of an operand)."""
        config = self.config
        rows, runs, half = config.rows, config.rows // P_CORE, cutlass.Float16
        group = P_CORE * BLOCK_KV
        p_layout = cute.make_layout(
            ((P_CORE, runs), (P_CORE, BLOCK_KV // P_CORE)),
            stride=((1, group), (P_CORE, P_CORE * P_CORE)),
        )
        # Two neighbouring rows of a key are a word.
        words = cute.make_layout((P_CORE // 2, BLOCK_KV, runs), stride=(1, P_CORE // 2, group // 2))
        shapes = {
            "factors": (rows, config.q_stages),
            "maxima": (rows, self.softmax_warps),
            "sums": (rows, self.softmax_warps),
            "offsets": (rows, 1),
            "inverses": (rows, 1),
        }
        found = {
            "q": memory.operand("q", rows, HEAD_DIM, config.q_stages),
            "q_halves": memory.operand("q", rows, HEAD_DIM, config.q_stages, half),
            "kv": memory.operand("kv", BLOCK_KV, TILE_COLUMNS, config.kv_stages),
            "kv_words": cute.make_tensor(memory.region("kv", Uint32, 1024), cute.make_layout(1)),
            "p_words": cute.make_tensor(memory.region("p", Uint32, 128), words),
        } | {
            name: cute.make_tensor(memory.region(name, Float32, 16), cute.make_layout(shape))
            for name, shape in shapes.items()
        }
        return found, cute.make_tensor(memory.region("p", half, 128), p_layout)
