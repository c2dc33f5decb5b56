"""Numba kernels that the tests run as compiled PTX. Those with a bug say which."""

import math

from numba import cuda, float32, int32

FULL = 0xFFFFFFFF
BLOCK, DIM, WARPS = 16, 64, 4


def add(a, b, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i] + b[i]


def increment(a, b):
    """No bounds check."""
    i = cuda.grid(1)
    b[i] = a[i] + float32(1)


def strided_copy(a, b, stride):
    i = cuda.grid(1)
    b[i] = a[i * stride]


def tree_sum(a, out):
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    tile[t] = a[i] if i < a.size else float32(0)
    cuda.syncthreads()
    s = 128
    while s > 0:
        if t < s:
            tile[t] += tile[t + s]
        cuda.syncthreads()
        s >>= 1
    if t == 0:
        cuda.atomic.add(out, 0, tile[0])


def tree_sum_without_barrier(a, out):
    """The barrier inside the loop is missing."""
    tile = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    tile[t] = a[i] if i < a.size else float32(0)
    cuda.syncthreads()
    s = 128
    while s > 0:
        if t < s:
            tile[t] += tile[t + s]
        s >>= 1
    cuda.syncthreads()
    if t == 0:
        cuda.atomic.add(out, 0, tile[0])


@cuda.jit(device=True)
def warp_sum(v):
    s = 16
    while s > 0:
        v += cuda.shfl_xor_sync(FULL, v, s)
        s >>= 1
    return v


def shuffle_sum(a, out):
    i = cuda.grid(1)
    v = warp_sum(a[i])
    if cuda.laneid == 0:
        out[i // 32] = v


def half_warp_shuffle(a, out):
    """The mask names 32 lanes, 16 take part."""
    i = cuda.grid(1)
    if cuda.laneid < 16:
        out[i] = cuda.shfl_sync(FULL, a[i], 0)


def skewed_shuffle(a, out, n):
    """The halves of a warp wait for each other at different instructions."""
    i = cuda.grid(1)
    v = a[i]
    if cuda.laneid < 16:
        for _ in range(n):
            v += cuda.shfl_xor_sync(FULL, v, 1)
    else:
        v *= float32(2)
        cuda.syncwarp(FULL)
    out[i] = v


def warp_exchange(a, out, sync):
    """Neighbours exchange through shared memory; without the barrier, a race."""
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = a[cuda.grid(1)]
    if sync:
        cuda.syncwarp(FULL)
    out[cuda.grid(1)] = tile[t ^ 1]


def block_exchange(a, out):
    """A warp barrier does not order other warps."""
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = a[cuda.grid(1)]
    cuda.syncwarp(FULL)
    out[cuda.grid(1)] = tile[127 - t]


def barrier_in_branch(a):
    """Half of each warp is at another barrier."""
    t = cuda.threadIdx.x
    if t % 2 == 0:
        a[t] = t
        cuda.syncthreads()
        a[t] += 1
    else:
        a[t] = -t
        cuda.syncthreads()
        a[t] -= 1


def early_exit(a):
    """Threads leave before the barrier."""
    t = cuda.threadIdx.x
    if t >= 48:
        return
    a[t] = t
    cuda.syncthreads()
    a[t] += a[47 - t]


def uninitialised_shared(a):
    """Entry 5 is never written."""
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    if t != 5:
        tile[t] = a[t]
    cuda.syncthreads()
    a[t] = tile[t]


def column_sum(a, out):
    """Reads columns: all lanes in one bank."""
    tile = cuda.shared.array((32, 32), float32)
    t = cuda.threadIdx.x
    for r in range(32):
        tile[r, t] = a[r, t]
    cuda.syncwarp(FULL)
    s = float32(0)
    for c in range(32):
        s += tile[t, c]
    out[t] = s


def publish(data, flag, out):
    """Block 1 publishes, block 0 spins."""
    if cuda.blockIdx.x == 1:
        data[0] = int32(42)
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, int32(1))
    else:
        while cuda.atomic.add(flag, 0, int32(0)) == 0:
            pass
        out[0] = data[0]


def softmax_rows(x, y):
    """One block of 128 threads a row."""
    part = cuda.shared.array(4, float32)
    row = cuda.blockIdx.x
    t = cuda.threadIdx.x
    n = x.shape[1]
    largest = float32(-math.inf)
    for j in range(t, n, 128):
        largest = max(largest, x[row, j])
    s = 16
    while s > 0:
        largest = max(largest, cuda.shfl_xor_sync(FULL, largest, s))
        s >>= 1
    if t % 32 == 0:
        part[t // 32] = largest
    cuda.syncthreads()
    largest = max(max(part[0], part[1]), max(part[2], part[3]))
    cuda.syncthreads()
    total = float32(0)
    for j in range(t, n, 128):
        total += math.exp(x[row, j] - largest)
    total = warp_sum(total)
    if t % 32 == 0:
        part[t // 32] = total
    cuda.syncthreads()
    inverse = float32(1) / (part[0] + part[1] + part[2] + part[3])
    for j in range(t, n, 128):
        y[row, j] = math.exp(x[row, j] - largest) * inverse


def paged_decode(q, keys, values, tables, lengths, out, scale):
    """grid (kv heads, sequences), 4 warps; warp w takes blocks w, w + 4, ... with an online softmax of its own.

    q, out [num_seqs, num_q_heads, 64]; keys, values [num_blocks, 16, num_kv_heads, 64]. A lane holds 2 dimensions.
    """
    warp_max = cuda.shared.array(WARPS, float32)
    warp_total = cuda.shared.array(WARPS, float32)
    warp_out = cuda.shared.array((WARPS, DIM), float32)
    kv_head = cuda.blockIdx.x
    seq = cuda.blockIdx.y
    lane = cuda.laneid
    w = cuda.threadIdx.x // 32
    n = lengths[seq]
    group = q.shape[1] // keys.shape[2]
    for g in range(group):
        head = kv_head * group + g
        q0 = q[seq, head, lane] * scale
        q1 = q[seq, head, lane + 32] * scale
        m = float32(-math.inf)
        total = float32(0)
        o0 = float32(0)
        o1 = float32(0)
        for b in range(w, (n + BLOCK - 1) // BLOCK, WARPS):
            block = tables[seq, b]
            for t in range(min(BLOCK, n - b * BLOCK)):
                s = warp_sum(q0 * keys[block, t, kv_head, lane] + q1 * keys[block, t, kv_head, lane + 32])
                new_m = max(m, s)
                c = math.exp(m - new_m)
                p = math.exp(s - new_m)
                total = total * c + p
                o0 = o0 * c + p * values[block, t, kv_head, lane]
                o1 = o1 * c + p * values[block, t, kv_head, lane + 32]
                m = new_m
        if lane == 0:
            warp_max[w] = m
            warp_total[w] = total
        warp_out[w, lane] = o0
        warp_out[w, lane + 32] = o1
        cuda.syncthreads()
        d = cuda.threadIdx.x
        if d < DIM:
            m = float32(-math.inf)
            for i in range(WARPS):
                m = max(m, warp_max[i])
            denominator = float32(0)
            numerator = float32(0)
            for i in range(WARPS):
                c = math.exp(warp_max[i] - m)
                denominator += c * warp_total[i]
                numerator += c * warp_out[i, d]
            out[seq, head, d] = numerator / denominator
        cuda.syncthreads()
