"""Small tensors held in registers: tuples of float32, unrolled where they are used.

A loop over an array that NVVM decides not to unroll puts that array into slow local memory. These operations are
unrolled when they are compiled, so that never happens, and no loop has to be written out.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .codecs import FLOAT32, ITEMSIZE, decode
from .intrinsics import F32, I32, SHARED, call_llvm, exchange, f32, literal, u32
from .memory import load_words, store_words


@intrinsic
def fill(typingctx, count, value):
    """A tuple of `count` times the value."""
    count_ = literal(count)
    if count_ is None:
        return None
    value = types.unliteral(value)

    def codegen(context, builder, sig, args):
        return cgutils.pack_array(builder, [args[1]] * count_)

    return types.UniTuple(value, count_)(count, value), codegen


@intrinsic
def count_up(typingctx, count):
    """The tuple of uint32 0, 1, ..., count - 1."""
    count_ = literal(count)
    if count_ is None:
        return None

    def codegen(context, builder, sig, args):
        return cgutils.pack_array(builder, [I32(i) for i in range(count_)])

    return types.UniTuple(u32, count_)(count), codegen


@intrinsic
def each(typingctx, function, *arguments):
    """``each(f, x, y, ...)`` is the tuple of ``f(x[i], y[i], ...)``; what is not a tuple goes to every call."""
    count = next(a.count for a in arguments if isinstance(a, types.UniTuple))
    item_types = [a.dtype if isinstance(a, types.UniTuple) else types.unliteral(a) for a in arguments]
    call = function.get_call_type(typingctx, item_types, {})

    def codegen(context, builder, sig, args):
        implementation = context.get_function(function, call)
        values = cgutils.unpack_tuple(builder, args[1])
        results = []
        for i in range(count):
            items = [builder.extract_value(v, i) if isinstance(a, types.UniTuple) else v
                     for v, a in zip(values, arguments, strict=True)]
            typed = zip(items, item_types, call.args, strict=True)
            results.append(implementation(builder, [context.cast(builder, v, have, want) for v, have, want in typed]))
        return cgutils.pack_array(builder, results)

    star = types.StarArgTuple.from_types(arguments)
    return types.UniTuple(call.return_type, count)(function, star), codegen


def _over_lanes(combine):
    """Combine tuples over the lanes whose numbers differ in the bits `first`, 2 `first`, ... below `last`."""

    @intrinsic
    def over_lanes(typingctx, first, last, numbers):
        first_, last_ = literal(first), literal(last)
        if first_ is None or last_ is None:
            return None

        def codegen(context, builder, sig, args):
            items, bit = cgutils.unpack_tuple(builder, args[2]), first_
            while bit < last_:
                items = [combine(builder, x, exchange(builder, "bfly", x, I32(bit))) for x in items]
                bit *= 2
            return cgutils.pack_array(builder, items)

        return numbers(first, last, numbers), codegen

    return over_lanes


sum_over_lanes = _over_lanes(lambda builder, x, y: builder.fadd(x, y))
max_over_lanes = _over_lanes(lambda builder, x, y: call_llvm(builder, "llvm.maxnum.f32", F32, [x, y]))


def _fma(builder, x, y, z):
    return call_llvm(builder, "llvm.fma.f32", F32, [x, y, z])


@intrinsic
def add_dots(typingctx, sums, code, count, repeat, vector, vector_step, rows, row_bytes):
    """``sums[i] + dot(vector, row i)``, both read from shared memory, `repeat` times `count` numbers of them.

    ``vector`` (uint32 address) has numbers of format `code`, ``rows`` (uint32 address of row 0; rows are `row_bytes`
    apart) has float32. The r-th run of the vector is ``r * vector_step`` bytes further on, that of the rows as many
    numbers. Lanes that read the same row at the same place get it by the same access.
    """
    numbers = [literal(x) for x in (code, count, repeat, vector_step, row_bytes)]
    if None in numbers:
        return None
    code_, count_, repeat_, step, row_bytes_ = numbers
    query_step = step // ITEMSIZE[code_] * 4

    def codegen(context, builder, sig, args):
        totals = cgutils.unpack_tuple(builder, args[0])
        for r in range(repeat_):
            words = load_words(builder, SHARED, builder.add(args[4], I32(r * step)), count_ * ITEMSIZE[code_])
            xs = decode(builder, code_, words, count_)
            for i in range(len(totals)):
                row = builder.add(args[6], I32(i * row_bytes_ + r * query_step))
                ys = decode(builder, FLOAT32, load_words(builder, SHARED, row, 4 * count_), count_)
                for x, y in zip(xs, ys, strict=True):
                    totals[i] = _fma(builder, x, y, totals[i])
        return cgutils.pack_array(builder, totals)

    return sums(sums, code, count, repeat, u32, vector_step, u32, row_bytes), codegen


@intrinsic
def scale_rows(typingctx, matrix, column):
    """``matrix[i, j] * column[i]``."""

    def codegen(context, builder, sig, args):
        numbers, factors = (cgutils.unpack_tuple(builder, a) for a in args)
        width = len(numbers) // len(factors)
        return cgutils.pack_array(builder, [builder.fmul(x, factors[i // width]) for i, x in enumerate(numbers)])

    return matrix(matrix, column), codegen


@intrinsic
def part(typingctx, numbers, first, count):
    """``numbers[first : first + count]``."""
    first_, count_ = literal(first), literal(count)
    if first_ is None or count_ is None:
        return None

    def codegen(context, builder, sig, args):
        items = cgutils.unpack_tuple(builder, args[0])[first_ : first_ + count_]
        return cgutils.pack_array(builder, items)

    return types.UniTuple(numbers.dtype, count_)(numbers, first, count), codegen


def planes(count):
    """(first, width) of the runs of 1, 2 or 4 in which `count` numbers a token are kept in shared memory."""
    return [(first, min(4, count - first)) for first in range(0, count, 4)]


def plane_words(width):
    """Words that a run of a plane takes: an access has a power of two of them."""
    return 4 if width == 3 else width


def planes_bytes(count, tokens):
    """Bytes of the weights of a tile: `count` numbers for each of `tokens` tokens."""
    return 4 * tokens * sum(plane_words(width) for _, width in planes(count))


def _plane_address(builder, base, token, first, width, tokens):
    """Planes lie one after the other; within one, tokens follow each other, so that neither way has bank conflicts."""
    offset = builder.mul(token, I32(4 * plane_words(width)))
    return builder.add(builder.add(base, I32(4 * first * tokens)), offset)


@intrinsic
def store_weights(typingctx, tokens, base, token, numbers):
    """Keep a token's numbers in shared memory, for `add_weighted`; `tokens` is the constant number of tokens."""
    tokens_ = literal(tokens)
    if tokens_ is None:
        return None

    def codegen(context, builder, sig, args):
        items = [builder.bitcast(x, I32) for x in cgutils.unpack_tuple(builder, args[3])]
        for first, width in planes(len(items)):
            at = _plane_address(builder, args[1], args[2], first, width, tokens_)
            words = (items[first : first + width] + [I32(0)])[: plane_words(width)]
            store_words(builder, SHARED, at, words, 4 * len(words))
        return context.get_dummy_value()

    return types.void(tokens, u32, u32, numbers), codegen


