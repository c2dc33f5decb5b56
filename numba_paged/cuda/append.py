"""Writing new keys and values into the pool, and copying whole blocks inside of it."""

import functools
from dataclasses import dataclass

from numba import cuda

from .codecs import ITEMSIZE
from .compile import Kernel
from .intrinsics import block_x, block_y, divide, thread_index
from .memory import copy_global, load_global, load_i32, load_i64, store_global
from .registers import each
from .warp import F32, U32, U64

NUM_THREADS = 128


@dataclass(frozen=True)
class AppendSpec:
    """What the append kernel is compiled for.

    `new_code` and `kv_code` are formats (`codecs`); a thread writes `width` numbers; `scaled` says whether a scale is
    not 1.
    """

    new_code: int
    kv_code: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    width: int
    scaled: bool


APPEND_PARAMETERS = {
    "slots": U64, "num_rows": U32,
    "k": U64, "k_token": U32, "k_head": U32, "v": U64, "v_token": U32, "v_head": U32,
    "keys": U64, "key_block": U32, "key_token": U32, "key_head": U32,
    "values": U64, "value_block": U32, "value_token": U32, "value_head": U32,
    "k_scale": F32, "v_scale": F32,
}


def make_append(spec):
    """The kernel for an `AppendSpec`.

    Grid: x = NUM_THREADS runs of numbers, y = 0 for keys, 1 for values. Parameters: `APPEND_PARAMETERS`, strides in
    bytes; ``slots`` int64 [num_tokens]; ``num_rows`` = num_tokens · num_kv_heads::

        slot = slots[token];   if slot >= 0: block, offset = divmod(slot, block_size)
        pool[block, offset, head, run] = round(new[token, head, run] / scale)

    Invariant: slot -1 writes nothing. Rounded to nearest even, past the format's range to its largest number; an
    unscaled write into the same format copies the bits.
    """
    new_code, kv_code, width, scaled = spec.new_code, spec.kv_code, spec.width, spec.scaled
    num_heads, block_size, runs = spec.num_kv_heads, spec.block_size, spec.head_dim // spec.width
    new_bytes, kv_bytes = width * ITEMSIZE[new_code], width * ITEMSIZE[kv_code]
    same = new_code == kv_code and not scaled

    def append(slots, num_rows, k, k_token, k_head, v, v_token, v_head, keys, key_block, key_token, key_head,
               values, value_block, value_token, value_head, k_scale, v_scale):
        index = U64(block_x()) * U64(NUM_THREADS) + U64(thread_index())
        row, run = U32(index // U64(runs)), U32(index % U64(runs))
        if row >= num_rows:
            return
        token, head = U32(row // U32(num_heads)), U32(row % U32(num_heads))
        slot = load_i64(slots + U64(token) * U64(8))
        if slot < 0:
            return
        block, offset = U64(slot) // U64(block_size), U32(U64(slot) % U64(block_size))
        if block_y() == U32(0):
            source = k + U64(token) * U64(k_token) + U64(head) * U64(k_head)
            target = keys + block * U64(key_block) + U64(offset) * U64(key_token) + U64(head) * U64(key_head)
            scale = k_scale
        else:
            source = v + U64(token) * U64(v_token) + U64(head) * U64(v_head)
            target = values + block * U64(value_block) + U64(offset) * U64(value_token) + U64(head) * U64(value_head)
            scale = v_scale
        source, target = source + U64(run) * U64(new_bytes), target + U64(run) * U64(kv_bytes)
        if same:
            copy_global(kv_bytes, target, source)
        else:
            numbers = load_global(new_code, width, source)
            if scaled:
                numbers = each(divide, numbers, scale)
            store_global(kv_code, True, target, numbers)

    return append


@functools.cache
def append_kernel(spec):
    """The `Kernel` of an `AppendSpec`."""
    return Kernel("append", make_append, spec, APPEND_PARAMETERS, NUM_THREADS)


@dataclass(frozen=True)
class CopySpec:
    """What the copy kernel is compiled for: a block's tokens, heads, bytes of a row, bytes of an access."""

    block_size: int
    num_kv_heads: int
    row_bytes: int
    access: int

    @property
    def num_chunks(self):
        """Thread blocks that share a pool's block."""
        return -(-self.block_size * self.num_kv_heads * (self.row_bytes // self.access) // NUM_THREADS)


COPY_PARAMETERS = {"pairs": U64}
for _name in ("keys", "values"):
    COPY_PARAMETERS |= {f"{side}_{_name}{axis}": U64 if axis in ("", "_layer") else U32 for side in ("source", "target")
                        for axis in ("", "_layer", "_block", "_token", "_head")}


def make_copy(spec):
    """The kernel for a `CopySpec`.

    Grid: x = pair · num_chunks + chunk of the block, y = 2 · layer, + 1 for values. Parameters: `COPY_PARAMETERS`,
    strides in bytes; ``pairs`` int32 [num_pairs, 2]: source block, target block::

        target[layer, target block] = source[layer, source block]

    Invariant: no block is both a source and a target of one launch.
    """
    num_heads, block_size, access = spec.num_kv_heads, spec.block_size, spec.access
    runs, num_chunks = spec.row_bytes // access, spec.num_chunks

    @cuda.jit(device=True)
    def place(pool, layer_bytes, block_bytes, token_bytes, head_bytes, layer, block, token, head):
        at = pool + U64(layer) * layer_bytes + U64(block) * U64(block_bytes)
        return at + U64(token) * U64(token_bytes) + U64(head) * U64(head_bytes)

    def copy(pairs, source_keys, source_keys_layer, source_keys_block, source_keys_token, source_keys_head,
             target_keys, target_keys_layer, target_keys_block, target_keys_token, target_keys_head,
             source_values, source_values_layer, source_values_block, source_values_token, source_values_head,
             target_values, target_values_layer, target_values_block, target_values_token, target_values_head):
        pair = pairs + U64(U32(block_x() // U32(num_chunks))) * U64(8)
        index = U32(block_x() % U32(num_chunks) * U32(NUM_THREADS) + thread_index())
        byte = U64(U32(index % U32(runs) * U32(access)))
        row = U32(index // U32(runs))
        token, head = U32(row // U32(num_heads)), U32(row % U32(num_heads))
        if token >= U32(block_size):
            return
        layer, from_block, to_block = U32(block_y() // U32(2)), load_i32(pair), load_i32(pair + U64(4))
        if block_y() % U32(2) == U32(0):
            source = place(source_keys, source_keys_layer, source_keys_block, source_keys_token, source_keys_head,
                           layer, from_block, token, head)
            target = place(target_keys, target_keys_layer, target_keys_block, target_keys_token, target_keys_head,
                           layer, to_block, token, head)
        else:
            source = place(source_values, source_values_layer, source_values_block, source_values_token,
                           source_values_head, layer, from_block, token, head)
            target = place(target_values, target_values_layer, target_values_block, target_values_token,
                           target_values_head, layer, to_block, token, head)
        copy_global(access, target + byte, source + byte)

    return copy


@functools.cache
def copy_kernel(spec):
    """The `Kernel` of a `CopySpec`."""
    return Kernel("copy", make_copy, spec, COPY_PARAMETERS, NUM_THREADS)
