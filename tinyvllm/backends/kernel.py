"""One hand-written kernel as a record: its file, its compile-time constants, what it reads and writes, and how much work it does."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.lazy_dataclass import dataclass

Constant = int | float | str


@dataclass(frozen=True)
class Kernel:
    """A function in `kernels/BACKEND/`, specialised by constants.

    stem     names the op, the file (`STEM.c`, `STEM.cu`, `STEM.metal`) and the function in it
    backend  "cpu", "cuda" or "metal"
    target   the variant that compiles it: an instruction set ("avx512", "avx2", "neon", "plain") or a GPU ("sm_80", "apple7")
    defines  constants that are put before the source, in this order
    outs     how many of its arguments, the first ones, it writes; each may be read, too
    ins      how many arguments follow that it only reads
    flops    floating-point operations of one launch
    bytes    bytes of memory that one launch must move at least
    grid     GPUs: blocks of threads, in three directions
    block    GPUs: threads of a block
    shared   GPUs: bytes of shared memory that the launch gives a block, in addition to what the source declares
    integers CUDA: arguments after the arrays, of 32 bits: sizes of the batch, which the text does not depend on
    """

    stem: str
    backend: str
    target: str
    defines: tuple[tuple[str, Constant], ...]
    outs: int
    ins: int
    flops: int = 0
    bytes: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    block: int = 1
    shared: int = 0
    integers: tuple[int, ...] = ()

    @classmethod
    def cpu(cls, stem: str, variant: str, outs: int, ins: int, flops: int = 0, bytes: int = 0, **defines: Constant) -> Kernel:
        """A kernel of the CPU, its constants by name."""
        return cls(stem, "cpu", variant, tuple(defines.items()), outs, ins, flops, bytes)

    @classmethod
    def cuda(
        cls, stem: str, variant: str, outs: int, ins: int, grid: tuple[int, int, int], block: int, shared: int = 0,
        flops: int = 0, bytes: int = 0, **defines: Constant,
    ) -> Kernel:  # fmt: skip
        """A kernel of an NVIDIA GPU, its constants by name."""
        return cls(stem, "cuda", variant, tuple(defines.items()), outs, ins, flops, bytes, grid, block, shared)

    def passing(self, *integers: int) -> Kernel:
        """The kernel with these integers as its last arguments."""
        return replace(self, integers=integers)

    @property
    def compiled(self) -> Kernel:
        """The kernel without what only its launches need: records with the same one share their machine code."""
        outs, ins = (self.outs, self.ins) if self.backend == "cpu" else (0, 0)  # the CPU's entry passes them on
        return replace(self, outs=outs, ins=ins, flops=0, bytes=0, grid=(1, 1, 1), block=1, shared=0, integers=())

    @property
    def name(self) -> str:
        """What profiles and `DEBUG=2` show."""
        return f"{self.stem}_{self.target}"

    def check_counts(self, outs: int, ins: int) -> None:
        """ValueError unless a launch passes as many tensors as the kernel takes."""
        if (outs, ins) != (self.outs, self.ins):
            raise ValueError(f"launch: {self.stem} writes {self.outs} and reads {self.ins} tensors, got {outs} and {ins}")
