"""Vector code: what a kernel's intrinsics are written with where Numba's own vectoriser falls short.

A `Lanes` wraps an LLVM builder with float32 vectors of the machine's width. Addresses are int64.
"""

import ml_dtypes
import numpy as np
from llvmlite import ir

from .conversion import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8
from .elementary import emit_exp2
from .machine import HAS_BYTE_TABLES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()

ITEM_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT8_E4M3: 1, FLOAT8_E5M2: 1, INT8: 1}

_NAMES = {FLOAT: "f32", HALF: "f16"}

LINE = 64
"""Bytes of a cache line."""

_TO_L2 = 2
"""The locality of a prefetch that pays: nearer, and the few line buffers of the first cache are full; measured."""


class Lanes:
    """Emits vector code of a width.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where code goes.
    width : int
        float32 numbers per vector.
    """

    def __init__(self, builder, width):
        self.builder, self.width = builder, width
        self.floats = ir.VectorType(FLOAT, width)
        self.ints = ir.VectorType(I32, width)

    # ---------------------------------------------------------------- constants, memory

    def index(self, number):
        """An int64 constant."""
        return ir.Constant(I64, number)

    def constant(self, number, kind=None):
        """A vector of one constant."""
        kind = kind or self.floats
        return ir.Constant(kind, [number] * kind.count)

    def add(self, address, *offsets):
        """An address, or an offset, further on; offsets are numbers or int64 values."""
        for offset in offsets:
            if not isinstance(offset, int):
                address = self.builder.add(address, offset)
            elif offset:
                address = self.builder.add(address, self.index(offset))
        return address

    def times(self, value, number):
        """An int64 value times a constant."""
        return self.builder.mul(value, self.index(number))

    def pointer(self, address, kind):
        """An address as a pointer."""
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address, kind=None):
        """A value of a kind (a vector of floats if not given) at an address that need not be aligned."""
        kind = kind or self.floats
        return self.builder.load(self.pointer(address, kind), align=1, typ=kind)

    def store(self, value, address):
        """Write a value at an address that need not be aligned."""
        self.builder.store(value, self.pointer(address, value.type), align=1)

    def mask(self, count, width=None):
        """The first `count` lanes."""
        width = width or self.width
        kind = ir.VectorType(I64, width)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(width))), self.splat(count, width))

    def load_some(self, address, kind, mask):
        """As `load`, touching only the memory of the masked lanes; the others are 0."""
        name = f"llvm.masked.load.v{kind.count}{_NAMES.get(kind.element, kind.element)}.p0"
        pointer = self.pointer(address, kind)
        function = self._function(name, kind, [pointer.type, I32, mask.type, kind])
        return self.builder.call(function, [pointer, ir.Constant(I32, 1), mask, ir.Constant(kind, None)])

    def prefetch(self, address):
        """Fetch the line of an address into the second cache."""
        pointer = self.pointer(address, I8)
        function = self._function("llvm.prefetch.p0", ir.VoidType(), [pointer.type, I32, I32, I32])
        self.builder.call(function, [pointer, I32(0), I32(_TO_L2), I32(1)])

    # ---------------------------------------------------------------- arithmetic

    def _function(self, name, result, arguments):
        function = self.builder.module.globals.get(name)
        return function or ir.Function(self.builder.module, ir.FunctionType(result, arguments), name)

    def _vector_function(self, name, *arguments):
        kind = arguments[0].type
        full = f"llvm.{name}.v{kind.count}f32"
        return self.builder.call(self._function(full, kind, [kind] * len(arguments)), arguments)

    def fma(self, a, b, c):
        """a · b + c."""
        return self._vector_function("fma", a, b, c)

    def maximum(self, a, b):
        """The larger of each lane; a number where one is NaN."""
        return self._vector_function("maxnum", a, b)

    def bfloat16_dot(self, total, a, b):
        """total + the sums of the products of neighbouring pairs of bfloat16; a, b hold 2 · width of them as int16."""
        kind = ir.VectorType(I16, 2 * self.width)
        pairs = BFloat16Pairs(2 * self.width)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = self._function(name, self.floats, [self.floats, pairs, pairs])
        return self.builder.call(function, [total, *(self.builder.bitcast(x, pairs) for x in (a, b))])

    def store_some(self, value, address, mask):
        """As `store`, touching only the memory of the masked lanes."""
        pointer = self.pointer(address, value.type)
        name = f"llvm.masked.store.v{value.type.count}{_NAMES.get(value.type.element, value.type.element)}.p0"
        function = self._function(name, ir.VoidType(), [value.type, pointer.type, I32, mask.type])
        self.builder.call(function, [value, pointer, ir.Constant(I32, 1), mask])

    def splat(self, scalar, width=None):
        """A vector of one value."""
        kind = ir.VectorType(scalar.type, width or self.width)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.shuffle(first, first, [0] * kind.count)

    def shuffle(self, a, b, lanes):
        """A vector of the lanes of a, then b, that are listed."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def exp2(self, x):
        """2**x for x <= 0."""
        return emit_exp2(self.builder, x)

    def reduce(self, vectors, combine):
        """Combine the lanes of each vector: as many numbers, in order, in vectors; the last one repeats to a power of 2.

        Two levels inside the groups of 4 lanes (one in-lane shuffle a side), then levels across the groups.
        """
        vectors = vectors + vectors[-1:] * (max(4, 1 << (len(vectors) - 1).bit_length()) - len(vectors))
        for _ in range(2):
            vectors = [self._fold(a, b, 4, 1, combine) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        groups = self.width // 4
        while groups > 1:
            if len(vectors) == 1:
                vectors = [self._fold(vectors[0], None, vectors[0].type.count, 4, combine)]
            else:
                vectors = [self._fold(a, b, self.width, 4, combine)
                           for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            groups //= 2
        return vectors

    def _fold(self, a, b, block, unit, combine):
        """Even units of a and b combined with the odd ones, block by block; of a alone if b is None."""
        count = a.type.count
        sides = []
        for odd in (0, 1):
            lanes = []
            for start in range(0, count, block):
                for source in (0, count)[: 1 if b is None else 2]:
                    for first in range(start + odd * unit, start + block, 2 * unit):
                        lanes += [source + first + lane for lane in range(unit)]
            sides.append(self.shuffle(a, a if b is None else b, lanes))
        return combine(*sides)

    # ---------------------------------------------------------------- formats

    def read(self, address, kind, mask=None):
        """`width` numbers of a format as floats."""
        builder, item = self.builder, ir.VectorType({4: I32, 2: I16, 1: I8}[ITEM_BYTES[kind]], self.width)
        bits = self.load(address, item) if mask is None else self.load_some(address, item, mask)
        if kind == FLOAT32:
            return builder.bitcast(bits, self.floats)
        if kind == BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(bits, self.ints), self.constant(16, self.ints)), self.floats)
        if kind == INT8:
            return builder.sitofp(builder.sext(bits, self.ints), self.floats)
        if kind == FLOAT8_E4M3:
            return self._read_e4m3(bits)
        if kind == FLOAT8_E5M2:  # the upper byte of a float16
            wide = ir.VectorType(I16, self.width)
            bits = builder.shl(builder.zext(bits, wide), self.constant(8, wide))
        return builder.fpext(builder.bitcast(bits, ir.VectorType(HALF, self.width)), self.floats)

    def _read_e4m3(self, bits):
        """Sign, exponent and mantissa moved to their places in a float16, whose exponent counts 2**8 less."""
        builder, wide = self.builder, ir.VectorType(I16, self.width)
        upper = builder.shl(builder.zext(bits, wide), self.constant(8, wide))
        moved = builder.and_(builder.ashr(upper, self.constant(1, wide)), self.constant(0xBF80, wide))
        is_nan = builder.icmp_unsigned("==", builder.and_(moved, self.constant(0x3F80, wide)), self.constant(0x3F80, wide))
        moved = builder.select(is_nan, self.constant(0x7E00, wide), moved)
        floats = builder.fpext(builder.bitcast(moved, ir.VectorType(HALF, self.width)), self.floats)
        return builder.fmul(floats, self.constant(256.0))

    def read_span(self, address, kind):
        """`span_size` vectors of a format at once, cheaper than one by one.

        Returns
        -------
        list of callable
            Each gives some of the vectors, converted when it is called, so that few are alive at a time; one after
            the other their numbers have the order of `span_order`.
        """
        if span_size(kind, self.width) == 1:
            return [lambda: [self.read(address, kind)]]
        if kind == BFLOAT16:
            return [lambda part=part: [part()] for part in self._halves(self.load(address, self.ints))]
        pairs = self._look_up_e4m3(self.load(address, ir.VectorType(I8, 4 * self.width)))
        return [lambda part=part: [half() for half in self._halves(part())] for part in pairs]

    def _halves(self, bits):
        """Pairs of bfloat16 in int32: the lower ones as floats, the upper ones."""
        builder = self.builder
        return [lambda: builder.bitcast(builder.shl(bits, self.constant(16, self.ints)), self.floats),
                lambda: builder.bitcast(builder.and_(bits, self.constant(-65536, self.ints)), self.floats)]

    def _look_up_e4m3(self, codes):
        """Pairs of bfloat16, of the first 8 of each 16 numbers, then of the others: bytes looked up by the lower 7 bits."""
        builder = self.builder
        function = self._function("llvm.x86.avx512.vpermi2var.qi.512", codes.type, [codes.type] * 3)
        values = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32) >> 16
        lower, upper = (
            builder.call(function, [ir.Constant(codes.type, part[:64].tolist()), codes,
                                    ir.Constant(codes.type, part[64:].tolist())])
            for part in (values & 255, values >> 8))
        upper = builder.or_(upper, builder.and_(codes, self.constant(0x80, codes.type)))
        turns = [[16 * group + 8 * half + lane + byte * codes.type.count
                  for group in range(codes.type.count // 16) for lane in range(8) for byte in (0, 1)] for half in (0, 1)]
        return [lambda lanes=lanes: builder.bitcast(self.shuffle(lower, upper, lanes), self.ints) for lanes in turns]

    def concatenate(self, vectors):
        """One vector of the lanes of one, two or four."""
        while len(vectors) > 1:
            vectors = [self.shuffle(a, b, range(2 * a.type.count)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    # ---------------------------------------------------------------- control

    def loop(self, count, carried, body):
        """``for i in range(count): carried = body(i, carried)``, with the carried values in registers."""
        builder = self.builder
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(self.index(0), before)
        values = []
        for value in carried:
            values.append(builder.phi(value.type))
            values[-1].add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", i, count), inside, after)
        builder.position_at_end(inside)
        results = body(i, values)
        i.add_incoming(self.add(i, 1), builder.block)
        for value, result in zip(values, results, strict=True):
            value.add_incoming(result, builder.block)
        builder.branch(head).set_metadata("llvm.loop", self._never_unroll())
        builder.position_at_end(after)
        return values

    def _never_unroll(self):
        """Loop metadata: bodies are register tiles already, unrolled ones spill and take long to compile."""
        module = self.builder.module
        node = ir.MDValue(module, [], name=str(len(module.metadata)))
        node.operands = (node, module.add_metadata(["llvm.loop.unroll.disable"]))
        return node

    def when(self, condition, carried, body):
        """``carried = body(carried) if condition else carried``."""
        builder = self.builder
        before = builder.block
        inside, after = builder.append_basic_block("then"), builder.append_basic_block("after")
        builder.cbranch(condition, inside, after)
        builder.position_at_end(inside)
        results = body(carried)
        end = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        merged = []
        for value, result in zip(carried, results, strict=True):
            merged.append(builder.phi(value.type))
            merged[-1].add_incoming(value, before)
            merged[-1].add_incoming(result, end)
        return merged


def span_size(kind, width):
    """Vectors of a format that are best read together."""
    if kind == FLOAT8_E4M3 and width == 16 and HAS_BYTE_TABLES:
        return 4
    return 2 if kind == BFLOAT16 else 1


def span_order(kind, width):
    """Where the numbers of a span come from: the place in memory of each lane, vector after vector."""
    size = span_size(kind, width)
    if size == 4:  # `_look_up_e4m3`: halves of groups of 16 numbers, in each the even ones, then the odd ones
        return [lane // 4 * 16 + half * 8 + lane % 4 * 2 + odd for half in (0, 1) for odd in (0, 1) for lane in range(width)]
    return [size * lane + part for part in range(size) for lane in range(width)]


class BFloat16Pairs(ir.VectorType):
    """A vector of LLVM's bfloat, which llvmlite has no name for."""

    def __init__(self, count):
        super().__init__(HALF, count)

    def _to_string(self):
        return f"<{self.count} x bfloat>"
