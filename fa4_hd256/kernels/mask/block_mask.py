"""Lists of the KV tiles that a tile of queries meets, and bits of the keys that a row sees in one.

NOTE [listed tiles].  Where a call has a block mask, the steps of a tile of queries are no range of
KV tiles: a list in global memory names them, in falling order.  A step is four words: the KV tile,
and for each CTA of a pair the tile of bits of its rows, `FULL` where its rows see every key.  The
word before the first step is their number.  Tiles that no row sees are not listed: they are neither
loaded nor multiplied.  Step i of the kernel's table of steps is entry i of the list; every role
reads the same number of them, 0 for rows that see nothing.

A tile of bits has 128 rows of 128 bits, 16 bytes per row, bit j of word w that of key 32 w + j. The
first one, `NOTHING`, is all zeros: rows of a CTA that see nothing of a tile which the other's see.
Keys past the end have no bits, so a tile that ends behind the last key is never `FULL`.

Where a mask_mod of the user's says what is seen (`kernel_functions`), there are no tiles of bits:
the number of a tile is `FULL`, `NOTHING`, or that of those for which it is evaluated.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...schedulers.carried import Carried
from ..plan.edges import SharedByReference
from .masking import WORD_BITS, hide_unseen

#: Fields of `SequenceTensors` with a block mask, of the forward and of the kernels that make
#: gradients (`backward.block_mask`).
MASK_STEPS, MASK_BITS = "mask_steps", "mask_bits"
MASK_GRADIENTS = MASK_BLOCKS, MASK_KEY_BITS = "mask_blocks", "mask_key_bits"
MASK_TABLES = (MASK_STEPS, MASK_BITS, *MASK_GRADIENTS)
MASK_TILE = 128  # queries, and keys, of a tile of bits
BIT_WORDS = MASK_TILE // WORD_BITS  # of a row
ROW_BYTES = BIT_WORDS * WORD_BITS // 8
STEP_WORDS = 4  # of a step
#: In place of the number of a tile of bits: all keys are seen; and the number of that without any.
FULL, NOTHING = -1, 0


class StepList(SharedByReference):
    """The steps of one tile of queries. steps: (1 + most tiles, STEP_WORDS) int32; bits: (tiles,
    MASK_TILE, BIT_WORDS) int32, None where there are none. parts: steps in which the kernel works
    on a tile that is listed, the last keys first."""

    def __init__(self, steps: cute.Tensor, bits: Any, parts: int = 1) -> None:
        self._steps, self._bits, self.parts = steps, bits, parts

    @classmethod
    def of(cls, tensors: Any, plane: tuple[Int32, Int32], block: Int32, parts: int = 1) -> StepList:
        """Read a tile's list.  plane: (batch entry, query head); block: of the tile's queries."""
        steps = tensors.mask_steps
        batch, head = (
            cutlass.min(place, Int32(cute.size(steps, mode=[i])) - 1)
            for i, place in enumerate(plane)
        )
        return cls(steps[batch, head, block, None, None], tensors.mask_bits, parts)

    @property
    def count(self) -> Int32:
        return self._steps[0, 0] * self.parts

    def kv_tile(self, step: Int32) -> Int32:
        """The KV tile of a step; of the last one that the list has room for, past that."""
        tile = self._steps[self._entry(step), 0]
        return tile if self.parts == 1 else tile * self.parts + self.part(step)

    def part(self, step: Int32) -> Int32:
        return self.parts - 1 - step % self.parts

    def first(self) -> ListedTile:
        return ListedTile(self, Int32(0), self.kv_tile(Int32(0)), self.kv_tile(Int32(1)))

    def row(
        self, half: Int32, row: Int32, words: tuple[Int32 | int, int] = (0, BIT_WORDS)
    ) -> RowBits:
        """Return what a row sees in the first step, of a list that has one.  half: of the tile's
        rows, that of a CTA; row: in it, a thread's own; words: (first, number) of the row's bits.

        NOTE [numbers of a thread].  All threads read the same numbers.  Where ptxas knows it, it
        moves them to a uniform register as soon as they are loaded, and the warp waits for them in
        every step; so their address depends on the row, by what is 0.
        """
        half += row // MASK_TILE
        numbers = self.bit_tile(Int32(0), half), self.bit_tile(Int32(1), half)
        place = half, row, words
        return RowBits(self, place, Int32(0), numbers, self.words(numbers[0], row, words))

    def bit_tile(self, step: Int32, half: Int32) -> Int32:
        """Return the tile of bits of a step; past the end of the list, that of the last step with
        room."""
        return self._steps[self._entry(step), half + 1]

    def _entry(self, step: Int32) -> Int32:
        tile = step if self.parts == 1 else step // self.parts
        return cutlass.min(tile + 1, Int32(cute.size(self._steps, mode=[0])) - 1)

    def words(
        self, number: Int32, row: Int32, chosen: tuple[Int32 | int, int] = (0, BIT_WORDS)
    ) -> tuple[Int32, ...]:
        """The bits of a row, none where there are none.  chosen: (first, number) of their words."""
        if self._bits is None:
            return ()
        first, count = chosen
        place = self._bits[cutlass.max(number, NOTHING), row, None].iterator
        if count < BIT_WORDS:
            place += first
        place = place.align(ROW_BYTES * count // BIT_WORDS)
        words = cute.make_rmem_tensor(count, Int32)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), words)
        return tuple(words[word] for word in range(count))


class ListedTile(Carried):
    """A KV tile of a list, with the next one's number; lives across loops."""

    CARRIED = ("_step", "number", "_following")

    def __init__(self, steps: StepList, step: Int32, number: Int32, following: Int32) -> None:
        self._steps, self._step, self.number, self._following = steps, step, number, following

    def next(self) -> ListedTile:
        step = self._step + 1
        return ListedTile(self._steps, step, self._following, self._steps.kv_tile(step + 1))


