"""The cache as plain Python, written for reading: what `PagedKVCache` must do, block for block.

A block is an object, a sequence a list of them, sharing is identity. References are counted by looking for them, the
prefix index is a dict, the least recently used order a list. Nothing here is fast, nothing is an array.
"""

from dataclasses import dataclass, field

from numba_paged import OutOfBlocks, UnknownSequence

DEAD = None
"""The chain of a sequence whose further blocks cannot be published: a token was not told, or prefixes were cleared."""


@dataclass(eq=False)
class Root:
    """Where the prefixes of one salt begin."""


@dataclass(eq=False)
class Block:
    """A block in use or cached: its place in the prefix index, and its copy on the host."""

    node: tuple | None = None  # (parent Block or Root, token ids) once published
    host: "HostBlock | None" = None  # an equal copy on the host


@dataclass(eq=False)
class HostBlock:
    """A block swapped out, the token ids it was published under, and the block on the device that is equal to it."""

    tokens: tuple | None
    device: Block | None = None


@dataclass(eq=False)
class Sequence:
    """A list of blocks; None for those that slid out of the window."""

    chain: object  # what the next full block is published under, or DEAD
    blocks: list = field(default_factory=list)
    length: int = 0
    known: list = field(default_factory=list)  # token ids from position 0, without a gap
    plan: "ModelPlan | None" = None
    swapped: bool = False


@dataclass(eq=False)
class ModelPlan:
    """What `plan` decided, and what it takes to undo it."""

    sequences: list
    num_new: list
    before: list  # each sequence's blocks
    copies: list  # (source, target)
    leaving: list = field(default_factory=list)


