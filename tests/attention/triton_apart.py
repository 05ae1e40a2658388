"""Triton kernels in a process of their own: interpreted, or compiled for GPUs that are not here.

Triton looks at TRITON_INTERPRET when a kernel is defined, so a test's own process cannot do both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

#: A100, H100, B200.
TARGETS = (80, 90, 100)


def run_apart(script: str, **environment: str) -> Any:
    """What a script prints as JSON, run by another Python."""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def usage(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], warps: int) -> dict[str, Any]:
    """What a kernel takes of each target: registers per thread, bytes spilled, shared memory.

    Args:
        kernel: a function under `triton.jit`.
        constants: its ``constexpr`` arguments.
        types: of its other arguments, where they are not ``i32``.
        warps: it is launched with.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    found = {}
    for target in TARGETS:
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
        made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(name + r":(\d+)", said)[1]) for name in ("REG", "STACK"))
        found[f"sm_{target}"] = {"registers": registers, "spilled": stack, "shared": made.metadata.shared}
    return found
