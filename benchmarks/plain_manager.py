"""A block manager as plain Python objects: the yardstick of `bench_manager`.

nano-vllm's published algorithm (github.com/GeeeekExplorer/nano-vllm), written anew: a block is an object with a count
of references and its token ids, free blocks wait in a deque and keep their hash until they are used again, full blocks
are found by the hash of their ids chained with that of the block before. Where the original hashes with xxh64, this
takes Python's own hash of tuples, which costs less.
"""

from collections import deque


class Block:
    """What is known of one block."""

    def __init__(self):
        self.refs, self.hash, self.tokens = 0, -1, ()


class Sequence:
    """Token ids and the blocks that hold them."""

    def __init__(self, tokens):
        self.tokens, self.table, self.num_cached = list(tokens), [], 0


class PlainManager:
    """Allocates, finds, publishes and frees."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free, self.used, self.index = deque(range(num_blocks)), set(), {}

    def _take(self, number):
        """Use a free block for something else."""
        block = self.blocks[number]
        if block.hash != -1 and self.index.get(block.hash) == number:
            del self.index[block.hash]
        block.refs, block.hash, block.tokens = 1, -1, ()
        self.free.remove(number) if self.free[0] != number else self.free.popleft()
        self.used.add(number)
        return number

    def _ids(self, sequence, column):
        return tuple(sequence.tokens[column * self.block_size : (column + 1) * self.block_size])

    def admit(self, sequence):
        """Give a sequence blocks for its prompt, those that are found and new ones."""
        size, hashed, searching = self.block_size, -1, True
        for column in range(-(-len(sequence.tokens) // size)):
            ids = self._ids(sequence, column)
            number = None
            if searching and (column + 1) * size < len(sequence.tokens):
                hashed = hash((hashed, ids))
                number = self.index.get(hashed)
                searching = number is not None and self.blocks[number].tokens == ids
            if number is None or not searching:
                sequence.table.append(self._take(self.free[0]))
                continue
            sequence.num_cached += size
            if number in self.used:
                self.blocks[number].refs += 1
            else:
                self.free.remove(number)
                self.used.add(number)
                self.blocks[number].refs = 1
            sequence.table.append(number)

    def publish(self, sequence, first):
        """Enter the full blocks from column `first` on."""
        hashed = self.blocks[sequence.table[first - 1]].hash if first else -1
        for column in range(first, len(sequence.tokens) // self.block_size):
            block, ids = self.blocks[sequence.table[column]], self._ids(sequence, column)
            hashed = hash((hashed, ids))
            block.hash, block.tokens = hashed, ids
            self.index[hashed] = sequence.table[column]

    def append(self, sequence, token):
        """One generated token: a new block where the last one is full, published when it fills one."""
        if len(sequence.tokens) % self.block_size == 0:
            if not self.free:
                raise MemoryError
            sequence.table.append(self._take(self.free[0]))
        sequence.tokens.append(token)
        if len(sequence.tokens) % self.block_size == 0:
            self.publish(sequence, len(sequence.tokens) // self.block_size - 1)

    def run(self, tokens):
        """A sequence whose prompt is computed."""
        sequence = Sequence(tokens)
        self.admit(sequence)
        self.publish(sequence, sequence.num_cached // self.block_size)
        return sequence

    def release(self, sequence):
        """Drop a sequence's blocks, the last first."""
        for number in reversed(sequence.table):
            block = self.blocks[number]
            block.refs -= 1
            if block.refs == 0:
                self.used.remove(number)
                self.free.append(number)
        sequence.table.clear()

    def prepare(self, sequences):
        """The slots of the last tokens, and the tables as lists of one length."""
        slots = [sequence.table[-1] * self.block_size + (len(sequence.tokens) - 1) % self.block_size
                 for sequence in sequences]
        width = max(len(sequence.table) for sequence in sequences)
        return slots, [sequence.table + [-1] * (width - len(sequence.table)) for sequence in sequences]
