"""Which instructions a target has. The PTX ISA says so under "Target ISA Notes"; nvJitLink agrees, see the tests."""

import re
from functools import cache

from .errors import PtxUnsupported

_NEEDS = [  # (pattern of the whole opcode, lowest sm)
    (r"cp\.async", 80),
    (r"cvt\..*\.(e4m3x2|e5m2x2)", 89),
    (r"cvt\.(rn|rz)\..*(bf16|f16)x2\.f32", 80),
    (r"cvt\..*(bf16|tf32)", 80),
    (r"(add|sub|mul)\..*bf16", 90),
    (r"(fma|neg|abs)\..*bf16", 80),
    (r"setp\..*bf16", 90),
    (r"(add|sub|mul|fma)\..*f32x2", 100),
    (r"(min|max)\..*(f16|bf16)", 80),
    (r"(min|max)\..*NaN.*\.f32", 80),
    (r"ex2\..*bf16", 90),
    (r"tanh\..*bf16", 90),
    (r"(ex2|tanh)\.", 75),
    (r"(ldmatrix|movmatrix)\.", 75),
    (r"stmatrix\.", 90),
    (r"mma\..*(e4m3|e5m2)", 89),
    (r"mma\..*(m16n8k16\..*f16|bf16|tf32)", 80),
    (r"mma\.", 75),
    (r"redux\.", 80),
    (r"elect\.", 90),
    (r"(atom|red)\..*bf16", 90),
    (r"(griddepcontrol|setmaxnreg)", 90),
    (r"ld\.global.*\.v8\.", 100),
    (r"st\.global.*\.v8\.", 100),
]
_NEEDS = [(re.compile(pattern), lowest) for pattern, lowest in _NEEDS]
_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 120: 99}  # KiB; 227 elsewhere


@cache
def sm_of(target):
    """The number in a target such as "sm_90a"; 0 if there is none."""
    number = re.match(r"sm_(\d+)", target)
    return int(number.group(1)) if number else 0


def max_shared_bytes(target):
    """Shared memory that a block may have on a target (CUDA programming guide, compute capabilities)."""
    return _SHARED.get(sm_of(target), 227) << 10


@cache
def lowest_target(op):
    """The lowest sm that has an opcode, by the first pattern that fits; 0 for all."""
    return next((lowest for pattern, lowest in _NEEDS if pattern.match(op)), 0)


def check_target(instr, target):
    """Raise where the module's target lacks an instruction."""
    needed = lowest_target(instr.op)
    if 0 < sm_of(target) < needed:
        raise PtxUnsupported(f"{instr.place} needs sm_{needed}, the target is {target}")
