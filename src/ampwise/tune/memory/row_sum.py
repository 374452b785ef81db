"""Buffer that torch's CUDA kernel for sums allocates when it sums rows, as for the gradients of biases.

With few columns and many rows, thread blocks share a column's rows and leave partial sums in a buffer in global
memory. The buffer is larger than necessary: for a bias of 2,048 and 4,096 tokens it is 64 MiB. The numbers follow
``setReduceConfig`` of torch's ``Reduce.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["row_sum_buffer"]

MAX_THREADS = 512
WARP = 32
WIDEST_LOAD = 4  # elements
FEWEST_A_THREAD, MOST_A_THREAD = 16, 256
THREADS_A_PROCESSOR = 2048
PROCESSORS = 132  # of an H100 or H200; the buffer depends on it only where there are very few columns
SUM_BYTES = 4  # sums are FP32, whatever is summed


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """A thread block: its width in columns, its height in rows, and the columns each thread loads at once."""

    width: int
    height: int
    load: int


def row_sum_buffer(rows: int, columns: int) -> int:
    """Return the bytes for the sum over the rows of a row-major matrix.

    >>> row_sum_buffer(4096, 2048) / 2**20, row_sum_buffer(128, 2048)
    (64.0, 0)
    """
    block = _block(rows, columns)
    if rows < min(FEWEST_A_THREAD * block.height, MOST_A_THREAD):
        return 0  # each thread sums a column by itself
    a_thread = -(-rows // block.height)
    wide = -(-(columns // block.load) // block.width)
    target = PROCESSORS * (THREADS_A_PROCESSOR // (block.width * block.height))
    if a_thread < MOST_A_THREAD or wide > target:
        return 0
    parts = max(min(-(-target // wide), -(-a_thread // FEWEST_A_THREAD)), -(-a_thread // MOST_A_THREAD))
    return SUM_BYTES * columns * parts * block.width * block.load if parts > 1 else 0


def _block(rows: int, columns: int) -> ThreadBlock:
    load = next(size for size in (WIDEST_LOAD, 2, 1) if columns % size == 0)
    most = MAX_THREADS // load
    width, height = (_power_of_two(min(size, most)) for size in (columns // load, rows))
    tall = min(height, most // min(width, WARP))
    return ThreadBlock(min(width, most // tall), tall, load)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)