class RowBits:
    """Bits that a row sees in a step, and the number of the next step's; lives across loops. A
    step's bits are read while the step before is worked on."""

    def __init__(
        self,
        steps: StepList,
        place: tuple[Int32, Int32, tuple[Int32 | int, int]],
        step: Int32,
        numbers: tuple[Int32, Int32],
        words: tuple[Int32, ...],
    ) -> None:
        """numbers: of this step's and the next one's tile of bits.  words: of this step."""
        self._steps, self._place, self._step = steps, place, step
        self._numbers, self._words = numbers, words

    def next(self) -> RowBits:
        half, row, words = self._place
        step, number = self._step + 1, self._numbers[1]
        numbers = number, self._steps.bit_tile(step + 1, half)
        words = self._steps.words(number, row, words)
        return RowBits(self._steps, self._place, step, numbers, words)

    @property
    def number(self) -> Int32:
        return self._numbers[0]

    @property
    def kv_tile(self) -> Int32:
        return self._steps.kv_tile(self._step)

    @cute.jit
    def apply(self, scores: cute.Tensor) -> None:
        """Set the scores of keys that the row does not see to -inf.  scores: register tensor of
        Float32 of the row, of all keys of the step that have words here."""
        if self._numbers[0] != FULL:
            # ptxas cannot execute this under a predicate: it would in every step, for all scores.
            cute.arch.sync_warp()
            hide_unseen(scores, self._words, range(cute.size(scores)))

    def __extract_mlir_values__(self) -> list:
        values = self._step, *self._numbers, *self._words
        return [ir for value in values for ir in cutlass.extract_mlir_values(value)]

    def __new_from_mlir_values__(self, values: list) -> RowBits:
        step, *own = (cutlass.new_from_mlir_values(Int32(0), [ir]) for ir in values)
        return RowBits(self._steps, self._place, step, tuple(own[:2]), tuple(own[2:]))
