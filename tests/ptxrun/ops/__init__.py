"""What each opcode does. Importing this package fills the opcode table."""

from . import async_copy, barrier, control, convert, floats, integer, matrix, memory, warp  # noqa: F401
