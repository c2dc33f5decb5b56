"""Single instructions that Numba does not offer, or not without detours: one function each, usable in any kernel.

Addresses are integers: global ones uint64, shared ones uint32 (an offset into the block's shared memory). A kernel that
takes addresses and strides as numbers has one parameter per number, folds constant offsets into its instructions, and
pays nothing for the wrap-around of negative indices.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
u32, u64, f32 = types.uint32, types.uint64, types.float32

GLOBAL, SHARED = 1, 3
"""Address spaces."""


def assembly(builder, result, arguments, text, constraints, side_effect=False):
    """Call inline PTX; `side_effect` keeps it where it is and as often as it is."""
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=side_effect), arguments)


def unary_f32(text):
    """A float32 function of one PTX instruction."""

    @intrinsic
    def function(typingctx, x):
        def codegen(context, builder, sig, args):
            return assembly(builder, F32, args, text + " $0, $1;", "=f,f")

        return f32(f32), codegen

    return function


exp2 = unary_f32("ex2.approx.ftz.f32")  # 2 units in the last place; exp2(-inf) = 0
log2 = unary_f32("lg2.approx.ftz.f32")
reciprocal = unary_f32("rcp.approx.ftz.f32")  # 1 unit in the last place; 1/inf = 0


def _binary_f32(make):
    @intrinsic
    def function(typingctx, x, y):
        return f32(f32, f32), lambda context, builder, sig, args: make(builder, *args)

    return function


def call_llvm(builder, name, result, arguments):
    """Call an LLVM or NVVM intrinsic by its name."""
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


maximum = _binary_f32(lambda b, x, y: call_llvm(b, "llvm.maxnum.f32", F32, [x, y]))
divide = _binary_f32(lambda b, x, y: assembly(b, F32, [x, y], "div.rn.f32 $0, $1, $2;", "=f,f,f"))


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z, rounded once."""
    return f32(f32, f32, f32), lambda context, builder, sig, args: call_llvm(builder, "llvm.fma.f32", F32, args)


# ---------------------------------------------------------------------------------------------------- threads and warps


def _special_register(name):
    @intrinsic
    def register(typingctx):
        def codegen(context, builder, sig, args):
            return call_llvm(builder, "llvm.nvvm.read.ptx.sreg." + name, I32, [])

        return u32(), codegen

    return register


thread_index = _special_register("tid.x")
block_x = _special_register("ctaid.x")
block_y = _special_register("ctaid.y")
block_z = _special_register("ctaid.z")
blocks_x = _special_register("nctaid.x")
blocks_y = _special_register("nctaid.y")


def exchange(builder, mode, value, lane):
    """What another of the 32 lanes of a warp has, all of which must take part: "bfly" xor `lane`, or "idx" `lane`."""
    letter = "f" if value.type == F32 else "r"
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, 0xffffffff;"
    return assembly(builder, value.type, [value, lane], text, f"={letter},{letter},r", side_effect=True)


@intrinsic
def shuffle_from(typingctx, value, lane):
    """The uint32 that a lane of the warp has."""
    return u32(u32, u32), lambda context, builder, sig, args: exchange(builder, "idx", *args)


@intrinsic
def number_from(typingctx, value, lane):
    """The float32 that a lane of the warp has."""
    return f32(f32, u32), lambda context, builder, sig, args: exchange(builder, "idx", *args)


def _statement(text):
    """An instruction without operands that orders memory."""

    @intrinsic
    def statement(typingctx):
        def codegen(context, builder, sig, args):
            assembly(builder, ir.VoidType(), [], text, "~{memory}", side_effect=True)
            return context.get_dummy_value()

        return types.void(), codegen

    return statement


sync_warp = _statement("bar.warp.sync 0xffffffff;")
sync_block = _statement("bar.sync 0;")
copies_commit = _statement("cp.async.commit_group;")
copies_wait_all_but_one = _statement("cp.async.wait_group 1;")
copies_wait_all = _statement("cp.async.wait_group 0;")


# ------------------------------------------------------------------------------------------------------- shared memory


@intrinsic
def shared_address(typingctx, array):
    """The shared address (uint32) where a shared array begins."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        byte = ir.IntType(8)
        pointer = builder.addrspacecast(builder.bitcast(data, byte.as_pointer()), byte.as_pointer(SHARED))
        return builder.ptrtoint(pointer, I32)

    return u32(array), codegen


def literal(value):
    """The number behind a literal type, or None while Numba still tries the general type."""
    return value.literal_value if isinstance(value, types.Literal) else None
