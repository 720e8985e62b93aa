"""The forward kernel for Q, K and V in e4m3: `kernel`, with other operands.

Both MMAs are kind::f8f6f4, K = 32 elements, 32 bytes as in 16 bits.  V is MN-major: its rows lie as
they are in global memory.  A step takes half of the tensor core's time, and half of the bytes of K
and V.  The softmax has two warpgroups (`two_groups`).  All else, the order of the MMAs among it, is
the kernel's of 16 bits.

NOTE [Q below O].  A tile's O, of 16 bits, is staged where its Q was (`output`, NOTE [O leaves
through Q]) and has twice the bytes: a Q buffer has room for O, and Q lies in its first half.

NOTE [range of P].  P is rounded to e4m3, four bits of significand between 2^-6 and 448 and less
down to 2^-9.  The maximum may lag by a threshold t behind the true one, in the exponent of 2, so P
is 2^o p with p <= 2^t, and must not exceed 448: o + t <= 8.  With o = t = 4 O is rescaled in few
steps, as in 16 bits, and P vanishes below 2^-14 of the maximum that it refers to.  O, the sum and
the factors all have the 2^o, so that it cancels (`softmax_emu.online`).  The sum is of the float32
values, as in every kernel here.  What rounding adds to an exponent brings P past 2^8 by far less
than the factor 1.75 that is left to 448, wherever logits are such that float32 can tell weights
apart; beyond, the conversion keeps P at 448 (satfinite), and NaN stays NaN.

NOTE [scales of a tile].  A tile has one KV head of one sequence, hence one scale of its scores and
one of V.  The first is taken into the scale of the softmax, or with a softcap into that of its
argument; the second into 1 / sum, at the tile's end.
"""

from __future__ import annotations

from dataclasses import replace

from ....schedulers.protocol import WorkTile
from .config import P_LOG2
from .context import BlackwellForwardContext
from .kernel import ForwardKernel
from .two_groups import GroupScores


class ForwardE4m3Kernel(ForwardKernel):
    """See the module's docstring; the arguments are those of `ForwardKernel`."""

    q_bytes = kv_bytes = 1
    p_log2 = P_LOG2
    scores_class = GroupScores

    def with_descales(
        self, context: BlackwellForwardContext, work: WorkTile
    ) -> BlackwellForwardContext:
        """Return the context with the descales of a tile's scores: NOTE [scales of a tile]."""
        scale = context.score_descale(work)
        if scale is None:
            return context
        scalars = context.scalars
        if self.problem_class.softcap:
            scaled = scalars._replace(cap_scale=scalars.cap_scale * scale)
        else:
            scaled = scalars._replace(scale_log2=scalars.scale_log2 * scale)
        return replace(context, scalars=scaled)
