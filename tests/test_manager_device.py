"""A cache whose arrays live on a device that is not the current one: it is made current for whatever is done to them."""

from contextlib import contextmanager

import numpy as np
import pytest

import numba_paged as npg
from array_backend import ArrayBackend


class OneDevice(ArrayBackend):
    """A backend that remembers for which arrays a device was made current, and refuses to work while none is."""

    def __init__(self):
        self.current, self.seen = None, []

    @contextmanager
    def on(self, **arrays):
        self.current = {name for name, array in arrays.items() if array is not None}
        self.seen.append(self.current)
        yield
        self.current = None

    def array(self, values):
        assert self.current
        return values


def guarded(name):
    def verb(self, *arguments):
        assert self.current, f"{name} while no device is current"
        return getattr(ArrayBackend, name)(self, *arguments)

    return verb


for _name in ("empty", "append", "attend", "read_blocks", "write_blocks"):
    setattr(OneDevice, _name, guarded(_name))


def make_cache():
    spec = npg.AttentionSpec(1, 1, 1, block_size=4, kv_dtype="float32")
    backend = OneDevice()
    return npg.PagedKVCache(spec, 1, 8, backend, num_host_blocks=4), backend


@pytest.mark.parametrize("given", [True, False])
def test_attend_works_on_the_device_of_its_arrays(given):
    cache, backend = make_cache()
    plan, x = cache.plan([cache.add()], 3), np.ones((3, 1, 1), np.float32)
    out = np.empty_like(x) if given else None
    cache.attend(0, x, x, x, plan, sinks=[0.5], alibi_slopes=[0.5], out=out, return_lse=True)
    assert backend.seen == [{"q", "k", "v", "keys", "values"} | ({"out"} if given else set())]


def test_blocks_are_moved_on_the_device_of_the_pool():
    cache, backend = make_cache()
    seq = cache.add()
    cache.commit(cache.plan([seq], 5))
    cache.swap_out(seq)
    cache.swap_in(seq)
    assert backend.seen == [{"keys", "values"}] * 2


def test_arrays_of_several_devices_change_nothing():
    cache, backend = make_cache()
    plan, x = cache.plan([cache.add()], 3), np.ones((3, 1, 1), np.float32)

    def refuse(**arrays):
        raise TypeError("arrays of several GPUs are mixed")

    backend.on = refuse
    with pytest.raises(TypeError, match="several GPUs"):
        cache.attend(0, x, x, x, plan)
    assert not cache.keys(0).any()
    cache.check()