def _load_weights(builder, tokens, count, base, token):
    """The `count` numbers that `store_weights` kept for a token."""
    numbers = []
    for first, width in planes(count):
        at = _plane_address(builder, base, token, first, width, tokens)
        words = load_words(builder, SHARED, at, 4 * plane_words(width))
        numbers += [builder.bitcast(word, F32) for word in words[:width]]
    return numbers


@intrinsic
def add_weighted(typingctx, sums, code, width, runs, distance, repeat, values, value_step, tokens, weights, token,
                 token_step, guarded):
    """``sums[i, j] + sum over tokens of weight[token, i] * value[token, j]``, for `repeat` tokens.

    The values of a token are `runs` runs of `width` numbers of format `code`, `distance` bytes apart, in shared memory
    at ``values`` (uint32), `value_step` bytes further for each next one; its weights are what `store_weights` kept in
    ``weights`` for ``token`` (uint32), `token_step` further for each next one. With `guarded`, weight 0 times anything
    is nothing.
    """
    numbers = [literal(x) for x in (code, width, runs, distance, repeat, value_step, tokens, token_step, guarded)]
    if None in numbers:
        return None
    code_, width_, runs_, distance_, repeat_, value_step_, tokens_, token_step_, guarded_ = numbers

    def codegen(context, builder, sig, args):
        totals = cgutils.unpack_tuple(builder, args[0])
        for r in range(repeat_):
            ys = []
            for run in range(runs_):
                at = builder.add(args[6], I32(r * value_step_ + run * distance_))
                ys += decode(builder, code_, load_words(builder, SHARED, at, width_ * ITEMSIZE[code_]), width_)
            here = builder.add(args[10], I32(r * token_step_))
            xs = _load_weights(builder, tokens_, len(totals) // len(ys), args[9], here)
            for i, x in enumerate(xs):
                counts = builder.fcmp_unordered("!=", x, ir.Constant(F32, 0.0))
                for j, y in enumerate(ys, i * len(ys)):
                    total = _fma(builder, x, y, totals[j])
                    totals[j] = builder.select(counts, total, totals[j]) if guarded_ else total
        return cgutils.pack_array(builder, totals)

    sig = sums(sums, code, width, runs, distance, repeat, u32, value_step, tokens, u32, u32, token_step, guarded)
    return sig, codegen


@intrinsic
def store_runs(typingctx, width, runs, distance, row_bytes, address, matrix):
    """The rows of a matrix of float32 into shared memory: each row as runs, `distance` bytes apart, rows `row_bytes`."""
    width_, runs_, distance_, row_bytes_ = (literal(x) for x in (width, runs, distance, row_bytes))
    if None in (width_, runs_, distance_, row_bytes_):
        return None

    def codegen(context, builder, sig, args):
        words = [builder.bitcast(x, I32) for x in cgutils.unpack_tuple(builder, args[5])]
        for first in range(0, len(words), width_):
            row, run = divmod(first // width_, runs_)
            at = builder.add(args[4], I32(row * row_bytes_ + run * distance_))
            store_words(builder, SHARED, at, words[first : first + width_], 4 * width_)
        return context.get_dummy_value()

    return types.void(width, runs, distance, row_bytes, u32, matrix), codegen
