"""Branches and exits (PTX ISA 9.3, "Control Flow Instructions").

The control-flow analysis and the run loop execute them; they have rows so that every instruction of
a kernel has one.
"""

from __future__ import annotations

from .columns import Jump
from .table import jump_op

jump_op("bra", Jump.BRANCH)
jump_op("brx", Jump.INDEXED)
jump_op("ret", Jump.EXIT)
jump_op("exit", Jump.EXIT)
