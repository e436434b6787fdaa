"""The numerics sheet and the schedule tables: the only place where a constant of a kernel is chosen.

*Numerics* decide bits: rounding points, the leaves of a sum, the KV tile and split. They depend on the model's shape
alone, are printed in the README, hashed into the fingerprint and guarded by golden digests. *Schedules* do not: tile
shapes, warps, stages, programs that share a sum. They may follow the batch; self-check compares them bit for bit."""

from dataclasses import dataclass

KV_TILE = 64  # keys a step of the online softmax; also the cache's block_size, so that a tile is one page
KV_SPLIT = 256  # keys a split, at absolute positions; splits are merged in position order
ROPE_TILE_HEADS = 8  # heads one program of the QK-norm + rotary kernel holds; its row sums live in this tile
LOGPROB_SCALE_BITS = 44  # fixed point of sums over the vocabulary: 2^44 x 152k entries stays under 2^62
LEAF_MULTIPLE = 128  # a leaf of K is a multiple of this, so that every BLOCK_K divides it
LONG_TABLE = 160  # blocks; prefill walks an even number of heads by twos, over longer tables one by one, for the L2

NUMERICS = {
    "version": "2",
    "residual": "dtype(residual + x); the norm reads the rounded value",
    "rms_norm": "fp32 inside, dtype(x * rstd) * weight in dtype; one row a program, BLOCK = next power of two",
    "qk_norm": "as rms_norm, over head_dim, before rotary; halves summed apart, then added; tile of 8 heads",
    "rotary": "table from float64, rounded once to fp32; x*cos - y*sin in fp32, rounded once",
    "linear": "fp32 accumulate along K, leaves added in order as a chain, bias in fp32, rounded once",
    "leaves": "2 for N <= 8192 and K >= 2048, else 1; a leaf is a multiple of 128",
    "experts": "exp(x - max) in fp32 by its sum in int64; fp32 sum of weight * y in ascending expert id, rounded once",
    "swiglu": "gate and up rounded to dtype; gate / (1 + exp(-gate)) * up in fp32, rounded once",
    "attention": "exp2(fma(score, scale*log2(e), -max)) in fp32, P in dtype; its row sum is what V = 1 would give",
    "kv_tile": str(KV_TILE),
    "kv_split": str(KV_SPLIT),
    "kv_dtype": "model dtype",
    "logits": "fp32",
    "logprobs": "of the unscaled model distribution; int64 sum of exp(x - max) in fixed point 2^44, log in float64",
    "noise": "Philox4x32-10, key = seed, counter = (token id // 4, position), word = token id % 4; -log(E) race",
    "cuts": "top-k, then top-p on int64 mass, then min-p, at temperature; ties to the lowest token id",
}


def leaf_count(N: int, K: int) -> int:
    """How many leaves the K axis of a weight [N, K] is cut into, by the *full* weight's shape (never a shard's).

    A wide weight fills the GPU with column tiles alone. A narrow one leaves processors idle at small M unless K is
    shared: down_proj of Qwen3-8B, M = 64, takes 36 us with one leaf, 31 with two, 32 with four, a rank of eight's
    eighth of it 30, 19 and 12 (benchmarks/tune_linear.py, H200). But four cost large M half its speed, two little."""
    return 2 if N <= 8192 and K >= 2048 else 1


