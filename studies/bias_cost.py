"""What PyTorch's CPU flash kernel takes for a bias, whatever it says: the bound of prompts that run under one.

    python -m studies.bias_cost --lengths 1024 2048 4096 8192 --threads 2

Three calls of the same causal attention: without a bias, with one of zeros ``(T, T)``, which is read once for each
head, and with one row of zeros for all queries. The last takes no longer than the first, so what the second one takes
is for memory, not for adding.
"""

from __future__ import annotations

import argparse

import torch

from focus_hf.attention.kernels import cpu_flash
from focus_hf.bench.timing import interleaved


@torch.no_grad()
def times(length: int, heads: int, head_dim: int, seconds: float) -> dict[str, float]:
    """Median milliseconds of each call."""
    query, key, value = torch.randn(3, length, heads, head_dim)
    scale, bias = head_dim**-0.5, torch.zeros(length, length)
    biases = {"no bias": None, "bias": bias, "one row": bias[:1].expand(length, -1)}
    calls = {
        name: (lambda some=some: cpu_flash(query, key, value, scale, causal=True, bias=some))
        for name, some in biases.items()
    }
    return interleaved(calls, "cpu", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each length")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for length in args.lengths:
        found = times(length, args.heads, args.head_dim, args.seconds)
        ratios = {name: f"{found['no bias'] / ms:.2f}x" for name, ms in found.items() if name != "no bias"}
        print(f"{length:,} tokens: {found['no bias']:.1f} ms; {ratios}", flush=True)


if __name__ == "__main__":
    main()
