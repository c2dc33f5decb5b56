"""The three steps of attention over one tile of keys, as vector code: dot, soften, weigh.

A tile is TILE consecutive keys of a sequence; the addresses of their rows stand in a table, so that a step knows
nothing of blocks. Up to four query rows share each number that is read (register tiles of rows x keys, and of rows x
columns). While a tile is read, the rows that come next are fetched into the second cache, in the order of reading:
that doubles what shuffled blocks of a few KiB give.

    scores [4, TILE]   the tile's scores, then its weights
    state  [3, 4]      the running maxima, the sums, and what the last tile's maximum rescaled out by
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..softmax import NEG_INF
from .lanes import FLOAT, I1, I16, I64, ITEM_BYTES, LINE, Lanes, span_size

TILE = 32
"""Keys per step of the online softmax."""

ROWS = 4
"""Query rows that share what is read."""

ROW_COUNTS = (1, 2, ROWS)
"""The register tiles that there are: three rows take the one of four."""

VOID = ir.VoidType()

_FLOAT_BYTES = 4
_VECTOR_BYTES = 4  # a lane of float32, or of two bfloat16
_ADDRESS_BYTES = 8
_ROW_BYTES = TILE * _FLOAT_BYTES

MAXIMA, SUMS, FACTORS = (ROWS * _FLOAT_BYTES * i for i in range(3))


def _registers(lanes):
    """Vectors that accumulate: half of the registers there are."""
    return 8 if lanes.width == 8 else 16


def _by_rows(builder, width, rows, name, arguments, emit):
    """Call the function ``emit(lanes, count, *arguments)`` writes for 1, 2 or ROWS rows; its result if it has one.

    Functions of their own, since the compiler's effort grows faster than a function does.
    """
    after = builder.append_basic_block("after")
    blocks = {count: builder.append_basic_block(f"rows{count}") for count in ROW_COUNTS}
    choice = builder.switch(rows, blocks[ROWS])
    results = []
    for count, block in blocks.items():
        if count < ROWS:
            choice.add_case(ir.Constant(I64, count), block)
        builder.position_at_end(block)
        function = _function(builder.module, width, count, f"{name}_{count}", arguments, emit)
        results.append(builder.call(function, arguments))
        builder.branch(after)
    builder.position_at_end(after)
    if results[0].type == VOID:
        return None
    result = builder.phi(results[0].type)
    for value, block in zip(results, blocks.values(), strict=True):
        result.add_incoming(value, block)
    return result


def _function(module, width, count, name, arguments, emit):
    """The function of that name in a module, written when it is not there yet."""
    if name in module.globals:
        return module.globals[name]
    kind = I1 if emit is _emit_soften else VOID
    function = ir.Function(module, ir.FunctionType(kind, [argument.type for argument in arguments]), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    result = emit(Lanes(builder, width), count, *function.args)
    builder.ret_void() if result is None else builder.ret(result)
    return function


def _literal(kind):
    return kind.literal_value


def _int64s(count):
    return [types.int64] * count


@intrinsic(prefer_literal=True)
def dot_tile(typingctx, kind, width, is_dot, rows, q, keys, offset, next_keys, next_offset, num_keys, head_dim, scores):
    """scores[row, key] = q[row] . keys[key] for a tile.

    Parameters
    ----------
    kind, width, is_dot : int, constant
        Format of the keys, lanes of a vector, whether to use the bfloat16 dot.
    rows : int64
        Query rows, one of ROW_COUNTS.
    q : int64
        Address of the rows as `pack_rows` leaves them.
    keys, offset, next_keys, next_offset : int64
        Address of the table of the tile's TILE rows, and what to add to each; the same for the rows to fetch.
    num_keys, head_dim : int64
        Keys in the tile, numbers of a row.
    scores : int64
        Address of the scores; rows past `num_keys` up to the next register tile repeat the last key.
    """
    kind_, width_, dot_ = _literal(kind), _literal(width), bool(_literal(is_dot))

    def generate(context, builder, signature, arguments):
        _by_rows(builder, width_, arguments[3], "dot_tile", arguments[4:], partial(_emit_dot, kind_, dot_))
        return context.get_dummy_value()

    return types.void(kind, width, is_dot, *_int64s(9)), generate


def _emit_dot(kind, is_dot, lanes, rows, q, keys, offset, next_keys, next_offset, num_keys, head_dim, scores):
    builder = lanes.builder
    whole, single = _readers(lanes, kind, is_dot)
    keys_per_step = min(8, 1 << ((_registers(lanes) // rows).bit_length() - 1))
    spans = builder.sdiv(head_dim, lanes.index(whole.numbers))
    lines = builder.sdiv(spans, lanes.index(whole.per_line))
    done = builder.mul(spans, lanes.index(whole.numbers // single.numbers))
    singles = builder.sub(builder.sdiv(head_dim, lanes.index(single.numbers)), done)
    rest = builder.srem(head_dim, lanes.index(single.numbers))

    def multiply(totals, addresses, reader, step, mask=None):
        """Add the products of a part of each key with that of each row."""
        totals = list(totals)
        spans = [reader.read(lanes.add(address, lanes.times(step, reader.bytes)), mask) for address in addresses]
        place = lanes.add(q, lanes.times(step, rows * reader.query_bytes))
        for pieces in zip(*spans, strict=True):
            for key, piece in enumerate(pieces):
                parts = piece()
                for row in range(rows):
                    at = row * keys_per_step + key
                    for i, part in enumerate(parts):
                        query = lanes.load(lanes.add(place, (i * rows + row) * _VECTOR_BYTES * lanes.width), part.type)
                        totals[at] = reader.multiply(totals[at], query, part)
            place = lanes.add(place, len(parts) * rows * _VECTOR_BYTES * lanes.width)
        return totals

    def step_of_keys(i, _):
        first = lanes.times(i, keys_per_step * _ADDRESS_BYTES)
        addresses = [builder.add(lanes.load(lanes.add(keys, first, key * _ADDRESS_BYTES), I64), offset)
                     for key in range(keys_per_step)]
        fetched = [builder.add(lanes.load(lanes.add(next_keys, first, key * _ADDRESS_BYTES), I64), next_offset)
                   for key in range(keys_per_step)]

        def line(n, totals):
            for address in fetched:
                lanes.prefetch(lanes.add(address, lanes.times(n, LINE)))
            for part in range(whole.per_line):
                totals = multiply(totals, addresses, whole, lanes.add(lanes.times(n, whole.per_line), part))
            return totals

        totals = lanes.loop(lines, [lanes.constant(0.0)] * (rows * keys_per_step), line)
        if whole.per_line > 1:
            after = lanes.times(lines, whole.per_line)
            totals = lanes.loop(builder.sub(spans, after), totals,
                                lambda n, totals: multiply(totals, addresses, whole, builder.add(after, n)))
        if whole is not single:
            totals = lanes.loop(singles, totals,
                                lambda n, totals: multiply(totals, addresses, single, builder.add(done, n)))
        if lanes.width == 16:  # with masks any head_dim can be read
            mask = lanes.mask(rest, single.numbers)
            totals = lanes.when(builder.icmp_signed("!=", rest, lanes.index(0)), totals, lambda totals: multiply(
                totals, addresses, single, builder.add(done, singles), mask))
        _store_sums(lanes, totals, rows, keys_per_step, lanes.add(scores, lanes.times(i, keys_per_step * _FLOAT_BYTES)))
        return []

    count = builder.sdiv(lanes.add(num_keys, keys_per_step - 1), lanes.index(keys_per_step))
    lanes.loop(count, [], step_of_keys)


class _Reader(NamedTuple):
    """How a part of a key is read and multiplied with a part of a query row."""

    numbers: int
    bytes: int
    query_bytes: int
    read: Callable
    multiply: Callable

    @property
    def per_line(self):
        return max(1, LINE // self.bytes)


def _readers(lanes, kind, is_dot):
    """The reader of a span, and that of a single vector."""
    if is_dot:
        reader = _Reader(
            2 * lanes.width, 4 * lanes.width, 4 * lanes.width,
            lambda address, mask: [lambda: [_load_pairs(lanes, address, mask)]], lanes.bfloat16_dot)
        return reader, reader

    def multiply(total, query, part):
        return lanes.fma(query, part, total)

    size, item = span_size(kind, lanes.width), ITEM_BYTES[kind]
    single = _Reader(lanes.width, lanes.width * item, _VECTOR_BYTES * lanes.width,
                     lambda address, mask: [lambda: [lanes.read(address, kind, mask)]], multiply)
    if size == 1:
        return single, single
    return _Reader(size * lanes.width, size * lanes.width * item, size * _VECTOR_BYTES * lanes.width,
                   lambda address, mask: lanes.read_span(address, kind), multiply), single


def _load_pairs(lanes, address, mask):
    bits = ir.VectorType(I16, 2 * lanes.width)
    return lanes.load(address, bits) if mask is None else lanes.load_some(address, bits, mask)


def _store_sums(lanes, totals, rows, keys, scores):
    """Sum up the lanes of each total, and store them as scores [rows, keys]."""
    sums = lanes.reduce(totals, lanes.builder.fadd)
    count = sums[0].type.count
    piece = min(keys, count)
    for at in range(0, rows * keys, piece):
        row, key = divmod(at, keys)
        vector = sums[at // count]
        part = lanes.shuffle(vector, vector, range(at % count, at % count + piece))
        lanes.store(part, lanes.add(scores, row * _ROW_BYTES + key * _FLOAT_BYTES))


@intrinsic(prefer_literal=True)
def soften_tile(typingctx, width, rows, scores, state, factor):
    """One step of the online softmax: scores become weights, the state moves on; whether any row must be rescaled.

    Hidden keys have the score -inf; all TILE scores of a row count.

    Parameters
    ----------
    width : int, constant
        Lanes of a vector.
    rows : int64
        Query rows, one of ROW_COUNTS.
    scores, state : int64
        Addresses.
    factor : float32
        What the scores still lack.

    Returns
    -------
    bool
    """
    width_ = _literal(width)

    def generate(context, builder, signature, arguments):
        return _by_rows(builder, width_, arguments[1], "soften_tile", arguments[2:], _emit_soften)

    return types.boolean(width, *_int64s(3), types.float32), generate


def _emit_soften(lanes, rows, scores, state, factor):
    builder, lacking = lanes.builder, lanes.splat(factor)
    four = ir.VectorType(FLOAT, ROWS)
    places = [[lanes.add(scores, row * _ROW_BYTES + first * _FLOAT_BYTES) for first in range(0, TILE, lanes.width)]
              for row in range(rows)]
    vectors = [[builder.fmul(lanes.load(place), lacking) for place in row] for row in places]
    tops = []
    for row in vectors:
        top = row[0]
        for vector in row[1:]:
            top = lanes.maximum(top, vector)
        tops.append(top)
    old = lanes.load(lanes.add(state, MAXIMA), four)
    new = lanes.maximum(old, _first_four(lanes, lanes.reduce(tops, lanes.maximum)))
    nothing = builder.fcmp_ordered("==", new, lanes.constant(float(NEG_INF), four))
    base = builder.select(nothing, lanes.constant(0.0, four), new)  # softmax.anchor, on vectors
    factor = lanes.exp2(builder.fsub(old, base))
    sums = []
    for row in range(rows):
        top, total = lanes.splat(builder.extract_element(base, ir.IntType(32)(row))), None
        for place, vector in zip(places[row], vectors[row], strict=True):
            weight = lanes.exp2(builder.fsub(vector, top))
            lanes.store(weight, place)
            total = weight if total is None else builder.fadd(total, weight)
        sums.append(total)
    total = lanes.fma(lanes.load(lanes.add(state, SUMS), four), factor, _first_four(lanes, lanes.reduce(sums, builder.fadd)))
    for value, offset in ((new, MAXIMA), (total, SUMS), (factor, FACTORS)):
        lanes.store(value, lanes.add(state, offset))
    differs = builder.fcmp_unordered("!=", factor, lanes.constant(1.0, four))
    return builder.icmp_unsigned("!=", builder.bitcast(differs, ir.IntType(ROWS)), ir.IntType(ROWS)(0))


def _first_four(lanes, vectors):
    vector = vectors[0]
    return vector if vector.type.count == ROWS else lanes.shuffle(vector, vector, range(ROWS))


@intrinsic(prefer_literal=True)
def weigh_tile(typingctx, kind, width, rows, scores, values, offset, next_values, next_offset, num_keys, head_dim,
               state, changed, out, out_stride):
    """out[row] = out[row] · factor[row] + weights[row] . values for a tile.

    Parameters
    ----------
    kind, width : int, constant
        Format of the values, lanes of a vector.
    rows : int64
        Query rows, one of ROW_COUNTS.
    scores : int64
        Address of the weights.
    values, offset, next_values, next_offset, num_keys, head_dim : int64
        As for `dot_tile`; exactly `num_keys` rows are read.
    state : int64
        Address of the state, which has the factors.
    changed : bool
        Whether any factor is not 1.
    out, out_stride : int64
        Address of the rows [rows, head_dim rounded up to whole vectors] of float32, and bytes from row to row.
    """
    kind_, width_ = _literal(kind), _literal(width)

    def generate(context, builder, signature, arguments):
        _by_rows(builder, width_, arguments[2], "weigh_tile", arguments[3:], partial(_emit_weigh, kind_))
        return context.get_dummy_value()

    return types.void(kind, width, *_int64s(9), types.boolean, *_int64s(2)), generate


def _emit_weigh(kind, lanes, rows, scores, values, offset, next_values, next_offset, num_keys, head_dim, state, changed,
                out, out_stride):
    builder, item, width = lanes.builder, ITEM_BYTES[kind], lanes.width
    size = span_size(kind, width)
    vectors = builder.sdiv(head_dim, lanes.index(width))

    def read(address, count, mask):
        if count % size:
            return [lanes.read(address, kind, mask)]
        return [part for first in range(0, count, size)
                for piece in lanes.read_span(lanes.add(address, first * width * item), kind) for part in piece()]

    def columns(first, count, mask=None):
        """Weigh `count` vectors of each value, from vector `first` on, for all rows."""
        places = [[lanes.add(out, lanes.times(out_stride, row), lanes.times(first, width * _FLOAT_BYTES),
                             column * width * _FLOAT_BYTES) for column in range(count)] for row in range(rows)]
        totals = lanes.when(changed, [lanes.load(place) for row in places for place in row],
                            lambda totals: _rescale(lanes, totals, count, state))
        start = builder.add(offset, lanes.times(first, width * item))
        next_start = builder.add(next_offset, lanes.times(first, width * item))

        def key(j, totals):
            at = lanes.times(j, _ADDRESS_BYTES)
            parts = read(builder.add(lanes.load(lanes.add(values, at), I64), start), count, mask)
            if mask is None:
                fetched = builder.add(lanes.load(lanes.add(next_values, at), I64), next_start)
                for line in range(0, count * width * item, LINE):
                    lanes.prefetch(lanes.add(fetched, line))
            totals = list(totals)
            for row in range(rows):
                weight = lanes.load(lanes.add(scores, lanes.times(j, _FLOAT_BYTES), row * _ROW_BYTES), FLOAT)
                weight = lanes.splat(weight)
                for column, part in enumerate(parts):
                    totals[row * count + column] = lanes.fma(weight, part, totals[row * count + column])
            return totals

        totals = lanes.loop(num_keys, totals, key)
        for total, place in zip(totals, (place for row in places for place in row), strict=True):
            lanes.store(total, place)
        return []

    panel = min(8, 1 << ((_registers(lanes) // rows).bit_length() - 1))
    in_spans = lanes.times(builder.sdiv(vectors, lanes.index(size)), size)
    done = lanes.index(0)
    for count in sorted({panel, size, 1}, reverse=True):
        limit = in_spans if count > 1 else vectors
        times = builder.sdiv(builder.sub(limit, done), lanes.index(count))
        lanes.loop(times, [], lambda i, _, count=count, done=done: columns(
            builder.add(done, lanes.times(i, count)), count))
        done = builder.add(done, lanes.times(times, count))
    if width == 16:
        rest = builder.srem(head_dim, lanes.index(width))
        lanes.when(builder.icmp_signed("!=", rest, lanes.index(0)), [], lambda _: columns(vectors, 1, lanes.mask(rest)))


def _rescale(lanes, totals, count, state):
    factors = [lanes.splat(lanes.load(lanes.add(state, FACTORS + row * _FLOAT_BYTES), FLOAT))
               for row in range(len(totals) // count)]
    return [lanes.builder.fmul(total, factors[i // count]) for i, total in enumerate(totals)]
