"""Infinities and NaN among the values that only some rows see: a weight of 0 must keep them from the others.

A product on tensor cores adds every token of a tile to every row, and 0 times infinity is NaN. Values that nobody sees are
never copied, zeros are in their place; what is left are tiles in which rows see different tokens: at the causal edge,
and at the start of the windows of several query tokens. Testing their values would cost time with each of them, so the
kernels test the sums, once, at the end. Where one is not finite, all tiles are gone through again, and those that are
not seen by all rows are then added on plain cores, token by token.
"""

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .codecs import ITEMSIZE, decode
from .intrinsics import F32, I32, SHARED, assembly, call_llvm, f32, literal, number_from, shuffle_from, u32
from .memory import load_words
from .registers import each
from .tensor import TILE, operand_code

U32 = types.uint32


@intrinsic
def all_finite(typingctx, numbers):
    """Whether none of the numbers is infinite or NaN."""

    def codegen(context, builder, sig, args):
        zero = ir.Constant(F32, 0.0)
        total = zero
        for x in cgutils.unpack_tuple(builder, args[0]):
            total = call_llvm(builder, "llvm.fma.f32", F32, [x, zero, total])
        return builder.fcmp_ordered("==", total, zero)

    return types.boolean(numbers), codegen


@intrinsic
def any_thread(typingctx, condition):
    """Whether the condition holds in any thread of the block, all of which must take part: a barrier."""

    def codegen(context, builder, sig, args):
        text = "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; bar.red.or.pred q, 0, p; selp.u32 $0, 1, 0, q; }"
        word = assembly(builder, I32, [builder.zext(args[0], I32)], text, "=r,r,~{memory}", side_effect=True)
        return builder.icmp_unsigned("!=", word, I32(0))

    return types.boolean(types.boolean), codegen


@intrinsic
def two_numbers(typingctx, code, word):
    """The two 16-bit numbers of a word, as float32."""
    code_ = literal(code)
    if code_ is None:
        return None

    def codegen(context, builder, sig, args):
        return cgutils.pack_array(builder, decode(builder, code_, [args[1]], 2))

    return types.UniTuple(f32, 2)(code, u32), codegen


def _lane_values(builder, code, address, step, across):
    """The lane's numbers of 16 of a token, those of the first half of the fragments and those of the others.

    Of numbers as rows these are r and r + 8, of numbers as columns 2c 2c+1 and 2c+8 2c+9. Float8 fragments have the
    even numbers in their first half: 2r and 2r+1, or of 4c to 4c+3.
    """
    size = 1 if across else 2
    if ITEMSIZE[code] == 1:
        words = load_words(builder, SHARED, builder.add(address, I32(TILE * step)), 2 * size)
        numbers = decode(builder, code, words, 2 * size)
        return numbers[::2], numbers[1::2]
    places = (builder.add(address, I32(2 * TILE * step + TILE * half)) for half in range(2))
    return [decode(builder, code, load_words(builder, SHARED, at, 2 * size), size) for at in places]


@intrinsic
def add_token(typingctx, sums, code, head_dim, across, values, weights):
    """sums + the values of a token, times its weights: a weight of 0 times anything is nothing.

    `values` (uint32) is the lane's place in the token's row. Sums and weights are of the lane's rows: ``across``, C
    fragments with numbers as rows, and weights [tile of 8 queries, half, 2] of which the first halves count; else C
    fragments with queries as rows, and two weights.
    """
    code_, head_dim_, across_ = literal(code), literal(head_dim), literal(across)
    if None in (code_, head_dim_, across_):
        return None
    num_tiles = weights.count // 4

    def places(step, half):
        """(place among the sums, number, weight)."""
        if across_:
            for tile in range(num_tiles):
                for column in range(2):
                    yield 4 * (step * num_tiles + tile) + 2 * half + column, 0, 4 * tile + column
        else:
            for row in range(2):
                for column in range(2):
                    yield 8 * step + 4 * half + 2 * row + column, column, row

    def codegen(context, builder, sig, args):
        totals, w = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 5))
        counts = [builder.fcmp_unordered("!=", x, ir.Constant(F32, 0.0)) for x in w]
        for step in range(head_dim_ // TILE):
            for half, numbers in enumerate(_lane_values(builder, code_, args[4], step, across_)):
                for at, number, i in places(step, half):
                    total = call_llvm(builder, "llvm.fma.f32", F32, [w[i], numbers[number], totals[at]])
                    totals[at] = builder.select(counts[i], total, totals[at])
        return cgutils.pack_array(builder, totals)

    return sums(sums, code, head_dim, across, u32, weights), codegen


def make_add_visible_columns(code, head_dim, pitch):
    """``add_visible(sums, tile, weights, lane)``: as `add_values_by_weights`, guarded.

    `tile` is where its first row begins, `weights` is of `fold`.
    """

    @cuda.jit(device=True)
    def add_visible(sums, tile, weights, lane):
        values = U32(tile + lane // U32(4) * U32(2))
        token = U32(0)
        while token < U32(TILE):
            now = each(number_from, weights, U32(token % U32(8) * U32(4) + lane % U32(4)))
            sums = add_token(sums, code, head_dim, True, values, now)
            values = U32(values + U32(pitch))
            token = U32(token + U32(1))
            if token == U32(8):
                weights = weights[2:] + weights[:2]  # those of the other half come first
        return sums

    return add_visible


def make_add_visible_rows(code, head_dim, pitch, tokens):
    """``add_visible(sums, tile, weights, lane)``: as `add_weights_by_values`, guarded.

    `tile` is where its first row begins, `weights` is of `pack_rows`.
    """
    operand = operand_code(code)

    @cuda.jit(device=True)
    def add_visible(sums, tile, weights, lane):
        values = U32(tile + lane % U32(4) * U32(4))
        pair = U32(0)
        while pair < U32(tokens // 2):
            source = U32(lane - lane % U32(4) + pair % U32(4))
            first = two_numbers(operand, shuffle_from(weights[0], source))
            other = two_numbers(operand, shuffle_from(weights[1], source))
            sums = add_token(sums, code, head_dim, False, values, (first[0], other[0]))
            values = U32(values + U32(pitch))
            sums = add_token(sums, code, head_dim, False, values, (first[1], other[1]))
            values = U32(values + U32(pitch))
            pair = U32(pair + U32(1))
            if pair % U32(4) == U32(0):
                weights = weights[2:] + weights[:2]  # those of the next 8 tokens come first
        return sums

    return add_visible
