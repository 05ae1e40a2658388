"""vLLM's attention backend: keys and values in vLLM's pages, attended to as an adapter's groups say.

Plain torch on the tensors' device, and the paths of `focus_hf.attention`, for prompts and for single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..adapter.engines.packed import Packed, attend_requests
from ..adapter.routers import Routed
from ..attention import Scores
from .router import LayerRouter, NoRouter
from .slots import SlotTable, key_slots, rows_of


class FocusBackend(AttentionBackend):
    """What vLLM asks about the backend of a layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FocusImpl]:
        return FocusImpl

    @staticmethod
    def get_builder_cls() -> type[FocusMetadataBuilder]:
        return FocusMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # token after token: `rows_of` is a view


@dataclass
class FocusMetadata:
    """Of a step: whose tokens are which.

    Args:
        slots: integers ``(T,)``, where the new tokens' keys go.
        positions: integers ``(T,)``, of the new tokens.
        packed: whose they are, and where all keys stand.
    """

    slots: Tensor
    positions: Tensor
    packed: Packed


class FocusMetadataBuilder(AttentionMetadataBuilder[FocusMetadata]):
    """Makes a step's metadata, once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FocusMetadata:
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        query_edges = common.query_start_loc_cpu[: requests + 1].tolist()
        lengths = common.seq_lens[:requests].tolist()
        key_edges = [0]
        for length in lengths:
            key_edges.append(key_edges[-1] + length)
        rows = key_slots(common.block_table_tensor[:requests], lengths, self.block_size)
        new = [torch.arange(n - (b - a), n) for n, a, b in zip(lengths, query_edges, query_edges[1:], strict=False)]
        positions = torch.cat(new).to(rows.device) if new else rows[:0]
        slots = common.slot_mapping[: query_edges[-1]]
        return FocusMetadata(slots, positions, Packed(rows, query_edges, key_edges))


class FocusImpl(AttentionImpl[FocusMetadata]):
    """Attention of one layer; `attach` makes it in the place of the one that vLLM chose."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = "auto"
        self.router: LayerRouter = NoRouter()
        self.table = SlotTable()
        #: ``(T, d)``, what enters the attention module in the call that comes next, where that is needed.
        self.hidden_states: Tensor | None = None

    @torch.no_grad()
    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FocusMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Hard attention of a step.

        Args:
            layer: of vLLM.
            query: ``(T, H, D)``; there may be rows of padding at the end, in all of them.
            key, value: ``(T, H_kv, D)``, of the new tokens.
            kv_cache: ``(blocks, H_kv, block_size, 2 D)``.
            attn_metadata: of the step; ``None`` where vLLM only measures memory.
            output: ``(T, H, D)``, written to.
        """
        hidden, self.hidden_states = self.hidden_states, None
        if attn_metadata is None:
            return output.zero_()
        slots, positions, packed = attn_metadata.slots, attn_metadata.positions, attn_metadata.packed
        count, rows = slots.shape[0], rows_of(kv_cache)
        rows[slots] = torch.cat([key[:count], value[:count]], dim=-1).to(rows.dtype)
        hidden = None if hidden is None else hidden[:count]
        self.table.write(
            slots, self.router.groups(hidden, rows[slots][..., : self.head_size], positions), rows.shape[0]
        )
        stored = rows[..., : self.head_size], rows[..., self.head_size :]

        def route(own: Tensor, keys: Tensor, kept: Tensor, places: Tensor, where: Tensor) -> Routed:
            return self.router.route(own, self.table.read(places), where)

        new = query[:count].transpose(0, 1)[None]
        result = attend_requests(packed, new, stored, route, self.router.pattern, Scores(self.scale))
        output[:count] = result[0].transpose(0, 1)
        return output
