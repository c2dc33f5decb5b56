"""Order basic blocks so that "lowest program counter first" reconverges threads where a GPU would.

NVVM may put a rarely taken block behind the exit and jump back; the threads that skipped it would then run ahead. A
reverse post-order of the control-flow graph that visits loop exits first puts every join behind the branches that lead
to it, and every loop exit behind the whole loop.
"""

from .module import Instr

_ENDS = ("bra", "ret", "exit", "trap")


def reorder(program):
    """Reorder the blocks in place; a block that no longer falls through gets a `goto`, which is not counted."""
    instrs = program.instrs
    starts = _block_starts(instrs)
    ends = starts[1:] + [len(instrs)]
    block_at = {start: block for block, start in enumerate(starts)}
    successors = []
    for block, end in enumerate(ends):
        last = instrs[end - 1]
        branch = [block_at[last.target]] if last.target is not None else []
        successors.append(branch + ([block + 1] if _falls_through(last) and end < len(instrs) else []))
    order = _reverse_post_order(successors)
    if order == list(range(len(order))):
        return program
    out, new_start = [], {}
    for block, following in zip(order, order[1:] + [None]):
        new_start[starts[block]] = len(out)
        out += instrs[starts[block] : ends[block]]
        if _falls_through(out[-1]) and ends[block] < len(instrs) and following != block + 1:
            out.append(Instr("goto", [], None, out[-1].line, "goto (block moved)", target=ends[block]))
    for instr in out:
        if instr.target is not None:
            instr.target = new_start[instr.target]
    program.instrs = out
    return program


def _falls_through(instr):
    return instr.name not in _ENDS or instr.guard is not None


def _block_starts(instrs):
    starts = {0} | {i.target for i in instrs if i.target is not None}
    starts |= {pc + 1 for pc, i in enumerate(instrs) if i.name in _ENDS}
    return sorted(s for s in starts if s < len(instrs))


def _reverse_post_order(successors):
    """Depth-first; what is visited first ends up last, so loop exits (the shallower successors) go first."""
    depth = _loop_depth(successors)

    def ordered(block):
        return iter(sorted(successors[block], key=lambda s: (depth[s], -s)))

    post, seen, stack = [], {0}, [(0, ordered(0))]
    while stack:
        block, rest = stack[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            post.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, ordered(following)))
    return post[::-1]


def _loop_depth(successors):
    """How many natural loops each block is in."""
    dominators = _dominators(successors)
    loops = {}
    for block, targets in enumerate(successors):
        for head in targets:
            if dominators[block] >> head & 1:
                body, todo = loops.setdefault(head, {head}), [block]
                while todo:
                    inner = todo.pop()
                    if inner not in body:
                        body.add(inner)
                        todo += [b for b, s in enumerate(successors) if inner in s]
    return [sum(block in body for body in loops.values()) for block in range(len(successors))]


def _dominators(successors):
    """A bit set per block: the blocks on every path to it."""
    count = len(successors)
    predecessors = [[] for _ in range(count)]
    for block, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(block)
    everything = (1 << count) - 1
    dominators = [1] + [everything] * (count - 1)
    changed = True
    while changed:
        changed = False
        for block in range(1, count):
            new = everything
            for p in predecessors[block]:
                new &= dominators[p]
            new |= 1 << block
            if new != dominators[block]:
                dominators[block], changed = new, True
    return dominators
