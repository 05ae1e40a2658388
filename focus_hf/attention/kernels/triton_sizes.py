"""Sizes of the kernels' tiles and grids: numbers of shapes alone. Imports nothing: predictions need them, too."""

from __future__ import annotations

#: Programs of decoding that fill a GPU: seven on each processor of the largest ones.
PROGRAMS = 1024

#: The most programs for the list of one key head, and keys up to its bound that are worth one.
MAX_SPLITS, SPLIT_BOUND = 64, 1024

#: Rows of a tile of a prompt: query heads of a key head times consecutive tokens. Of 64 rows, 16 tokens of four heads
#: read together four fifths of what 32 do, and two programs are on a processor, of which one looks at bytes while the
#: other multiplies: on an H200 a prompt of 32k tokens takes 10.3 ms, with 128 rows 11.7, or 10.2 where a thread may
#: have 128 registers and some values are spilled.
ROWS = 64

#: Keys that a tile of a prompt reads at a time.
KEYS = 64


def num_splits(key_heads: int, bound: int) -> int:
    """Programs that share the list of a key head: enough to fill a GPU, each with enough to read."""
    return max(1, min(MAX_SPLITS, -(-bound // SPLIT_BOUND), -(-PROGRAMS // key_heads)))


def tokens_of_tile(heads: int) -> int:
    """Consecutive tokens of a tile of a prompt, by the query heads of a key head; a bit for each fits a number."""
    return max(1, min(64, ROWS // power_of_two(heads)))


def keys_of_decode_tile(head_dim: int, element_size: int) -> int:
    """Keys that decoding reads at a time: few enough that three or more programs are on a processor."""
    return max(16, min(64, 16384 // (width_of(head_dim) * element_size)))


def keys_of_prompt_tile(head_dim: int, element_size: int) -> int:
    """Keys that a tile of a prompt reads at a time: fewer of wide heads, for registers and shared memory."""
    return max(16, min(KEYS, KEYS * 256 // (width_of(head_dim) * element_size)))


def width_of(dim: int) -> int:
    """Numbers of a tile for a head of ``dim``."""
    return max(16, power_of_two(dim))


def power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()
