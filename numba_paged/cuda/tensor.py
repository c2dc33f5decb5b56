"""Tensor-core instructions, and products of whole tiles made of them, held in registers as tuples.

All products are m16n8k16: D (16 x 8, float32) = A (16 x 16) B (16 x 8) + C. Lane ``4 r + c`` of the warp (r < 8, c < 4)
holds, two 16-bit numbers a register::

    A   (row r, numbers 2c 2c+1), (row r+8, 2c 2c+1), (row r, 2c+8 2c+9), (row r+8, 2c+8 2c+9)
    B   (column r, numbers 2c 2c+1), (column r, 2c+8 2c+9)
    C   (row r, columns 2c 2c+1), (row r+8, columns 2c 2c+1)                    (PTX ISA, "Matrix fragments for mma")

One `ldmatrix` reads 16 tokens by 16 numbers as the four quarters of A; taken in pairs they are two B. So a tile of keys
or values is read the same way whichever operand it becomes. In which order the 16 numbers are summed does not matter as
long as both operands agree: a float8 word has numbers 4c to 4c+3, of which the first two count as 2c 2c+1, the others as
2c+8 2c+9; queries are staged in that order (`place_in_operand`), and nothing has to be moved.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .codecs import BFLOAT16, E5M2, FLOAT16, ITEMSIZE
from .intrinsics import F32, I32, assembly, call_llvm, f32, literal, u32

TILE = 16
"""Tokens of a product, and numbers of a step along the head."""

_WORDS4 = ir.LiteralStructType([I32] * 4)


def operand_code(kv_code):
    """The 16-bit format in which a pool's numbers enter a product."""
    return BFLOAT16 if kv_code == BFLOAT16 else FLOAT16


def _kind(code):
    return "bf16" if code == BFLOAT16 else "f16"


def place_in_operand(kv_code, index):
    """Where in an operand's row the number `index` of a head is kept; works on ints and in kernels."""
    if ITEMSIZE[kv_code] == 1:
        return index // 16 * 16 + index % 4 // 2 * 8 + index // 4 % 4 * 2 + index % 2
    return index


# -------------------------------------------------------------------------------------------------- single instructions


def _unpack_struct(builder, struct, count):
    return [builder.extract_value(struct, i) for i in range(count)]


