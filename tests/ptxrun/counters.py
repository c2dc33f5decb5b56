"""Counters in the spirit of Nsight Compute, kept per instruction."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

_CLASS = {
    "ex2 lg2 rcp rsqrt sqrt sin cos tanh": "sfu", "mma": "mma", "shfl vote match redux activemask elect": "shuffle",
    "bra brx ret exit": "branch", "bar barrier": "barrier", "membar fence": "fence", "cvt": "convert",
    "mov prmt selp cvta": "move", "ldmatrix": "ldmatrix", "stmatrix": "stmatrix", "movmatrix": "movmatrix",
    "mbarrier": "mbarrier",
}
_CLASS = {name: kind for names, kind in _CLASS.items() for name in names.split()}
_TYPE_CLASS = {
    "f32": "fp32",
    "f32x2": "fp32",
    "f64": "fp64",
    "f16": "fp16",
    "f16x2": "fp16",
    "bf16": "fp16",
    "bf16x2": "fp16",
}
STORES = ("st", "red", "atom")


def instruction_class(instr):
    """What an instruction is counted as: "fp32", "ld.global", "mma", ..."""
    if instr.name == "cp":
        return "cp.async"
    if instr.name in ("ld", "ldu", "st", "atom", "red", "prefetch"):
        return f"{instr.name}.{instr.space}"
    return _CLASS.get(instr.name) or _TYPE_CLASS.get(instr.type, "int")


@dataclass
class GlobalCount:
    """Accesses to global memory by one instruction, or the sum of several."""

    requests: int = 0  # warp-level requests
    sectors: int = 0  # distinct 32-byte sectors, summed over the requests
    ideal: int = 0  # the fewest sectors that hold the bytes asked for, summed over the requests
    bytes: int = 0  # bytes the threads asked for

    def __add__(self, other):
        return GlobalCount(*(getattr(self, f) + getattr(other, f) for f in ("requests", "sectors", "ideal", "bytes")))


@dataclass
class SharedCount:
    """Accesses to shared memory by one instruction."""

    requests: int = 0
    wavefronts: int = 0  # passes through the 32 banks
    ideal: int = 0


@dataclass
class BufferCount:
    """Bytes of one buffer: asked for by the threads, and distinct ones."""

    loaded: int = 0
    stored: int = 0
    distinct_loaded: int = 0
    distinct_stored: int = 0


@dataclass
class Stats:
    """What a launch did.

    `by_buffer` maps buffer names to `BufferCount`; `global_access` and `shared_access` map the position of an
    instruction in the program to its counts, `branches` to [warps that ran it, warps that diverged].
    """

    instrs: list
    warps: int = 0
    steps: int = 0
    seconds: float = 0.0
    barriers: int = 0
    warp_syncs: int = 0
    warp_counts: list = None
    thread_counts: list = None
    global_access: dict = field(default_factory=lambda: defaultdict(GlobalCount))
    shared_access: dict = field(default_factory=lambda: defaultdict(SharedCount))
    branches: dict = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    by_buffer: dict = field(default_factory=lambda: defaultdict(BufferCount))

    def __post_init__(self):
        self.warp_counts = [0] * len(self.instrs)
        self.thread_counts = [0] * len(self.instrs)

    @property
    def warp_instructions(self):
        """Instructions that warps ran; lanes that a guard switched off count too."""
        return sum(self.warp_counts)

    @property
    def lanes_per_instruction(self):
        return sum(self.thread_counts) / max(1, self.warp_instructions)

    @property
    def by_class(self):
        """{instruction class: warp instructions}, most first."""
        counts = Counter()
        for instr, count in zip(self.instrs, self.warp_counts):
            if count:
                counts[instruction_class(instr)] += count
        return dict(counts.most_common())

    @property
    def loads(self):
        """`GlobalCount` of all loads, copies to shared memory included."""
        return self._total(stores=False)

    @property
    def stores(self):
        """`GlobalCount` of all stores and atomics."""
        return self._total(stores=True)

    def _total(self, stores):
        counts = (c for pc, c in self.global_access.items() if (self.instrs[pc].name in STORES) == stores)
        return sum(counts, GlobalCount())

    @property
    def distinct_loaded(self):
        """Distinct bytes of global memory that were loaded."""
        return sum(b.distinct_loaded for b in self.by_buffer.values())

    @property
    def distinct_stored(self):
        """Distinct bytes of global memory that were stored."""
        return sum(b.distinct_stored for b in self.by_buffer.values())

    @property
    def bank_conflicts(self):
        """Passes through the shared-memory banks beyond the fewest possible."""
        return sum(c.wavefronts - c.ideal for c in self.shared_access.values())

    @property
    def divergent_branches(self):
        return sum(diverged for _, diverged in self.branches.values())

    def add_buffers(self, segments):
        """Add up what was counted in the segments that the launch touched."""
        for segment in segments:
            distinct = zip(segment.distinct("load"), segment.distinct("store"))
            asked = zip(segment.asked["load"], segment.asked["store"])
            for buffer, (loaded, stored), (distinct_loaded, distinct_stored) in zip(segment.buffers, asked, distinct):
                count = self.by_buffer[buffer.name]
                count.loaded += loaded
                count.stored += stored
                count.distinct_loaded += distinct_loaded
                count.distinct_stored += distinct_stored

    def report(self, top=12):
        """The counters as text, with the `top` worst instructions of each kind."""
        lines = [
            f"{self.warps} warps, {self.warp_instructions} warp instructions "
            f"({self.warp_instructions / max(1, self.warps):.1f} a warp, "
            f"{self.lanes_per_instruction:.1f} lanes active), {self.steps} steps in {self.seconds:.3f} s",
            "by class: " + ", ".join(f"{kind} {count}" for kind, count in self.by_class.items()),
        ]
        for name, count, distinct in (
            ("loads", self.loads, self.distinct_loaded),
            ("stores", self.stores, self.distinct_stored),
        ):
            requests = max(1, count.requests)
            lines.append(
                f"global {name}: {count.requests} requests, {count.sectors} sectors "
                f"({count.sectors / requests:.2f} a request, ideal {count.ideal / requests:.2f}), "
                f"{count.bytes} bytes asked for, {distinct} distinct"
            )
        for name, count in self.by_buffer.items():
            lines.append(
                f"  {name}: loaded {count.loaded} bytes ({count.distinct_loaded} distinct), "
                f"stored {count.stored} ({count.distinct_stored} distinct)"
            )
        wavefronts = sum(c.wavefronts for c in self.shared_access.values())
        lines.append(f"shared: {wavefronts} wavefronts, {self.bank_conflicts} from bank conflicts")
        branched = sum(count for count, _ in self.branches.values())
        lines.append(
            f"{self.barriers} barriers, {self.warp_syncs} warp syncs, "
            f"{self.divergent_branches} of {branched} branches divergent"
        )
        return "\n".join(
            lines + self._worst(self.global_access, "sectors", top) + self._worst(self.shared_access, "wavefronts", top)
        )

    def _worst(self, counts, unit, top):
        worst = sorted(counts.items(), key=lambda item: item[1].ideal - getattr(item[1], unit))[:top]
        return [
            f"  {getattr(c, unit) / c.requests:6.2f} {unit} a request (ideal {c.ideal / c.requests:.2f}) x{c.requests} "
            f"at {self.instrs[pc].place}"
            for pc, c in worst
            if getattr(c, unit) > c.ideal
        ]
