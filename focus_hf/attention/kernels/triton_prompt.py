"""Attention of many new tokens over all keys before them: one launch for all sequences and heads of a layer.

A tile is the query heads of a key head times consecutive tokens, 128 rows; `triton_prompt_tile` computes one.

Nothing here knows the rest of the package: `kernels/build.py` makes a repository of these files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .triton_gather import LOG2_E, LOWEST, check_attention
from .triton_prompt_tile import prompt_tile
from .triton_sizes import keys_of_prompt_tile, tokens_of_tile, width_of

#: Keys that are looked at in one step and in one go, before what was found is read; the latter are the list's places.
STEP, SEGMENT = 1024, 4096

#: Programs that are launched for each processor, as many as it has room for or more: each takes tiles until none is
#: left.
RESIDENT = 4

STAGES = 2


@dataclass(frozen=True)
class PromptTokens:
    """Where the tokens of ``N`` sequences stand in tensors of queries and keys: made once for all layers.

    A sequence is its tokens in order, padding left out; its queries are its last tokens.

    Args:
        key_slots: int32 ``(N, S)``, the place of each of its tokens among the keys.
        query_slots: int32 ``(N, Q)``, the place of each of its queries.
        lengths: int32 ``(N,)``, its tokens.
        new: int32 ``(N,)``, its queries.
    """

    key_slots: Tensor
    query_slots: Tensor
    lengths: Tensor
    new: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor, queries: int) -> PromptTokens:
        """Of rows that may have padding anywhere.

        Args:
            positions: integers ``(B, S)``, a token's rank in its sequence, -1 for padding.
            queries: the last columns that are queries.
        """
        some = positions >= 0
        keys = torch.sort((~some).to(torch.uint8), dim=1, stable=True).indices
        asking = torch.sort((~some[:, -queries:]).to(torch.uint8), dim=1, stable=True).indices
        new = some[:, -queries:].sum(dim=1)
        return cls(keys.int(), asking.int(), some.sum(dim=1).int(), new.int())

    @classmethod
    def from_blocks(
        cls, block_table: Tensor, block_size: int, lengths: Tensor, query_starts: Tensor, most: int
    ) -> PromptTokens:
        """Of sequences whose keys are in blocks, and whose queries stand one sequence after the other.

        Args:
            block_table: int32 ``(N, most blocks)``.
            block_size: tokens of a block.
            lengths: ``(N,)``, tokens of each sequence, the new ones among them.
            query_starts: ``(N + 1,)``, where each sequence's queries begin; the last is their number.
            most: queries that a sequence has at most.
        """
        place = torch.arange(block_size, dtype=torch.int32, device=block_table.device)
        slots = (block_table[:, :, None] * block_size + place).flatten(1)
        asking = query_starts[:-1, None] + torch.arange(most, dtype=torch.int32, device=block_table.device)
        return cls(slots, asking.int(), lengths.int(), query_starts.diff().int())


def sparse_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_groups: Tensor,
    reads: Tensor,
    *,
    scale: float,
    local_window: int,
    sink_tokens: int,
    dense_below: int = 0,
    tokens: PromptTokens | None = None,
    block_size: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of prompts, or of their later chunks; forward only.

    Query ``i`` attends to key ``j`` as `definition.attended_pairs` says, positions being ranks in a sequence.

    Args:
        query: ``(B, H, Q, D)``; with ``tokens``, one row may hold the queries of all sequences.
        key: ``(B, H_kv, S, D)``, in which one row may hold the keys of all sequences; with a block size ``(blocks,
            H_kv, block size, D)``. Any strides, the last dimension contiguous.
        value: ``(B, H_kv, S, D_v)``, likewise.
        key_groups: uint8, the first three dimensions of the key.
        reads: bool ``(B, H_c, Q, K, bands)``, the last two dimensions contiguous; stride 0 where heads are alike.
        scale: factor on ``q . k``.
        local_window, sink_tokens, dense_below: see `definition.Pattern`.
        tokens: which tokens there are; without them rows are sequences without padding, and the last ``Q`` of the
            ``S`` tokens are the queries.
        block_size: of blocks; ``tokens`` then says where keys stand, `PromptTokens.from_blocks`.
        sink_logits: ``(H,)``, learned logits that take part in the softmax and read nothing.

    Returns:
        Output ``(B, H, Q, D_v)`` in the dtype of the query, zeros for what is no sequence's query, and float32
        logsumexp ``(B, H, Q)``, there minus infinity.

    Raises:
        ValueError: what is given does not fit together.
    """
    check_attention(query, key, value, key_groups, reads)
    batch, num_heads, queries, head_dim = query.shape
    choosers, length, value_dim = reads.shape[1], key.shape[2], value.shape[3]
    heads = num_heads // choosers
    shape = (batch, num_heads, queries)
    if tokens is None:
        output = torch.empty(*shape, value_dim, dtype=query.dtype, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        sequences, most = batch, queries
    else:
        output = torch.zeros(*shape, value_dim, dtype=query.dtype, device=query.device)
        lse = torch.full(shape, float("-inf"), device=query.device)
        sequences, most = tokens.query_slots.shape
    together = tokens_of_tile(heads)
    tiles = triton.cdiv(most, together)
    programs = min(sequences * choosers * tiles, RESIDENT * _processors(query.device))
    cells = reads.shape[3] * reads.shape[4]
    table = torch.empty(programs, cells, dtype=torch.int64 if together > 32 else torch.int32, device=query.device)
    listed = torch.empty(programs, SEGMENT, dtype=torch.int32, device=query.device)
    bits = torch.empty(programs, SEGMENT, dtype=table.dtype, device=query.device)
    taken = torch.zeros(1, dtype=torch.int32, device=query.device)
    slots = (None,) * 4 if tokens is None else (tokens.key_slots, tokens.query_slots, tokens.lengths, tokens.new)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        prompt_tile[(programs,)](
            *(query, key, value, key_groups, reads.view(torch.uint8), *slots, sink_logits),
            *(output, lse, taken, table, listed, bits, scale * LOG2_E, sequences * choosers, tiles, length, queries),
            0 if tokens is None else tokens.key_slots.stride(0),
            most,
            *_strides(query, sequences),
            *_strides(key, 0 if block_size else sequences),
            *_strides(value, 0 if block_size else sequences),
            *_strides(key_groups, 0 if block_size else sequences),
            *_strides(reads, sequences),
            0 if sequences > batch else num_heads * queries,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            WIDTH=width_of(head_dim),
            VALUE_WIDTH=width_of(value_dim),
            HEADS=heads,
            TOKENS=together,
            ROWS=together * triton.next_power_of_2(heads),
            CELLS=cells,
            PIECE=min(128, triton.next_power_of_2(cells)),
            BANDS=reads.shape[4],
            WINDOW=local_window,
            SINKS=sink_tokens,
            DENSE=dense_below,
            CHOOSERS=choosers,
            OF_KEY_HEAD=choosers // key.shape[1],
            BLOCK=block_size,
            ALIKE=key.stride() == value.stride(),
            STEP=STEP,
            SEGMENT=SEGMENT,
            TILE=keys_of_prompt_tile(max(head_dim, value_dim), key.element_size()),
            LOG2_E=LOG2_E,
            LOWEST=LOWEST,
            num_warps=max(4, together * triton.next_power_of_2(heads) // 16),
            num_stages=STAGES,
        )
    return output, lse


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _strides(tensor: Tensor, sequences: int) -> tuple[int, int, int]:
    """Of row, head and place; one row for several sequences is every sequence's."""
    row, head, place = tensor.stride()[:3]
    return (0 if sequences > tensor.shape[0] else row), head, place