def _mma(builder, kind, a, b, c):
    text = (f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};")
    result = ir.LiteralStructType([F32] * 4)
    return _unpack_struct(builder, assembly(builder, result, [*a, *b, *c], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"), 4)


def _ldmatrix(builder, address, offset, count, transposed):
    """`count` 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l // 8."""
    names = ", ".join(f"${i}" for i in range(count))
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [${count}+{offset}];"
    constraints = "=r," * count + "r,~{memory}"
    words = assembly(builder, ir.LiteralStructType([I32] * count), [address], text, constraints, side_effect=True)
    return _unpack_struct(builder, words, count)


def _transpose(builder, word):
    """An 8 x 8 matrix of 16-bit numbers, one row's pair a lane, the other way round."""
    return assembly(builder, I32, [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", side_effect=True)


def _pack(builder, kind, low, high):
    return assembly(builder, I32, [high, low], f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f")


def _permute(builder, word, selector):
    return call_llvm(builder, "llvm.nvvm.prmt", I32, [word, I32(0), I32(selector)])


def _float8_halves(builder, code, word, apart):
    """Four float8 as two pairs of float16: bytes 0 1 and 2 3, or, if they are `apart`, bytes 0 2 and 1 3."""
    if code == E5M2:  # the upper half of a float16
        return [_permute(builder, word, s) for s in ((0x2404, 0x3414) if apart else (0x1404, 0x3424))]
    word = _permute(builder, word, 0x3120) if apart else word
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return _unpack_struct(builder, assembly(builder, ir.LiteralStructType([I32, I32]), [word], text, "=r,=r,r"), 2)


def _fragments(builder, code, head_dim, address, offset, transposed, by_token):
    """Yield the quarters of 16 tokens by 16 numbers, for each 16 numbers of a head, `offset` bytes behind the address.

    The address is the lane's, of `fragment_place`. The quarters are those of tokens 0 to 7, then 8 to 15, of the first
    numbers, and the same of the others; or, `by_token`, first and other numbers of tokens 0 to 7, then of 8 to 15.
    Transposed, first and other numbers of float8 are the even and the odd ones.
    """
    steps = head_dim // TILE
    if ITEMSIZE[code] == 2:
        for step in range(steps):
            yield _ldmatrix(builder, address, offset + 32 * step, 4, transposed)
        return
    for step in range(0, steps, 2):
        words = _ldmatrix(builder, address, offset + 16 * step, min(4, 2 * (steps - step)), transposed)
        for tokens in zip(words[::2], words[1::2], strict=True):
            (a, b), (c, d) = (_float8_halves(builder, code, word, transposed) for word in tokens)
            yield (a, b, c, d) if by_token else (a, c, b, d)


def fragment_place(code, by_token, pitch, lane):
    """Where a lane points `ldmatrix` within 16 rows that are `pitch` bytes apart; works on ints and in kernels."""
    if by_token and ITEMSIZE[code] == 2:
        return (lane % 8 + lane // 16 * 8) * pitch + lane // 8 % 2 * 16
    return lane % 16 * pitch + lane // 16 * 16


# ----------------------------------------------------------------------------------------------- decode: K Q^T, V^T P^T


@intrinsic
def keys_by_queries(typingctx, code, head_dim, num_tiles, pitch, keys, queries):
    """K Q^T of 16 keys: [tile of 8 queries, 4] dot products, C fragments with tokens as rows.

    `keys` (uint32) is the lane's place in the tile, not by token; `queries` (uint32) that of 16-byte chunk
    ``lane // 8`` of row ``lane % 8`` of the staged queries, rows `pitch` bytes apart.
    """
    code_, head_dim_, tiles, pitch_ = (literal(x) for x in (code, head_dim, num_tiles, pitch))
    if None in (code_, head_dim_, tiles, pitch_):
        return None
    steps = head_dim_ // TILE

    def columns(builder, address, tile):
        """B operands of a tile of queries, for each step along the head."""
        for step in range(0, steps, 2):
            count = min(4, 2 * (steps - step))
            words = _ldmatrix(builder, address, 8 * tile * pitch_ + 32 * step, count, False)
            yield from zip(words[::2], words[1::2], strict=True)

    def codegen(context, builder, sig, args):
        chains = 2 if tiles == 1 and steps > 1 else 1  # products that wait for each other take four times as long
        sums = [[ir.Constant(F32, 0.0)] * 4 for _ in range(tiles * chains)]
        rows = _fragments(builder, code_, head_dim_, args[4], 0, False, False)
        operands = zip(rows, *(columns(builder, args[5], i) for i in range(tiles)), strict=True)
        for step, (a, *tile_operands) in enumerate(operands):
            for tile, b in enumerate(tile_operands, step % chains):
                sums[tile] = _mma(builder, _kind(operand_code(code_)), a, b, sums[tile])
        if chains == 2:
            sums = [[builder.fadd(x, y) for x, y in zip(*sums, strict=True)]]
        return cgutils.pack_array(builder, [x for tile in sums for x in tile])

    return types.UniTuple(f32, 4 * tiles)(code, head_dim, num_tiles, pitch, u32, u32), codegen


@intrinsic
def add_values_by_weights(typingctx, sums, code, head_dim, values, weights):
    """sums + V^T P^T of 16 tokens: [step along the head, tile of 8 queries, 4], C fragments with numbers as rows.

    `values` (uint32) is the lane's place in the tile, by token; `weights` is of `pack_columns`.
    """
    code_, head_dim_ = literal(code), literal(head_dim)
    if None in (code_, head_dim_):
        return None
    num_tiles = weights.count // 2

    def codegen(context, builder, sig, args):
        totals, p = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 4))
        results = []
        for step, a in enumerate(_fragments(builder, code_, head_dim_, args[3], 0, True, True)):
            for tile in range(num_tiles):
                at = 4 * (step * num_tiles + tile)
                b = p[2 * tile : 2 * tile + 2]
                results += _mma(builder, _kind(operand_code(code_)), a, b, totals[at : at + 4])
        return cgutils.pack_array(builder, results)

    return sums(sums, code, head_dim, u32, weights), codegen


def _pack_with(finish):
    @intrinsic
    def pack(typingctx, code, numbers):
        code_ = literal(code)
        if code_ is None:
            return None

        def codegen(context, builder, sig, args):
            x = cgutils.unpack_tuple(builder, args[1])
            pairs = (_pack(builder, _kind(code_), x[i], x[i + 1]) for i in range(0, len(x), 2))
            return cgutils.pack_array(builder, [finish(builder, pair) for pair in pairs])

        return types.UniTuple(u32, numbers.count // 2)(code, numbers), codegen

    return pack


pack_columns = _pack_with(_transpose)  # C fragments, rounded to 16 bits, as the B operands with rows and columns exchanged
pack_rows = _pack_with(lambda builder, pair: pair)  # C fragments, rounded to 16 bits, two of them an A operand


# -------------------------------------------------------------------------------------------------- prefill: Q K^T, P V


@intrinsic
def queries_by_keys(typingctx, code, head_dim, num_tokens, pitch, queries, keys):
    """Q K^T of 16 queries and `num_tokens` keys: [tile of 8 keys, 4] dot products, C fragments with queries as rows.

    `queries` and `keys` (uint32) are the lane's places in their rows: not by token, and by token.
    """
    code_, head_dim_, tokens, pitch_ = (literal(x) for x in (code, head_dim, num_tokens, pitch))
    if None in (code_, head_dim_, tokens, pitch_):
        return None

    def codegen(context, builder, sig, args):
        kind = _kind(operand_code(code_))
        sums = [[ir.Constant(F32, 0.0)] * 4 for _ in range(tokens // 8)]
        columns = [_fragments(builder, code_, head_dim_, args[5], 16 * pitch_ * i, False, True)
                   for i in range(tokens // TILE)]
        rows = _fragments(builder, FLOAT16, head_dim_, args[4], 0, False, False)
        for a, *quarters in zip(rows, *columns, strict=True):
            for i, b in enumerate(quarters):
                for half in range(2):
                    sums[2 * i + half] = _mma(builder, kind, a, b[2 * half :][:2], sums[2 * i + half])
        return cgutils.pack_array(builder, [x for tile in sums for x in tile])

    return types.UniTuple(f32, tokens // 2)(code, head_dim, num_tokens, pitch, u32, u32), codegen


@intrinsic
def add_weights_by_values(typingctx, sums, code, head_dim, pitch, weights, values):
    """sums + P V of 16 queries: [step along the head, half, 4], C fragments with queries as rows.

    `weights` is of `pack_rows`, `values` (uint32) the lane's place in the tile, not by token.
    """
    code_, head_dim_, pitch_ = literal(code), literal(head_dim), literal(pitch)
    if None in (code_, head_dim_, pitch_):
        return None

    def codegen(context, builder, sig, args):
        kind = _kind(operand_code(code_))
        totals, p = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 4))
        for i in range(len(p) // 4):
            for step, b in enumerate(_fragments(builder, code_, head_dim_, args[5], 16 * pitch_ * i, True, False)):
                for half in range(2):
                    at = slice(8 * step + 4 * half, 8 * step + 4 * half + 4)
                    totals[at] = _mma(builder, kind, p[4 * i : 4 * i + 4], b[2 * half :][:2], totals[at])
        return cgutils.pack_array(builder, totals)

    return sums(sums, code, head_dim, pitch, weights, u32), codegen


# ------------------------------------------------------------------------------------------- tuples, and copies of rows


def make_spread(owners):
    """``spread(values)`` is the tuple of ``values[i] for i in owners``: a row's number for each element of a fragment."""

    @intrinsic
    def spread(typingctx, values):
        def codegen(context, builder, sig, args):
            items = cgutils.unpack_tuple(builder, args[0])
            return cgutils.pack_array(builder, [items[i] for i in owners])

        return types.UniTuple(values.dtype, len(owners))(values), codegen

    return spread


def make_collect(owners, name):
    """``collect(values)`` adds up (`name` "add") or takes the maximum (`name` "maximum") of the elements of each owner."""
    count = max(owners) + 1

    def together(builder, x, y):
        return builder.fadd(x, y) if name == "add" else call_llvm(builder, "llvm.maxnum.f32", F32, [x, y])

    @intrinsic
    def collect(typingctx, values):
        def codegen(context, builder, sig, args):
            results = [None] * count
            for owner, x in zip(owners, cgutils.unpack_tuple(builder, args[0]), strict=True):
                results[owner] = x if results[owner] is None else together(builder, results[owner], x)
            return cgutils.pack_array(builder, results)

        return types.UniTuple(f32, count)(values), codegen

    return collect


@intrinsic
def multiply(typingctx, x, y):
    """``x[i] * y[i]``."""

    def codegen(context, builder, sig, args):
        pairs = zip(*(cgutils.unpack_tuple(builder, a) for a in args), strict=True)
        return cgutils.pack_array(builder, [builder.fmul(a, b) for a, b in pairs])

    return x(x, y), codegen


@intrinsic
def kept(typingctx, x):
    """x (uint32), held in a register: the compiler no longer sees how it could be computed again in every round."""
    return u32(u32), lambda context, builder, sig, args: assembly(builder, I32, args, "mov.b32 $0, $1;", "=r,r", True)


@intrinsic
def any_lane(typingctx, condition):
    """Whether the condition holds in any lane of the warp, all of which must take part."""

    def codegen(context, builder, sig, args):
        return call_llvm(builder, "llvm.nvvm.vote.any.sync", ir.IntType(1), [I32(0xFFFFFFFF), args[0]])

    return types.boolean(types.boolean), codegen


@intrinsic
def differ(typingctx, x, y):
    """Whether any of ``x[i]`` and ``y[i]`` differ."""

    def codegen(context, builder, sig, args):
        result = ir.Constant(ir.IntType(1), 0)
        for a, b in zip(*(cgutils.unpack_tuple(builder, t) for t in args), strict=True):
            result = builder.or_(result, builder.fcmp_unordered("!=", a, b))
        return result

    return types.boolean(x, y), codegen