class ModelCache:
    """Takes the same calls as a `PagedKVCache`; sequences are known by the handles that the caller gives."""

    def __init__(self, num_blocks, block_size, max_sequences=1024, max_length=None, prefix_caching=True, window=None,
                 num_host_blocks=0):
        self.block_size, self.max_sequences, self.window = block_size, max_sequences, window
        self.max_length = max_length or (num_blocks * block_size if window is None else 2**31 - 1)
        self.prefix_caching = prefix_caching
        self.num_free, self.num_host_free = num_blocks, num_host_blocks
        self.sequences, self.open_plans = {}, []
        self.cached, self.index, self.roots = [], {}, {}  # cached: the next to be evicted first
        self.num_copied = self.num_evicted = self.num_swapped_out = self.num_swapped_in = 0
        self.queried, self.hits = {False: 0, True: 0}, {False: 0, True: 0}
        self.has_host = num_host_blocks > 0

    # ---------------------------------------------------------------- blocks

    def num_available(self):
        return self.num_free + len(self.cached)

    def holders(self, block):
        rows = [*self.sequences.values(), *(sequence for plan in self.open_plans for sequence in plan.leaving)]
        return (sum(held is block for sequence in rows for held in sequence.blocks)
                + sum(source is block for plan in self.open_plans for source, _ in plan.copies))

    def take(self):
        if not self.num_free:
            self.unpublish(self.cached[0])
            self.num_evicted += 1
        self.num_free -= 1
        return Block()

    def dropped(self, block):
        """One holder has just let go."""
        if self.holders(block):
            return
        if isinstance(block, HostBlock):
            self.num_host_free += 1
            if block.device:
                block.device.host = None
        elif block.node:
            self.cached.append(block)
        else:
            self.num_free += 1
            self.changed(block)

    def changed(self, block):
        """The block is no longer what a copy on the host is."""
        if block.host:
            block.host.device, block.host = None, None

    def unpublish(self, block):
        del self.index[block.node]
        block.node = None
        if block in self.cached:
            self.cached.remove(block)
            self.num_free += 1
            self.changed(block)

    def drop_from(self, sequence, kept):
        while len(sequence.blocks) > kept:
            block = sequence.blocks.pop()
            if block:
                self.dropped(block)

    def num_blocks_for(self, length):
        return -(-length // self.block_size)

    def num_hidden(self, length):
        """Blocks that a query at position `length` does not see."""
        return 0 if self.window is None else max(0, length + 1 - self.window) // self.block_size

    # ---------------------------------------------------------------- sequences

    def row(self, seq, swapped=False):
        if seq not in self.sequences:
            raise UnknownSequence(seq)
        sequence = self.sequences[seq]
        if sequence.plan or sequence.swapped != swapped:
            raise ValueError(seq)
        return sequence

    def require_place(self):
        if len(self.sequences) + sum(len(plan.leaving) for plan in self.open_plans) >= self.max_sequences:
            raise OutOfBlocks

    def match(self, tokens, salt=None):
        """The published blocks that hold the beginning of the tokens, never all of them."""
        found, chain = [], self.roots.setdefault(salt, Root())
        for stop in range(self.block_size, len(tokens), self.block_size):
            chain = self.index.get((chain, tuple(tokens[stop - self.block_size : stop])))
            if chain is None:
                break
            found.append(chain)
        return found

    def add(self, seq, tokens=None, salt=None, resumed=False):
        if tokens is not None and len(tokens) > self.max_length or salt is not None and not self.prefix_caching:
            raise ValueError
        self.require_place()
        root = self.roots.setdefault(salt, Root()) if self.prefix_caching else DEAD
        sequence = self.sequences[seq] = Sequence(root)
        if tokens is not None and self.prefix_caching:
            found = self.match(tokens, salt)
            sequence.length = len(found) * self.block_size
            sequence.known = list(tokens[: sequence.length])
            hidden = min(self.num_hidden(sequence.length), len(found))
            sequence.blocks = [None] * hidden + found[hidden:]
            sequence.chain = found[-1] if found else root
            self.cached = [block for block in self.cached if block not in sequence.blocks]
            self.queried[resumed] += len(tokens)
            self.hits[resumed] += sequence.length

    def fork(self, seq, child):
        parent = self.row(seq)
        self.require_place()
        self.sequences[child] = Sequence(parent.chain, list(parent.blocks), parent.length, list(parent.known))

    def reparent(self, seqs, parents):
        sequences, parents = [self.row(seq) for seq in seqs], [self.row(seq) for seq in parents]
        if len(set(seqs)) < len(seqs):
            raise ValueError
        new = [(parent.chain, list(parent.blocks), parent.length, list(parent.known)) for parent in parents]
        guard = Sequence(None, [block for _, blocks, _, _ in new for block in blocks])
        self.sequences["guard"] = guard
        for sequence, parent, state in zip(sequences, parents, new):
            if sequence is not parent:
                self.drop_from(sequence, 0)
                sequence.chain, sequence.blocks, sequence.length, sequence.known = state
        del self.sequences["guard"]

    def truncate(self, seq, length):
        sequence, size = self.row(seq), self.block_size
        if not 0 <= length <= sequence.length:
            raise ValueError
        held = sequence.blocks[self.num_hidden(length) : self.num_blocks_for(length)]
        if None in held:
            raise ValueError
        if length < len(sequence.known):
            if sequence.chain is not DEAD and length // size < len(sequence.known) // size:
                block = sequence.blocks[length // size]
                sequence.chain = block.node[0] if block else DEAD
            del sequence.known[length:]
        self.drop_from(sequence, self.num_blocks_for(length))
        sequence.length = length

    def free(self, seq, after=None):
        if seq not in self.sequences:
            raise UnknownSequence(seq)
        sequence = self.sequences[seq]
        if sequence.plan not in (None, after):
            raise ValueError
        if after is None or sequence.swapped:
            self.drop_from(sequence, 0)
        else:
            after.leaving.append(sequence)
        del self.sequences[seq]

    def clear_prefixes(self):
        for block in list(self.index.values()):
            self.unpublish(block)
        for sequence in [*self.sequences.values(), *(one for plan in self.open_plans for one in plan.leaving)]:
            if sequence.length or sequence.plan:
                sequence.chain = DEAD

    # ---------------------------------------------------------------- a step

    def decide(self, sequences, num_new, num_lookahead=0):
        """Blocks that a plan takes, and which sequences copy their last block before they write to it."""
        copies, num_left, longest, needed = [], {}, {}, 0
        for sequence, count in zip(sequences, num_new):
            stop = min(sequence.length + count + num_lookahead, self.max_length)
            needed += self.num_blocks_for(stop) - len(sequence.blocks)
            copies.append(False)
            if sequence.length % self.block_size:
                tail = sequence.blocks[sequence.length // self.block_size]
                left = num_left.setdefault(tail, self.holders(tail))
                if tail.node or left > 1 or longest.get(tail, 0) > sequence.length:
                    copies[-1] = True
                    num_left[tail] -= 1
                    longest[tail] = max(longest.get(tail, 0), sequence.length)
        return needed + sum(copies), copies

    def blocks_needed(self, seqs, num_new, num_lookahead=0):
        """Blocks without which there is no plan, or those that it takes if they are there."""
        sequences = self.batch(seqs, num_new)
        needed, copied = self.decide(sequences, num_new, num_lookahead)
        return needed if needed <= self.num_available() else needed - len(self.own_tails(sequences, copied))

    def batch(self, seqs, num_new):
        sequences = [self.row(seq) for seq in seqs]
        if len(set(seqs)) < len(seqs) or any(count < 1 for count in num_new):
            raise ValueError
        if any(sequence.length + count > self.max_length for sequence, count in zip(sequences, num_new)):
            raise ValueError
        return sequences

    def own_tails(self, sequences, copied):
        """Published blocks that would be copied although only their sequence holds them."""
        tails = [sequence.blocks[sequence.length // self.block_size]
                 for sequence, copies in zip(sequences, copied) if copies]
        return [tail for tail in tails if tail.node and self.holders(tail) == 1]

    def plan(self, seqs, num_new, num_lookahead=0):
        sequences = self.batch(seqs, num_new)
        needed, copied = self.decide(sequences, num_new, num_lookahead)
        own_tails = self.own_tails(sequences, copied)
        if needed - len(own_tails) > self.num_available():
            raise OutOfBlocks
        if needed > self.num_available():  # their last published blocks are written in place: evicted, so to say
            for block in [*self.cached, *own_tails]:
                self.unpublish(block)
                self.num_evicted += 1
            needed, copied = self.decide(sequences, num_new, num_lookahead)
        plan = ModelPlan(sequences, list(num_new), [list(sequence.blocks) for sequence in sequences], [])
        self.open_plans.append(plan)
        for sequence, count, copies in zip(sequences, num_new, copied):
            sequence.plan = plan
            tail = sequence.length // self.block_size
            if copies:
                target = self.take()
                plan.copies.append((sequence.blocks[tail], target))
                sequence.blocks[tail] = target
            elif sequence.length % self.block_size:
                self.changed(sequence.blocks[tail])
            stop = self.num_blocks_for(min(sequence.length + count + num_lookahead, self.max_length))
            sequence.blocks += [self.take() for _ in range(stop - len(sequence.blocks))]
        self.num_copied += len(plan.copies)
        return plan

    def rollback(self, plan):
        for sequence, before in zip(plan.sequences[::-1], plan.before[::-1]):
            new, sequence.blocks = sequence.blocks, before
            for block in new[::-1]:
                if not any(block is held for held in before):
                    self.dropped(block)
        self.close(plan)

    def commit(self, plan, tokens=None, accepted=None):
        accepted = plan.num_new if accepted is None else accepted
        filling, starts = [], [sum(plan.num_new[:i]) for i in range(len(plan.num_new))]
        for sequence, kept in zip(plan.sequences, accepted):
            told = tokens is not None and sequence.chain is not DEAD and len(sequence.known) == sequence.length
            filling.append(told and sequence.length % self.block_size + kept >= self.block_size)
        for i in sorted(range(len(filling)), key=filling.__getitem__):  # the rows that fill a block come last
            sequence, kept = plan.sequences[i], accepted[i]
            if tokens is not None and len(sequence.known) == sequence.length:
                self.publish(sequence, list(tokens[starts[i] : starts[i] + kept]))
            sequence.length += kept
            self.drop_from(sequence, self.num_blocks_for(sequence.length))
            hidden = min(self.num_hidden(sequence.length), len(sequence.blocks))
            for j in range(hidden - 1, -1, -1):
                block, sequence.blocks[j] = sequence.blocks[j], None
                if block:
                    self.dropped(block)
        self.close(plan)

    def publish(self, sequence, tokens):
        size = self.block_size
        first = len(sequence.known) // size
        sequence.known += tokens
        if sequence.chain is DEAD:
            return
        for j in range(first, len(sequence.known) // size):
            key = (sequence.chain, tuple(sequence.known[j * size : (j + 1) * size]))
            block = sequence.blocks[j]
            found = self.index.setdefault(key, block)
            if found is block:
                block.node = key
            else:
                sequence.blocks[j] = found
                if found in self.cached:
                    self.cached.remove(found)
                self.dropped(block)
            sequence.chain = found

    def close(self, plan):
        self.open_plans.remove(plan)
        copies, plan.copies = plan.copies, []
        for sequence in plan.sequences:
            sequence.plan = None
        leaving = {("leaving", i): sequence for i, sequence in enumerate(plan.leaving)}
        self.sequences |= leaving
        while copies:
            source, _ = copies.pop()
            if not any(source is other for other, _ in copies):
                self.dropped(source)
        for key, sequence in leaving.items():
            self.drop_from(sequence, 0)
            del self.sequences[key]

    # ---------------------------------------------------------------- swapping

    def swap_out(self, seq):
        sequence, size = self.row(seq), self.block_size
        if not self.has_host:
            raise OutOfBlocks
        missing = [block for block in sequence.blocks if block and not block.host]
        if len(missing) > self.num_host_free:
            raise OutOfBlocks
        for block in missing:
            block.host = HostBlock(block.node and block.node[1], block)
        self.num_host_free -= len(missing)
        self.num_swapped_out += len(missing)
        num_published = len(sequence.known) // size if sequence.chain is not DEAD else 0
        first = next((j for j, block in enumerate(sequence.blocks) if block), len(sequence.blocks))
        if first < num_published:
            sequence.chain = sequence.blocks[first].node[0]
        device, sequence.swapped = sequence.blocks, True
        sequence.blocks = [block and block.host for block in device]
        for block in device[::-1]:
            if block:
                self.dropped(block)

    def swap_in(self, seq):
        sequence, size = self.row(seq, swapped=True), self.block_size
        num_published = len(sequence.known) // size if sequence.chain is not DEAD else 0
        found, chain = [], sequence.chain
        for j, block in enumerate(sequence.blocks):
            if j < num_published and block:
                chain = self.index.get((chain, block.tokens)) if chain is not None else None
            found.append(block and (chain if j < num_published else block.device))
        needed = sum(block is not None and (there is None or there in self.cached)
                     for block, there in zip(sequence.blocks, found))
        if needed > self.num_available():
            raise OutOfBlocks
        host, sequence.blocks, sequence.swapped = sequence.blocks, list(found), False
        self.cached = [block for block in self.cached if block not in found]
        for j, block in enumerate(host):
            if block and not found[j]:
                new = sequence.blocks[j] = self.take()
                if block.device:
                    block.device.host = None
                block.device, new.host = new, block
                self.num_swapped_in += 1
            if block and j < num_published:
                if not found[j]:
                    sequence.blocks[j].node = (sequence.chain, block.tokens)
                    self.index[sequence.blocks[j].node] = sequence.blocks[j]
                sequence.chain = sequence.blocks[j]
        for block in host[::-1]:
            if block:
                self.dropped(block)
