"""Sparse attention by groups of keys and tables of queries: decoding over any cache, prompts, routing."""

from .triton_gather import sparse_decode
from .triton_prompt import PromptTokens, sparse_prompt
from .triton_reads import cell_reads

__all__ = ["PromptTokens", "cell_reads", "sparse_decode", "sparse_prompt"]
