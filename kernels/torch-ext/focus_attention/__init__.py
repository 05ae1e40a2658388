"""Sparse attention by groups of keys and tables of queries: decoding over any cache, prompts, routing."""

from .triton_gather import sparse_decode
from .triton_prompt import PromptTokens, sparse_prompt
from .triton_routing import cell_reads, key_groups

__all__ = ["PromptTokens", "cell_reads", "key_groups", "sparse_decode", "sparse_prompt"]
