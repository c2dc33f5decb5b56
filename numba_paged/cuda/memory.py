"""Loads and stores of runs of numbers, in any format, as tuples of float32; one access is at most 16 bytes.

The address must be a multiple of the access, which is the whole run, or 16 bytes where that is longer.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .codecs import ITEMSIZE, decode, encode
from .intrinsics import GLOBAL, I32, SHARED, assembly, f32, literal, u32, u64


def _accesses(size):
    """Cut a run of bytes into (offset, size) of single accesses, whose sizes are powers of two."""
    accesses, at = [], 0
    while at < size:
        part = min(16, 1 << (size - at).bit_length() - 1)
        accesses.append((at, part))
        at += part
    return accesses


def load_words(builder, space, address, size):
    """`size` bytes as i32 words; the last is filled up with zeros."""
    words = []
    for offset, part in _accesses(size):
        at = builder.add(address, ir.Constant(address.type, offset))
        if part < 4:
            pointer = builder.inttoptr(at, ir.IntType(8 * part).as_pointer(space))
            words.append(builder.zext(builder.load(pointer, align=part), I32))
        else:
            vector = ir.VectorType(I32, part // 4)
            value = builder.load(builder.inttoptr(at, vector.as_pointer(space)), align=part)
            words += [builder.extract_element(value, I32(i)) for i in range(part // 4)]
    return words


def store_words(builder, space, address, words, size):
    """The first `size` bytes of i32 words."""
    for offset, part in _accesses(size):
        at = builder.add(address, ir.Constant(address.type, offset))
        if part < 4:
            integer = ir.IntType(8 * part)
            value = builder.trunc(words[offset // 4], integer)
            builder.store(value, builder.inttoptr(at, integer.as_pointer(space)), align=part)
        else:
            vector = ir.VectorType(I32, part // 4)
            value = ir.Constant(vector, ir.Undefined)
            for i in range(part // 4):
                value = builder.insert_element(value, words[offset // 4 + i], I32(i))
            builder.store(value, builder.inttoptr(at, vector.as_pointer(space)), align=part)


def _pack(builder, codes, itemsize):
    """Encoded numbers, one an i32, as i32 words."""
    per_word = 4 // itemsize
    words = []
    for first in range(0, len(codes), per_word):
        word = codes[first]
        for i, code in enumerate(codes[first + 1 : first + per_word], 1):
            word = builder.or_(word, builder.shl(code, I32(8 * itemsize * i)))
        words.append(word)
    return words


def _load(space, address_type):
    @intrinsic
    def load(typingctx, code, count, address):
        code_, count_ = literal(code), literal(count)
        if code_ is None or count_ is None:
            return None

        def codegen(context, builder, sig, args):
            words = load_words(builder, space, args[2], count_ * ITEMSIZE[code_])
            return cgutils.pack_array(builder, decode(builder, code_, words, count_))

        return types.UniTuple(f32, count_)(code, count, address_type), codegen

    return load


load_global = _load(GLOBAL, u64)
load_shared = _load(SHARED, u32)


def _store(space, address_type):
    @intrinsic
    def store(typingctx, code, saturate, address, numbers):
        code_, saturate_ = literal(code), literal(saturate)
        if code_ is None or saturate_ is None:
            return None

        def codegen(context, builder, sig, args):
            codes = [encode(builder, code_, x, saturate_) for x in cgutils.unpack_tuple(builder, args[3])]
            itemsize = ITEMSIZE[code_]
            store_words(builder, space, args[2], _pack(builder, codes, itemsize), len(codes) * itemsize)
            return context.get_dummy_value()

        return types.void(code, saturate, address_type, numbers), codegen

    return store


store_global = _store(GLOBAL, u64)
store_shared = _store(SHARED, u32)


@intrinsic
def copy_global(typingctx, size, target, source):
    """Copy `size` bytes, at most 16, inside of global memory."""
    size_ = literal(size)
    if size_ is None:
        return None

    def codegen(context, builder, sig, args):
        store_words(builder, GLOBAL, args[1], load_words(builder, GLOBAL, args[2], size_), size_)
        return context.get_dummy_value()

    return types.void(size, u64, u64), codegen


@intrinsic
def start_copy(typingctx, size, target, source, wanted):
    """Start copying `size` bytes from global to shared memory; unless `wanted`, they become 0 and are not read.

    ``start_copy(size, target: uint32, source: uint64, wanted: bool)``; done after `copies_commit` and a wait. Less than
    4 bytes have no such instruction: they are copied at once.
    """
    size_ = literal(size)
    if size_ is None:
        return None

    def codegen(context, builder, sig, args):
        _, target, source, wanted = args
        if size_ >= 4:
            valid = builder.select(wanted, I32(size_), I32(0))
            cache = "cg.shared.global.L2::128B" if size_ == 16 else "ca.shared.global"
            assembly(builder, ir.VoidType(), [target, source, valid], f"cp.async.{cache} [$0], [$1], {size_}, $2;",
                     "r,l,r,~{memory}", side_effect=True)
        else:
            with builder.if_else(wanted) as (then, otherwise):
                with then:
                    store_words(builder, SHARED, target, load_words(builder, GLOBAL, source, size_), size_)
                with otherwise:
                    store_words(builder, SHARED, target, [I32(0)], size_)
        return context.get_dummy_value()

    return types.void(size, u32, u64, types.boolean), codegen


def _load_integer(bits, signed):
    """Loads of plans and tables, which nothing writes meanwhile; saying so keeps what is the same in all lanes so."""
    integer = ir.IntType(bits)
    number = types.Integer.from_bitwidth(bits, signed)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            value = builder.load(builder.inttoptr(args[0], integer.as_pointer(GLOBAL)), align=bits // 8)
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
            return value

        return number(u64), codegen

    return load


load_i32 = _load_integer(32, True)
load_u32 = _load_integer(32, False)
load_i64 = _load_integer(64, True)


@intrinsic
def zero_shared(typingctx, size, address):
    """Write `size` zero bytes to shared memory."""
    size_ = literal(size)
    if size_ is None:
        return None

    def codegen(context, builder, sig, args):
        store_words(builder, SHARED, args[1], [I32(0)] * max(1, size_ // 4), size_)
        return context.get_dummy_value()

    return types.void(size, u32), codegen
