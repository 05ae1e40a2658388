"""`kernels benchmark focus-hf/focus-attention --version 0`: both kernels where a query reads a tenth of its cells."""

import torch
from kernels.benchmark import Benchmark


class FocusBenchmark(Benchmark):
    seed = 0

    def _inputs(self, batch: int, length: int, new: int) -> None:
        shape = {"device": self.device, "dtype": torch.bfloat16}
        self.query = torch.randn(batch, 32, new, 128, **shape)
        self.key, self.value = torch.randn(2, batch, 8, length, 128, **shape)
        self.groups = torch.randint(64, (batch, 8, length), dtype=torch.uint8, device=self.device)
        # Of 64 consecutive queries each cell is read at a rate of its own: together they read as alike as on text.
        rates = torch.distributions.Beta(*torch.tensor([0.08, 0.72], device=self.device))
        rate = rates.sample((batch, 8, -(-new // 64), 64, 6)).repeat_interleave(64, dim=2)[:, :, :new]
        self.reads = torch.rand_like(rate) < rate
        self.positions = torch.full((batch, 1), length - 1, device=self.device)
        self.out = torch.empty_like(self.query)
        self.how = {"scale": 128**-0.5, "local_window": 128, "sink_tokens": 4}

    def setup_decode(self) -> None:
        self._inputs(64, 8192, 1)

    def benchmark_decode(self) -> None:
        tensors = self.query, self.key, self.value, self.groups, self.reads, self.positions
        self.out = self.kernel.sparse_decode(*tensors, **self.how)

    def setup_prompt(self) -> None:
        self._inputs(1, 32768, 32768)

    def benchmark_prompt(self) -> None:
        tensors = self.query, self.key, self.value, self.groups, self.reads
        self.out, _ = self.kernel.sparse_prompt(*tensors, **self.how)
