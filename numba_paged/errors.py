"""The errors that are ours; everything else is a plain ``ValueError`` or ``TypeError``.

Whatever raises, the state is as it was before the call.
"""


class OutOfBlocks(RuntimeError):
    """The pool (or the table of sequences) has too few free entries for the call; nothing was changed."""


class UnknownSequence(KeyError):
    """The handle names no living sequence: it was freed, or never given out."""

    def __str__(self):  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class CorruptState(RuntimeError):
    """``check()`` found an invariant broken; the message names it and the entries that break it."""
