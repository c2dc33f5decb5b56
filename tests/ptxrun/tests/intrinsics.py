"""PTX instructions as Numba intrinsics, in the ways that an attention kernel would emit them."""

from llvmlite import ir
from numba import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LLVM = {"h": I16, "r": I32, "l": I64, "f": F32}
NUMBA = {"h": types.uint16, "r": types.uint32, "l": types.uint64, "f": types.float32}


def inline(text, results, arguments, side_effect=True):
    """An intrinsic that is one piece of inline PTX; results and arguments are constraint letters."""

    def codegen(context, builder, sig, args):
        types_ = [LLVM[c] for c in results]
        back = ir.VoidType() if not results else types_[0] if len(results) == 1 else ir.LiteralStructType(types_)
        constraints = ",".join([*("=" + c for c in results), *arguments] + (["~{memory}"] if side_effect else []))
        function = ir.FunctionType(back, [LLVM[c] for c in arguments])
        value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=side_effect), args)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(results))])

    kinds = [NUMBA[c] for c in results]
    returned = types.void if not kinds else kinds[0] if len(kinds) == 1 else types.UniTuple(kinds[0], len(kinds))
    names = [f"a{i}" for i in range(len(arguments))]
    scope = {"returned": returned, "given": [NUMBA[c] for c in arguments], "codegen": codegen}
    exec(f"def f({', '.join(['typingctx', *names])}):\n    return returned(*given), codegen", scope)
    return intrinsic(scope["f"])


load_nc = inline("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
prefetch = inline("prefetch.global.L2 [$0];", "", "l")
half2_to_floats = inline("{.reg .b16 l,h; mov.b32 {l,h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}", "ff", "r", False)
floats_to_half2 = inline("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", False)
floats_to_bfloat2 = inline("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", False)
e4m3_to_half2 = inline("cvt.rn.f16x2.e4m3x2 $0, $1;", "r", "h", False)
e5m2_to_half2 = inline("cvt.rn.f16x2.e5m2x2 $0, $1;", "r", "h", False)
floats_to_e4m3 = inline("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "h", "ff", False)
floats_to_e5m2 = inline("cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "h", "ff", False)
exp2 = inline("ex2.approx.ftz.f32 $0, $1;", "f", "f", False)
tanh = inline("tanh.approx.f32 $0, $1;", "f", "f", False)
reciprocal = inline("rcp.approx.ftz.f32 $0, $1;", "f", "f", False)
fma = inline("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", False)
fma_half2 = inline("fma.rn.f16x2 $0, $1, $2, $3;", "r", "rrr", False)
shuffle_xor = inline("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fr")
syncwarp = inline("bar.warp.sync 0xffffffff;", "", "")
copy16 = inline("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "", "rl")
copy16_zero_fill = inline("cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "rlr")
copy_commit = inline("cp.async.commit_group;", "", "")
copy_wait0 = inline("cp.async.wait_group 0;", "", "")
copy_wait1 = inline("cp.async.wait_group 1;", "", "")
ldmatrix4 = inline("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
ldmatrix4_trans = inline("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
ldmatrix2 = inline("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0,$1}, [$2];", "rr", "r")
movmatrix = inline("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r")
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
MMA += "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
mma_half = inline(MMA.format("f16"), "ffff", "rrrrrrffff", False)
mma_bfloat = inline(MMA.format("bf16"), "ffff", "rrrrrrffff", False)
V4 = ir.VectorType(I32, 4)


@intrinsic
def address(typingctx, array):
    """The byte address of an array's first element."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, I64)

    return types.uint64(array), codegen


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit address of a shared array in the shared state space."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.addrspacecast(builder.bitcast(data, I8.as_pointer()), I8.as_pointer(3)), I32)

    return types.uint32(array), codegen


def _vector_load(space, invariant):
    pointer = types.uint32 if space == 3 else types.uint64

    @intrinsic
    def load(typingctx, at):
        """Four words by one LLVM vector load."""

        def codegen(context, builder, sig, args):
            value = builder.load(builder.inttoptr(args[0], V4.as_pointer(space)), align=16)
            if invariant:
                value.set_metadata("invariant.load", builder.module.add_metadata([]))
            return cgutils.pack_array(builder, [builder.extract_element(value, I32(i)) for i in range(4)])

        return types.UniTuple(types.uint32, 4)(pointer), codegen

    return load


load4, load4_invariant, load4_shared = _vector_load(1, False), _vector_load(1, True), _vector_load(3, False)


def _vector_store(space):
    pointer = types.uint32 if space == 3 else types.uint64

    @intrinsic
    def store(typingctx, at, values):
        """Four words by one LLVM vector store."""

        def codegen(context, builder, sig, args):
            vector = ir.Constant(V4, ir.Undefined)
            for i in range(4):
                vector = builder.insert_element(vector, builder.extract_value(args[1], i), I32(i))
            builder.store(vector, builder.inttoptr(args[0], V4.as_pointer(space)), align=16)
            return context.get_dummy_value()

        return types.void(pointer, types.UniTuple(types.uint32, 4)), codegen

    return store


store4, store4_shared = _vector_store(1), _vector_store(3)


@intrinsic
def bits_to_float(typingctx, bits):
    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def half2_by_ir(typingctx, pair):
    """Packed half2 to two floats by LLVM's fpext, which lets the assembler fuse it."""

    def codegen(context, builder, sig, args):
        halves = builder.bitcast(args[0], ir.VectorType(ir.HalfType(), 2))
        return cgutils.pack_array(
            builder, [builder.fpext(builder.extract_element(halves, I32(i)), F32) for i in range(2)]
        )

    return types.UniTuple(types.float32, 2)(types.uint32), codegen
