"""Steps of a `PagedKVCache` for the tests: random tokens in, outputs and what the oracle says of them out."""

import numpy as np

import numba_paged as npg
import reference
import tolerances


class Driver:
    """A cache and, beside it, every sequence's keys and values in contiguous arrays.

    Each step attends with fresh random numbers and is compared with the oracle, and `cache.check()` follows every
    operation. `k` and `v` map a handle to [length, num_kv_heads, head_dim]; `seed` starts the stream of numbers.
    """

    def __init__(self, backend, spec, num_blocks, num_layers=1, seed=0, **options):
        self.backend, self.spec = backend, spec
        self.cache = npg.PagedKVCache(spec, num_layers, num_blocks, backend=backend.name, **options)
        self.rng = np.random.default_rng(seed)
        self.k, self.v = {}, {}

    def add(self, **arguments):
        """A new sequence without tokens."""
        seq = self.cache.add(**arguments)
        self.cache.check()
        self.k[seq] = self.v[seq] = np.zeros((0, self.spec.num_kv_heads, self.spec.head_dim), np.float32)
        return seq

    def fork(self, parent):
        """A child, with the parent's numbers."""
        child = self.cache.fork(parent)
        self.cache.check()
        self.k[child], self.v[child] = self.k[parent], self.v[parent]
        return child

    def free(self, seq):
        """End a sequence."""
        self.cache.free(seq)
        self.cache.check()
        del self.k[seq], self.v[seq]

    def step(self, seqs, num_new=1, tokens=None):
        """Plan, attend in layer 0, commit; returns the plan."""
        plan = self.cache.plan(seqs, num_new)
        self.attend(plan)
        self.cache.commit(plan, tokens)
        self.cache.check()
        return plan

    def attend(self, plan, layer=0):
        """Attend one layer of an open plan with new random numbers, compared with the oracle."""
        spec = self.spec
        new = (plan.num_tokens, spec.num_kv_heads, spec.head_dim)
        q = self.rng.standard_normal((plan.num_tokens, spec.num_q_heads, spec.head_dim), np.float32)
        k, v = self.rng.standard_normal((2, *new), np.float32)
        there = (self.backend.asarray(x) for x in (q, k, v))
        got = self.cache.attend(layer, *there, plan, return_lse=True)
        out, lse = map(self.backend.asnumpy, got)
        for row, seq in enumerate(plan.seqs.tolist()):
            at = slice(*plan.query_starts[row : row + 2])
            self.k[seq], self.v[seq] = np.concatenate([self.k[seq], k[at]]), np.concatenate([self.v[seq], v[at]])
            assert len(self.k[seq]) == plan.lengths[row]
            want = reference.explain(q[at], self.k[seq], self.v[seq], window=spec.window, soft_cap=spec.soft_cap)
            tolerances.assert_attention(out[at], lse[at], want, np.float32, spec.head_dim, spec.soft_cap)
        return out
