"""The inner loops, compiled by Numba: what happens for every thread of every access."""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

# what check_access finds
MISALIGNED, BAD_FLAGS, CLASH = 1, 2, 4


@njit(cache=True)
def check_access(offset, size, flags, flags8, need, forbid, grant, trace, trace8, mark, clash):
    """Check and note accesses of `size` bytes at offsets inside of a space; all is well where the result is 0.

    Every byte must have the flags `need` and none of `forbid`, and then gets those of `grant`. In `trace` it gets the
    bits of `mark`, unless that is 0; having some of `clash` there is reported. `flags8` and `trace8` are the same bytes
    by eights, for wide accesses.
    """
    found = 0
    for i in range(len(offset)):
        if offset[i] & (size - 1):
            return MISALIGNED
    if size < 8:
        for i in range(len(offset)):
            for byte in range(offset[i], offset[i] + size):
                found |= _check_word(flags, byte, np.uint8(need), np.uint8(forbid), np.uint8(grant))
                if mark:
                    found |= _mark_word(trace, byte, np.uint8(mark), np.uint8(clash))
        return found
    every = np.uint64(0x0101010101010101)
    need8, forbid8, grant8 = every * np.uint64(need), every * np.uint64(forbid), every * np.uint64(grant)
    mark8, clash8 = every * np.uint64(mark), every * np.uint64(clash)
    for i in range(len(offset)):
        for word in range(offset[i] >> 3, (offset[i] + size) >> 3):
            found |= _check_word(flags8, word, need8, forbid8, grant8)
            if mark:
                found |= _mark_word(trace8, word, mark8, clash8)
    return found


@njit(cache=True, inline="always")
def _check_word(flags, at, need, forbid, grant):
    have = flags[at]
    if (have & need) != need or (have & forbid) != 0:
        return BAD_FLAGS
    if (have | grant) != have:
        flags[at] = have | grant
    return 0


@njit(cache=True, inline="always")
def _mark_word(trace, at, mark, clash):
    have = trace[at]
    trace[at] = have | mark
    return CLASH if have & clash else 0


@njit(cache=True)
def count_sectors(address, tid):
    """Distinct 32-byte sectors of each warp's request, summed; accesses never straddle a sector."""
    total, count, warp = 0, 0, -1
    seen = np.empty(32, np.int64)
    for i in range(len(address)):
        if tid[i] >> 5 != warp:
            warp, count = tid[i] >> 5, 0
        sector = address[i] >> 5
        known = False
        for k in range(count - 1, -1, -1):
            if seen[k] == sector:
                known = True
                break
        if not known:
            seen[count] = sector
            count += 1
            total += 1
    return total


@njit(cache=True)
def count_wavefronts(offset, size, tid):
    """(passes, fewest passes) of shared-memory requests through 32 banks of 4 bytes.

    Accesses of 8 bytes go by half-warps, of 16 by quarter-warps; lanes on the same word share it.
    """
    lanes = 16 if size == 8 else 8 if size == 16 else 32
    words = max(1, size // 4)
    held = np.empty((32, 128), np.int64)  # distinct words of each bank in this phase
    count = np.zeros(32, np.int64)
    passes, phases, phase, deepest = 0, 0, -1, 0
    for i in range(len(offset)):
        if tid[i] // lanes != phase:
            phase = tid[i] // lanes
            passes += deepest
            phases += 1
            deepest = 0
            count[:] = 0
        for word in range(offset[i] >> 2, (offset[i] >> 2) + words):
            bank = word & 31
            known = False
            for k in range(count[bank]):
                known |= held[bank, k] == word
            if not known:
                held[bank, count[bank]] = word
                count[bank] += 1
                deepest = max(deepest, count[bank])
    return passes + deepest, phases


@intrinsic
def _fused(typingctx, a, b, c):
    """The fused multiply-add of the processor, or of the C library where it has none."""

    def codegen(context, builder, sig, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(cache=True)
def fma32(a, b, c):
    """float32 a*b+c, rounded once."""
    out = np.empty(len(a), np.float32)
    for i in range(len(a)):
        out[i] = _fused(a[i], b[i], c[i])
    return out


@njit(cache=True)
def flush32(x):
    """Float32 subnormals become zero of the same sign."""
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = np.copysign(np.float32(0), x[i]) if abs(x[i]) < np.float32(2.0**-126) else x[i]
    return out
