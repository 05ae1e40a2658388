"""Make a kernel repository for a Hub: what is here, the package's modules, and what `kernels.get_kernel` loads.

python kernels/build.py --into DIR
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "focus_hf" / "attention" / "kernels"
MODULES = tuple(f"triton_{part}.py" for part in ("gather", "prompt", "prompt_tile", "routing", "select", "sizes"))
EXTENSION = Path("torch-ext", "focus_attention")


def build(into: Path, backend: str) -> Path:
    """Write the repository and a build variant, as kernel-builder does for what is Python alone.

    Args:
        into: folder of the repository on a Hub.
        backend: ``"cuda"``; ``"cpu"`` for Triton's interpreter.

    Returns:
        The variant's folder.
    """
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    for name in ("benchmarks", "torch-ext"):
        shutil.copytree(HERE / name, into / name, dirs_exist_ok=True)
    for name in MODULES:
        shutil.copyfile(SOURCE / name, into / EXTENSION / name)
    for name, there in (("CARD.md", "README.md"), ("build.toml", "build.toml"), ("flake.nix", "flake.nix")):
        shutil.copyfile(HERE / name, into / there)
    variant = into / "build" / f"torch-{backend}"
    compatible = variant / general["name"].replace("-", "_")
    compatible.mkdir(parents=True, exist_ok=True)
    for path in sorted((into / EXTENSION).glob("*.py")):
        shutil.copyfile(path, variant / path.name)
    # Older versions of `kernels` look for a folder of the kernel's name.
    (compatible / "__init__.py").write_text(
        "import importlib.util\n"
        "import sys\n"
        "from pathlib import Path\n\n"
        'spec = importlib.util.spec_from_file_location(__name__, Path(__file__).parent.parent / "__init__.py")\n'
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules[__name__] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    files = {path.relative_to(variant).as_posix(): _digest(path) for path in sorted(variant.rglob("*.py"))}
    short = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]
    metadata = {
        "name": general["name"],
        "id": f"_{compatible.name}_{backend}_{short}",
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def _digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder that becomes the repository")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    print(build(chosen.into, chosen.backend))
