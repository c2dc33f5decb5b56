"""What the processor that Numba compiles for can do (the host, or what ``NUMBA_CPU_NAME`` says)."""

import hashlib
from pathlib import Path

from numba.core.registry import cpu_target

_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_AVAILABLE = {feature[1:] for feature in _FEATURES.split(",") if feature.startswith("+")}


def _vector_lanes():
    if {"avx512f", "avx512bw", "avx512vl"} <= _AVAILABLE:
        return 16
    if {"avx2", "fma", "f16c"} <= _AVAILABLE:
        return 8
    return 4 if _TRIPLE.startswith(("aarch64", "arm64")) else 0


LANES = _vector_lanes()
"""float32 numbers in a vector register: 16 (AVX-512), 8 (AVX2), 4 (NEON), or 0 for none that the kernels know."""

HAS_BFLOAT16_DOT = LANES == 16 and "avx512bf16" in _AVAILABLE
"""Whether one instruction multiplies pairs of bfloat16 and adds them up in float32."""

HAS_BYTE_TABLES = LANES == 16 and "avx512vbmi" in _AVAILABLE
"""Whether one instruction looks 64 bytes up in a table of 128."""


def _hash_of_sources():
    here = Path(__file__).parent
    files = sorted(here.glob("*.py")) + [here.parent / name for name in ("formats.py", "plan.py", "score.py", "softmax.py")]
    return int.from_bytes(hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()[:7])


SOURCES = _hash_of_sources()
"""A number that changes with any file that kernels are made of.

Numba's disk cache looks at the file of the cached function alone, and at the numbers that it has from the function
around it. A kernel that mentions this one there is compiled anew when any of the files has changed.
"""
