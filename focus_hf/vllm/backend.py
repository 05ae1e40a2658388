"""vLLM's attention backend: keys and values in vLLM's pages, attended to as an adapter's groups say.

Where there are kernels for them, keys are read in place, by all prompts of a step in one launch and by all single
tokens in another; otherwise prompts take the paths of `focus_hf.attention` over keys that are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
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

from ..adapter.engines.packed import Packed, Request, attend_requests
from ..adapter.routers import Routed
from ..attention import (
    Scores,
    decode_in_place,
    of_all_heads,
    prompt_tokens,
    prompts_in_place,
    reads_in_place,
    reads_prompts_in_place,
)
from ..attention.kernels import triton_missing
from .router import LayerRouter, NoRouter, Step
from .slots import groups_of, key_slots


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
        return (KVCacheLayout.LBNHC,)  # token after token, layer by layer: a page may end with groups


@dataclass
class FocusMetadata:
    """Of a step: whose tokens are which.

    Args:
        step: the new tokens.
        block_size: tokens of a block.
        table: int32 ``(R, blocks)``, the blocks of each request.
        edges: where the new tokens of each request begin, and where the last one's end.
        lengths: of each request, the new tokens included.
        singles: requests with one new token, which are the step's first.
    """

    step: Step
    block_size: int
    table: Tensor
    edges: list[int]
    lengths: list[int]
    singles: int
    _packed: dict[int, Packed] = field(default_factory=dict)
    _prompts: dict[int, Any] = field(default_factory=dict)

    def packed(self, first: int) -> Packed:
        """The requests from the ``first`` on: whose their tokens are, and where all their keys stand."""
        if first not in self._packed:
            lengths = self.lengths[first:]
            rows = key_slots(self.table[first:], lengths, self.block_size)
            self._packed[first] = Packed(rows, self.edges[first:], [0, *accumulate(lengths)])
        return self._packed[first]

    def prompts(self, first: int) -> Any:
        """The same requests, as kernels are told them that read prompts in place."""
        if first not in self._prompts:
            edges = torch.tensor(self.edges[first:]) - self.edges[first]
            lengths, starts = torch.tensor(self.lengths[first:]), edges.to(self.table.device)
            most = int(edges.diff().max())
            ends = lengths.to(starts.device)
            self._prompts[first] = prompt_tokens(self.table[first:], self.block_size, ends, starts, most)
        return self._prompts[first]


class FocusMetadataBuilder(AttentionMetadataBuilder[FocusMetadata]):
    """Makes a step's metadata, once for all layers; nothing that comes later waits for the device."""

    reorder_batch_threshold: int | None = 1  # requests with one new token first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FocusMetadata:
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        edges = common.query_start_loc_cpu[: requests + 1].tolist()
        lengths = common.seq_lens[:requests].tolist()
        device, table = common.block_table_tensor.device, common.block_table_tensor[:requests]
        new = [torch.arange(n - (b - a), n) for n, a, b in zip(lengths, edges, edges[1:], strict=False)]
        positions = torch.cat(new).to(device) if new else torch.zeros(0, dtype=torch.long, device=device)
        singles = 0
        while singles < requests and edges[singles + 1] - edges[singles] == 1:
            singles += 1
        step = Step(common.slot_mapping[: edges[-1]].long(), positions)
        metadata = FocusMetadata(step, self.block_size, table, edges, lengths, singles)
        if singles < requests and device.type == "cuda" and triton_missing() is None:
            metadata.prompts(singles)
        else:
            metadata.packed(singles)
        return metadata


class FocusImpl(AttentionImpl[FocusMetadata]):
    """Attention of one layer; `attach` makes it in the place of the one that vLLM chose."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = "auto"
        self.router: LayerRouter = NoRouter()
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
            kv_cache: ``(blocks, H_kv, block_size, 2 D)``, with room for groups behind each block.
            attn_metadata: of the step; ``None`` where vLLM only measures memory.
            output: ``(T, H, D)``, written to.
        """
        hidden, self.hidden_states = self.hidden_states, None
        if attn_metadata is None:
            return output.zero_()
        step, router, size = attn_metadata.step, self.router, attn_metadata.block_size
        count, tokens = step.slots.shape[0], kv_cache.transpose(1, 2)  # (blocks, block_size, H_kv, 2 D)
        query, key = query[:count], key[:count]
        block, place = step.once("places", lambda: torch.stack([step.slots // size, step.slots % size])).unbind()
        tokens[block, place] = torch.cat([key, value[:count]], dim=-1)
        if router.columns == 0:
            groups = kv_cache.new_zeros((1, 1, 1), dtype=torch.uint8).expand(*tokens.shape[:2], 1)
            reads = kv_cache.new_zeros((1, 1, 1, 1), dtype=torch.bool).expand(count, 1, 1, 1)
        else:
            groups = groups_of(kv_cache, router.columns, router.dtype)
            own = router.groups(None if hidden is None else hidden[:count], key, step)
            groups[block, place] = own
            reads = router.reads(query, own, step)
        groups = groups.transpose(1, 2)
        scores, alone = Scores(self.scale), attn_metadata.singles
        asks = (query, kv_cache, groups, scores)
        if not reads_in_place(*asks):
            alone = 0
        heads, (keys, values) = kv_cache.shape[1], kv_cache.split(self.head_size, dim=-1)
        pattern = replace(router.pattern, num_bands=reads.shape[-1])
        if alone:
            of_heads = of_all_heads(groups, reads[:alone, :, None], heads)
            places = step.positions[:alone], attn_metadata.table[:alone]
            found = decode_in_place(query[:alone, :, None], keys, values, *of_heads, *places, pattern, scores)
            output[:alone] = found[:, :, 0]
        if count > alone and reads_prompts_in_place(*asks):
            own, read = (x[alone:].transpose(0, 1)[None] for x in (query, reads))
            of_heads = of_all_heads(groups, read, heads)
            found = prompts_in_place(own, keys, values, *of_heads, attn_metadata.prompts(alone), pattern, scores)
            output[alone:count] = found[0].transpose(0, 1)
        elif count > alone:
            self._gathered(attn_metadata.packed(alone), query, output, tokens, groups, reads, scores)
        return output

    def _gathered(
        self,
        packed: Packed,
        query: Tensor,
        output: Tensor,
        tokens: Tensor,
        groups: Tensor,
        reads: Tensor,
        scores: Scores,
    ) -> None:
        """Attention of packed tokens, their keys gathered, written to the output."""
        size = tokens.shape[1]

        def stored(rows: Tensor) -> tuple[Tensor, Tensor]:
            both = tokens[rows // size, rows % size]
            return both[..., : self.head_size], both[..., self.head_size :]

        def route(request: Request, own: Tensor, key: Tensor) -> Routed:
            known = groups[request.rows // size, :, request.rows % size].T[None]
            members = self.router.memberships(known[:, 0]) if own.shape[2] > 1 else None
            return known, reads[request.new].transpose(0, 1)[None], members

        attend_requests(packed.requests, query, output, stored, route, self.router.pattern, scores)
