"""The table of opcodes, which the modules in `ops` fill."""

OPCODES = {}


def opcode(*names):
    """Register a decoder: (machine, instr, pc) -> function(act)."""

    def register(decoder):
        OPCODES.update(dict.fromkeys(names, decoder))
        return decoder

    return register
