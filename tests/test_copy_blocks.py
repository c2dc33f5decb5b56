"""copy_blocks: all reads before all writes, every bit, nothing beside the targets."""

import numpy as np
import pytest

import numba_paged as npg
import reference
from inputs import KV_DTYPES, LAYOUTS, Shape, make_pool

PAIRS = {
    "one": [(3, 5)],
    "none": [],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "chain backwards": [(2, 3), (1, 2), (0, 1)],
    "swap": [(0, 1), (1, 0)],
    "ring": [(0, 1), (1, 2), (2, 0)],
    "onto itself": [(4, 4), (4, 5)],
    "one source, many targets": [(6, 0), (6, 1), (6, 2)],
}


def random_pool(shape, num_blocks, layout, seed=0):
    """Pools full of random bits, NaN among them."""
    rng = np.random.default_rng(seed)
    pools = make_pool(shape, num_blocks, layout, "zero")
    for pool in pools:
        bits = rng.integers(0, 256, (*pool.shape[:-1], pool.shape[-1] * pool.dtype.itemsize), dtype=np.uint8)
        pool[...] = bits.view(pool.dtype)
    return pools


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copy_blocks(backend, kv_dtype, layout, pairs):
    sources, targets = np.array(pairs, np.int32).reshape(-1, 2).T.copy()
    pools = random_pool(Shape(head_dim=20, block_size=3, kv_dtype=kv_dtype), 7, layout)
    want = [reference.copy_blocks(pool, sources, targets) for pool in pools]
    pools = [backend.asarray(pool) for pool in pools]
    assert npg.copy_blocks(*pools, backend.asarray(sources), backend.asarray(targets)) is None
    assert [backend.asnumpy(pool).tobytes() for pool in pools] == [pool.tobytes() for pool in want]


def test_all_layers_at_once(backend):
    """Pools [num_layers, num_blocks, ...] are copied in every layer."""
    keys, values = (np.stack(x) for x in zip(*(random_pool(Shape(), 5, "NHD", seed) for seed in range(3)), strict=True))
    sources, targets = np.int32([0, 4]), np.int32([4, 1])
    want = [np.stack([reference.copy_blocks(layer, sources, targets) for layer in pool]) for pool in (keys, values)]
    there = [backend.asarray(pool) for pool in (keys, values)]
    npg.copy_blocks(*there, backend.asarray(sources), backend.asarray(targets))
    assert [backend.asnumpy(pool).tobytes() for pool in there] == [pool.tobytes() for pool in want]


def test_neighbours_in_the_same_storage_stay(backend):
    """keys are half of a joint pool; the padding of rows belongs to somebody else, too."""
    storage = np.random.default_rng(1).standard_normal((6, 2, 4, 2, 10), np.float32)
    storage = backend.asarray(storage)
    before = backend.asnumpy(storage).copy()
    pairs = [backend.asarray(np.array(x, np.int32)) for x in ([0, 5], [3, 1])]
    npg.copy_blocks(storage[:, 0, :, :, :8], storage[:, 1, :, :, :8], *pairs)
    before[[3, 1], :, :, :, :8] = before[[0, 5], :, :, :, :8]
    np.testing.assert_array_equal(backend.asnumpy(storage), before)
