"""Run a few PTX instructions on arrays: one thread an element."""

from functools import cache

import numpy as np

from ptxrun import assemble, launch, missing

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"
SCRATCH = (
    ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<20>; .reg .f32 %f<20>; .reg .f64 %e<9>; "
    ".reg .b32 %t<4>; .reg .b64 %a<3>;"
)


@cache
def assembles(text, target):
    """The assembler accepts it, so the test itself is valid PTX. Without an assembler, take it on trust."""
    if missing() is None:
        assemble(text, target)


def kernel(body, params, target="sm_90a", head=""):
    """PTX text of a kernel whose parameters are pointers, loaded into %d0, %d1, ..., with %r0 the thread's x index.

    `head` comes before the kernel: variables and functions of the module.
    """
    listed = ", ".join(f".param .u64 {p}" for p in params)
    text = HEADER.format(target=target) + head + f".visible .entry k({listed})\n{{\n"
    text += SCRATCH + "\n" + "".join(f"ld.param.u64 %d{i}, [{p}];\n" for i, p in enumerate(params))
    text += "mov.u32 %r0, %tid.x;\n" + body + "\nret;\n}\n"
    assembles(text, target)
    return text


def elementwise(body, in_sizes, out_sizes, target="sm_90a"):
    """PTX text that computes %o0, %o1, ... from %i0, %i1, ... for each thread; sizes are bytes an element."""
    names = [f"i{n}" for n in range(len(in_sizes))] + [f"o{n}" for n in range(len(out_sizes))]
    lines = ["mov.u32 %t0, %tid.x; mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mad.lo.s32 %t0, %t1, %t2, %t0;"]
    for name, size in zip(names, [*in_sizes, *out_sizes]):
        lines.append(f".reg .b{8 * size} %{name}; .reg .b64 %{name}a; ld.param.u64 %{name}a, [p{name}];")
        lines.append(f"mul.wide.u32 %a0, %t0, {size}; add.s64 %{name}a, %{name}a, %a0;")
        if name[0] == "i":
            lines.append(f"ld.global.b{8 * size} %{name}, [%{name}a];")
    lines.append(body)
    lines += [f"st.global.b{8 * size} [%o{n}a], %o{n};" for n, size in enumerate(out_sizes)]
    params = ", ".join(f".param .u64 p{name}" for name in names)
    text = (
        HEADER.format(target=target)
        + f".visible .entry k({params})\n{{\n{SCRATCH}\n"
        + "\n".join(lines)
        + "\nret;\n}\n"
    )
    assembles(text, target)
    return text


def run(body, inputs, outputs, block=None, target="sm_90a", **options):
    """Run a body on arrays of one length; give arrays of the dtypes in `outputs`."""
    inputs = [np.ascontiguousarray(x) for x in inputs]
    count = len(inputs[0])
    results = [np.zeros(count, d) for d in outputs]
    text = elementwise(body, [x.itemsize for x in inputs], [r.itemsize for r in results], target)
    block = block or min(count, 128)
    assert count % block == 0
    launch_pointers(text, count // block, block, inputs + results, **options).assert_clean()
    return results


def launch_pointers(text, grid, block, arrays, **options):
    """Launch PTX whose parameters are pointers to arrays (or Bufs)."""
    from ptxrun import Buf, Memory

    memory = Memory()
    args = []
    for i, a in enumerate(arrays):
        buf = a if isinstance(a, Buf) else Buf(a)
        args.append(memory.add(buf.array, buf.init, buf.readonly, buf.name or f"#{i}", buf.rows))
    return launch(text, grid, block, args, memory=memory, **options)


def same(a, b):
    """Equal bit by bit, but for the bits of a NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))
