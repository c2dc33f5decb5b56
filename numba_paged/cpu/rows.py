"""Query rows into registers' order, finished rows out: what surrounds the tiles of the vector kernels."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .conversion import BFLOAT16, FLOAT16, FLOAT32
from .lanes import FLOAT, HALF, I16, ITEM_BYTES, Lanes, span_order, span_size


def for_parts(lanes, head_dim, span, body):
    """``body(vector, count, mask)`` for each span of a row, each whole vector left, and the part of one."""
    builder, width = lanes.builder, lanes.width
    spans = builder.sdiv(head_dim, lanes.index(span * width))
    done = lanes.times(spans, span)
    vectors = builder.sdiv(head_dim, lanes.index(width))

    def run(vector, count, mask=None):
        body(vector, count, mask)
        return []

    lanes.loop(spans, [], lambda i, _: run(lanes.times(i, span), span))
    if span > 1:
        lanes.loop(builder.sub(vectors, done), [], lambda i, _: run(builder.add(done, i), 1))
    if width == 16:
        rest = builder.srem(head_dim, lanes.index(width))
        lanes.when(builder.icmp_signed("!=", rest, lanes.index(0)), [], lambda _: run(vectors, 1, lanes.mask(rest)))


def _by_kind(lanes, kind, emit):
    """Code for each format of queries, and the choice between them."""
    builder = lanes.builder
    after = builder.append_basic_block("after")
    choice = builder.switch(kind, after)
    for number in (FLOAT32, FLOAT16, BFLOAT16):
        block = builder.append_basic_block(f"kind{number}")
        choice.add_case(lanes.index(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic(prefer_literal=True)
def pack_row(typingctx, width, pool_kind, is_dot, kind, source, target, row, rows, head_dim):
    """Put a query row where `tiles.dot_tile` reads it: vector by vector, beside those of the rows that share a tile.

    Parameters
    ----------
    width, pool_kind, is_dot : int, constant
        Lanes of a vector, format of the keys, whether pairs of bfloat16 are kept for the bfloat16 dot.
    kind : int64
        Format of the row.
    source, target : int64
        Addresses of the row and of the tile's rows.
    row, rows : int64
        Which of how many.
    head_dim : int64
        Numbers of the row.
    """
    width_, pool, dot_ = width.literal_value, pool_kind.literal_value, bool(is_dot.literal_value)

    def generate(context, builder, signature, arguments):
        lanes = Lanes(builder, width_)
        kind, source, target, row, rows, head_dim = arguments[3:]
        span, order = span_size(pool, width_), span_order(pool, width_)

        def store(vector, part):
            place = builder.add(builder.mul(vector, rows), row)
            lanes.store(part, lanes.add(target, lanes.times(place, 4 * width_)))

        def copy_pairs(vector, count, mask):
            address, bits = lanes.add(source, lanes.times(vector, 4 * width_)), ir.VectorType(I16, 2 * width_)
            store(vector, lanes.load(address, bits) if mask is None else lanes.load_some(address, bits, mask))

        def widen(number):
            item = ITEM_BYTES[number] * width_

            def body(vector, count, mask):
                address = lanes.add(source, lanes.times(vector, item))
                parts = [lanes.read(lanes.add(address, i * item), number, mask) for i in range(count)]
                if count > 1:
                    whole = lanes.concatenate(parts)
                    parts = [lanes.shuffle(whole, whole, order[i * width_:(i + 1) * width_]) for i in range(count)]
                for i, part in enumerate(parts):
                    store(lanes.add(vector, i), part)

            for_parts(lanes, head_dim, span, body)

        if dot_:
            _for_pairs(lanes, head_dim, copy_pairs)
        else:
            _by_kind(lanes, kind, widen)
        return context.get_dummy_value()

    return types.void(width, pool_kind, is_dot, *[types.int64] * 6), generate


def _for_pairs(lanes, head_dim, body):
    """``body(vector, 1, mask)`` for each vector of pairs of bfloat16."""
    builder, numbers = lanes.builder, 2 * lanes.width
    vectors, rest = builder.sdiv(head_dim, lanes.index(numbers)), builder.srem(head_dim, lanes.index(numbers))

    def run(vector, mask=None):
        body(vector, 1, mask)
        return []

    lanes.loop(vectors, [], lambda i, _: run(i))
    lanes.when(builder.icmp_signed("!=", rest, lanes.index(0)), [], lambda _: run(vectors, lanes.mask(rest, numbers)))


@intrinsic(prefer_literal=True)
def write_row(typingctx, width, pool_kind, kind, source, target, factor, head_dim):
    """Multiply a row of float32 and round it once to the format of the queries; factor 0 writes zeros over NaN too.

    Parameters
    ----------
    width, pool_kind : int, constant
        Lanes of a vector, format of the values, whose order the row has.
    kind : int64
        Format to write.
    source, target : int64
        Addresses.
    factor : float32
        What the row is multiplied with.
    head_dim : int64
        Numbers of the row.
    """
    width_, pool = width.literal_value, pool_kind.literal_value

    def generate(context, builder, signature, arguments):
        lanes = Lanes(builder, width_)
        kind, source, target, factor, head_dim = arguments[2:]
        span, order = span_size(pool, width_), span_order(pool, width_)
        factors = lanes.splat(factor)
        nothing = builder.fcmp_ordered("==", factor, ir.Constant(FLOAT, 0.0))

        def write(number):
            item = ITEM_BYTES[number] * width_

            def body(vector, count, mask):
                address = lanes.add(source, lanes.times(vector, 4 * width_))
                parts = [builder.fmul(lanes.load(lanes.add(address, 4 * width_ * i)), factors) for i in range(count)]
                if count > 1:
                    whole = lanes.concatenate(parts)
                    places = [order.index(i) for i in range(count * width_)]
                    parts = [lanes.shuffle(whole, whole, places[i * width_:(i + 1) * width_]) for i in range(count)]
                for i, part in enumerate(parts):
                    part = _narrow(lanes, builder.select(nothing, lanes.constant(0.0), part), number)
                    place = lanes.add(target, lanes.times(vector, item), i * item)
                    if mask is None:
                        lanes.store(part, place)
                    else:
                        lanes.store_some(part, place, mask)

            for_parts(lanes, head_dim, span, body)

        _by_kind(lanes, kind, write)
        return context.get_dummy_value()

    return types.void(width, pool_kind, *[types.int64] * 3, types.float32, types.int64), generate


def _narrow(lanes, vector, kind):
    """A vector of floats rounded to a format of queries, to the nearest, ties to even."""
    builder = lanes.builder
    if kind == FLOAT32:
        return vector
    if kind == FLOAT16:
        return builder.fptrunc(vector, ir.VectorType(HALF, lanes.width))
    ints, narrow = lanes.ints, ir.VectorType(I16, lanes.width)
    bits = builder.bitcast(vector, ints)
    upper = builder.lshr(bits, lanes.constant(16, ints))
    odd = builder.and_(upper, lanes.constant(1, ints))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, lanes.constant(0x7FFF, ints))), lanes.constant(16, ints))
    quiet = builder.or_(upper, lanes.constant(0x40, ints))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(is_nan, quiet, rounded), narrow)
