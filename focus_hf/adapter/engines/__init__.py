"""Engines that keep keys in pages of their own: transformers' continuous batching."""