def leaf_length(K: int, leaves: int) -> int:
    """Elements of K in a leaf: ceil(K / leaves) rounded up to LEAF_MULTIPLE (the last leaf may be shorter)."""
    return K if leaves == 1 else -(-K // (leaves * LEAF_MULTIPLE)) * LEAF_MULTIPLE


def row_block(N: int) -> tuple[int, int]:
    """(BLOCK, num_warps) of a row sum over N elements. Numerics: `tl.sum` follows both."""
    block = max(16, 1 << (N - 1).bit_length())
    return block, min(16, max(1, block // 512))


@dataclass(frozen=True)
class LinearSchedule:
    """One way to run a product. `split` gives each leaf its own program; otherwise one program walks them all. `tma`
    runs `programs` persistent programs fed by Hopper's copy engine."""
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    split: bool = False
    tma: bool = False
    programs: int = 132
    GROUP_M: int = 8

    def fits(self, out_bytes: int) -> bool:
        """Whether a tile of the result has room beside its operands; one of 128 x 256 in fp32 (logits) has not."""
        return self.BLOCK_M * self.BLOCK_N * out_bytes <= 1 << 16


@dataclass(frozen=True)
class AttentionSchedule:
    """BLOCK_M query rows (tokens x heads of one KV group) a program; full tiles may skip the mask; `tma` as above."""
    BLOCK_M: int
    num_warps: int
    num_stages: int
    skip_mask: bool = True
    tma: bool = False


@dataclass(frozen=True)
class Schedules:
    """The table of one kind of GPU. `linear`: by an upper bound of M, smallest first, schedules of sums of one leaf and
    of a chain, whose two accumulators need a smaller tile, all of one BLOCK_M; of several, the first whose turns, by
    programs and the size of a tile, are least. `decode`: of up to `decode_programs` of attention, and of more."""
    name: str
    linear: tuple[tuple[int, tuple[LinearSchedule, ...], tuple[LinearSchedule, ...]], ...]
    decode: tuple[AttentionSchedule, AttentionSchedule]
    prefill: AttentionSchedule
    decode_programs: int = 264  # programs of decode attention that run at once (2 a multiprocessor of an H200); 0: walk

    def linear_for(self, M: int, N: int, leaves: int, dtype_bytes: int = 2, out_bytes: int = 2) -> LinearSchedule:
        """The schedule for M rows of a weight [N, K]; N 0: the first. fp32 runs on plain cores, in one small tile."""
        if dtype_bytes == 4:
            return FP32
        found = next(found for bound, *found in self.linear if bound >= M)[leaves > 1]

        def time(s: LinearSchedule) -> int:
            tiles = -(-M // s.BLOCK_M) * -(-N // s.BLOCK_N) * (leaves if s.split else 1)
            return -(-tiles // s.programs) * s.programs * s.BLOCK_M * s.BLOCK_N

        return min((s for s in found if s.fits(out_bytes)), key=time)

    def attention_for(self, row_bytes: int) -> tuple[tuple[AttentionSchedule, AttentionSchedule], AttentionSchedule]:
        """(decode, prefill) for rows of head_dim x itemsize bytes. Wide rows (fp32, or head_dim 256) keep to one small
        tile: 42 KiB of shared memory for 16 bits x 256, 72 for fp32 x 128, 144 for fp32 x 256."""
        return ((WIDE, WIDE), WIDE) if row_bytes > 256 else (self.decode, self.prefill)


ANY = 1 << 62
FP32 = LinearSchedule(16, 64, 32, 4, 2)
PLAIN = LinearSchedule(64, 64, 64, 4, 3)
WALK = AttentionSchedule(64, 4, 2, skip_mask=False)
WIDE = AttentionSchedule(16, 4, 1)
NARROW = LinearSchedule(16, 32, 128, 4, 6, split=True)
REFERENCE = Schedules("reference", ((ANY, (PLAIN,), (PLAIN,)),), decode=(WALK, WALK), prefill=WALK, decode_programs=0)
# At most 99 KiB of shared memory, which every GPU from sm_80 on has (and 64 KiB for AMD's gfx942).
CONSERVATIVE = Schedules("conservative", linear=(
    (16, (LinearSchedule(16, 64, 128, 4, 3),), (LinearSchedule(16, 64, 128, 4, 3, split=True),)),
    (64, (PLAIN,), (LinearSchedule(64, 64, 64, 4, 3, split=True),)),
    (ANY, (LinearSchedule(128, 128, 32, 8, 3),), (LinearSchedule(128, 128, 32, 8, 3),))),
    decode=(AttentionSchedule(16, 4, 2), AttentionSchedule(16, 4, 2)), prefill=AttentionSchedule(64, 4, 2))
# Best of `benchmarks/tune_linear.py rows` on an H200, as far as an fp32 result has room beside the stages. Clipped rows
# are slow: M = 32 or 96 takes longer than 64 or 128.
HOPPER = Schedules("hopper", linear=(
    (16, (LinearSchedule(16, 64, 128, 4, 4, tma=True, programs=264), LinearSchedule(16, 64, 128, 4, 5, tma=True),
          NARROW), (LinearSchedule(16, 64, 128, 4, 5, split=True, tma=True), NARROW)),
    (64, (LinearSchedule(64, 64, 128, 4, 6, tma=True),), (LinearSchedule(64, 64, 128, 4, 6, split=True, tma=True),)),
    (192, (LinearSchedule(64, 128, 128, 4, 4, tma=True),), (LinearSchedule(64, 128, 128, 4, 4, split=True, tma=True),)),
    (ANY, (LinearSchedule(128, 256, 64, 8, 3, tma=True, GROUP_M=12), LinearSchedule(128, 128, 64, 4, 5, tma=True)),
     (LinearSchedule(128, 128, 64, 8, 5, split=True, tma=True),))),
    decode=(AttentionSchedule(16, 4, 3, tma=True), AttentionSchedule(16, 2, 2, tma=True)),
    prefill=AttentionSchedule(64, 4, 3, tma=True))  # 113 KiB: two programs share a multiprocessor


def schedules(name: str, capability: tuple[int, int]) -> Schedules:
    """The table for `--schedule name` ("auto" or "reference") on a GPU of this compute capability."""
    return REFERENCE if name == "reference" else HOPPER if capability == (9, 0) else CONSERVATIVE
