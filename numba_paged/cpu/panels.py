"""The steps of attention for many query rows, as vector code: a register-tiled product, and a softmax down columns.

Here the lanes of a vector are query rows: scores stand transposed, [keys, rows], so that neither the keys are
transposed nor sums taken across lanes.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..softmax import NEG_INF
from .lanes import FLOAT, I1, I16, I32, I64, ITEM_BYTES, Lanes
from .rows import for_parts

_ROWS = 4
"""Rows of a register tile."""

_FLOAT_BYTES = 4
_ADDRESS_BYTES = 8


def panel_vectors(width):
    """Vectors across a register tile: with _ROWS rows they fill half of the registers."""
    return 2 if width == 8 else 4


@intrinsic(prefer_literal=True)
def multiply_panels(typingctx, width, is_dot, rows, step, columns, stride, depth, out, out_stride, num_rows, num_columns,
                    adds):
    """out = a @ b, or out += a @ b, in register tiles of _ROWS rows and a few vectors of columns.

    Parameters
    ----------
    width, is_dot : int, constant
        Lanes of a vector; whether the numbers of a and b are pairs of bfloat16.
    rows, step : int64
        Address of the table of a's row addresses (a multiple of _ROWS of them), bytes between the numbers of a row.
    columns, stride : int64
        Address of b, bytes between its rows.
    depth : int64
        Numbers in a row of a, rows of b.
    out, out_stride : int64
        Address of the float32 result, bytes between its rows.
    num_rows, num_columns : int64
        Of the result; rows are rounded up to _ROWS, columns are a multiple of `width`.
    adds : bool
        Whether the result is added to what is there.
    """
    width_, dot_ = width.literal_value, bool(is_dot.literal_value)

    def generate(context, builder, signature, arguments):
        _emit_multiply(Lanes(builder, width_), dot_, *arguments[2:])
        return context.get_dummy_value()

    return types.void(width, is_dot, *[types.int64] * 9, types.boolean), generate


def _emit_multiply(lanes, is_dot, rows, step, columns, stride, depth, out, out_stride, num_rows, num_columns, adds):
    builder, width = lanes.builder, lanes.width
    vector_bytes = width * _FLOAT_BYTES
    kind = ir.VectorType(I16, 2 * width) if is_dot else lanes.floats

    def tile(i, column, count):
        """One register tile: rows from i on, `count` vectors from byte `column` on."""
        table = lanes.add(rows, lanes.times(i, _ROWS * _ADDRESS_BYTES))
        sources = [lanes.load(lanes.add(table, row * _ADDRESS_BYTES), I64) for row in range(_ROWS)]
        start = lanes.add(out, builder.mul(lanes.times(i, _ROWS), out_stride), column)
        places = [lanes.add(start, lanes.times(out_stride, row), vector * vector_bytes)
                  for row in range(_ROWS) for vector in range(count)]

        def add_products(k, totals):
            row_of_b = lanes.add(columns, builder.mul(k, stride), column)
            vectors = [lanes.load(lanes.add(row_of_b, vector * vector_bytes), kind) for vector in range(count)]
            at, totals = builder.mul(k, step), list(totals)
            for row, source in enumerate(sources):
                number = lanes.load(lanes.add(source, at), I32 if is_dot else FLOAT)
                number = builder.bitcast(lanes.splat(number), kind)
                for vector, part in enumerate(vectors):
                    which = row * count + vector
                    totals[which] = (lanes.bfloat16_dot if is_dot else _fma(lanes))(totals[which], number, part)
            return totals

        zeros = [lanes.constant(0.0)] * len(places)
        totals = lanes.when(adds, zeros, lambda _: [lanes.load(place) for place in places])
        for total, place in zip(lanes.loop(depth, totals, add_products), places, strict=True):
            lanes.store(total, place)
        return []

    blocks = builder.sdiv(lanes.add(num_rows, _ROWS - 1), lanes.index(_ROWS))
    wide = panel_vectors(width)
    panels = builder.sdiv(num_columns, lanes.index(wide * width))
    rest = builder.sdiv(builder.sub(num_columns, lanes.times(panels, wide * width)), lanes.index(width))
    after = lanes.times(panels, wide * vector_bytes)
    lanes.loop(panels, [], lambda j, _: lanes.loop(
        blocks, [], lambda i, _: tile(i, lanes.times(j, wide * vector_bytes), wide)))
    lanes.loop(rest, [], lambda j, _: lanes.loop(
        blocks, [], lambda i, _: tile(i, lanes.add(after, lanes.times(j, vector_bytes)), 1)))


def _fma(lanes):
    return lambda total, a, b: lanes.fma(a, b, total)


@intrinsic(prefer_literal=True)
def soften_panel(typingctx, width, scores, num_keys, num_rows, maxima, totals, factors):
    """One step of the online softmax down the columns of [keys, rows]; whether any row must be rescaled.

    Parameters
    ----------
    width : int, constant
        Lanes of a vector.
    scores : int64
        Address of the scores, hidden ones -inf; they become weights.
    num_keys, num_rows : int64
        Rows of `scores`, and its columns, a multiple of `width`.
    maxima, totals, factors : int64
        Addresses of the running maxima and sums, and of what to rescale by, [num_rows] of float32.

    Returns
    -------
    bool
    """
    width_ = width.literal_value

    def generate(context, builder, signature, arguments):
        lanes = Lanes(builder, width_)
        scores, num_keys, num_rows, maxima, totals, factors = arguments[1:]
        stride = lanes.times(num_rows, _FLOAT_BYTES)

        def columns(i, carried):
            at = lanes.times(i, width_ * _FLOAT_BYTES)

            def place(key):
                return lanes.add(scores, at, builder.mul(key, stride))

            old = lanes.load(lanes.add(maxima, at))
            new, = lanes.loop(num_keys, [old], lambda key, top: [lanes.maximum(top[0], lanes.load(place(key)))])
            nothing = builder.fcmp_ordered("==", new, lanes.constant(float(NEG_INF)))
            base = builder.select(nothing, lanes.constant(0.0), new)  # softmax.anchor, on vectors
            factor = lanes.exp2(builder.fsub(old, base))

            def weigh(key, total):
                weight = lanes.exp2(builder.fsub(lanes.load(place(key)), base))
                lanes.store(weight, place(key))
                return [builder.fadd(total[0], weight)]

            total, = lanes.loop(num_keys, [lanes.constant(0.0)], weigh)
            total = lanes.fma(lanes.load(lanes.add(totals, at)), factor, total)
            for value, target in ((new, maxima), (total, totals), (factor, factors)):
                lanes.store(value, lanes.add(target, at))
            differs = builder.fcmp_unordered("!=", factor, lanes.constant(1.0))
            any_differs = builder.icmp_unsigned("!=", builder.bitcast(differs, ir.IntType(width_)), ir.IntType(width_)(0))
            return [builder.or_(carried[0], any_differs)]

        return lanes.loop(builder.sdiv(num_rows, lanes.index(width_)), [I1(0)], columns)[0]

    return types.boolean(width, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def widen_row(typingctx, width, kind, source, target, head_dim):
    """A row of a format as float32, zeros up to the next whole vector.

    Parameters
    ----------
    width, kind : int, constant
        Lanes of a vector, format of the row.
    source, target : int64
        Addresses.
    head_dim : int64
        Numbers of the row.
    """
    width_, kind_ = width.literal_value, kind.literal_value

    def generate(context, builder, signature, arguments):
        lanes = Lanes(builder, width_)
        _emit_widen(lanes, kind_, *arguments[2:])
        return context.get_dummy_value()

    return types.void(width, kind, *[types.int64] * 3), generate


def _emit_widen(lanes, kind, source, target, head_dim):
    def body(vector, _, mask):
        part = lanes.read(lanes.add(source, lanes.times(vector, lanes.width * ITEM_BYTES[kind])), kind, mask)
        lanes.store(part, lanes.add(target, lanes.times(vector, lanes.width * _FLOAT_BYTES)))

    for_parts(lanes, head_dim, 1, body)
