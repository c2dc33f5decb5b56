"""Loads and stores by address: the kernels see a pool as an address and byte strides, whatever its physical order."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _element(context, builder, dtype, address, index):
    """A pointer to element `index` of the numbers at `address`."""
    kind = context.get_data_type(dtype)
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index], source_etype=kind)


@intrinsic
def load(typingctx, dtype, address, index):
    """The number ``index`` of the type `dtype` (a NumPy scalar type) at a byte address."""
    number = dtype.dtype

    def generate(context, builder, signature, arguments):
        pointer = _element(context, builder, number, *arguments[1:])
        return builder.load(pointer, align=1, typ=context.get_data_type(number))

    return number(dtype, types.int64, types.int64), generate


@intrinsic
def store(typingctx, address, index, value):
    """Write `value` as number ``index`` of its own type at a byte address."""

    def generate(context, builder, signature, arguments):
        address, index, number = arguments
        builder.store(number, _element(context, builder, value, address, index), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), generate


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """Copy `count` bytes between addresses that do not overlap."""

    def generate(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, pointer) for address in arguments[:2])
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, ir.IntType(64)])
        builder.call(memcpy, [target, source, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def as_bits(typingctx, number):
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def as_float(typingctx, bits):
    """The float32 with these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate
