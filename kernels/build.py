"""Fill this kernel repository from the package, and build what `kernels.get_kernel` loads.

python kernels/build.py                      # copy the modules; commit what changed
python kernels/build.py --into DIR           # and make DIR/build/torch-cuda, ready for a Hub's kernel repository
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
EXTENSION = HERE / "torch-ext" / "focus_attention"


def copy_modules() -> None:
    """Make the extension's modules those of the package."""
    for name in MODULES:
        shutil.copyfile(SOURCE / name, EXTENSION / name)


def build(into: Path, backend: str) -> Path:
    """Write a build variant, as kernel-builder does for what is Python alone.

    Args:
        into: folder of the repository on a Hub.
        backend: ``"cuda"``; ``"cpu"`` for Triton's interpreter.

    Returns:
        The variant's folder.
    """
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    variant = into / "build" / f"torch-{backend}"
    compatible = variant / general["name"].replace("-", "_")
    compatible.mkdir(parents=True, exist_ok=True)
    for path in sorted(EXTENSION.glob("*.py")):
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
    for name in ("CARD.md", "build.toml"):
        shutil.copyfile(HERE / name, into / ("README.md" if name == "CARD.md" else name))
    shutil.copytree(HERE / "benchmarks", into / "benchmarks", dirs_exist_ok=True)
    return variant


def _digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="folder of the repository on a Hub")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    copy_modules()
    if chosen.into is not None:
        print(build(chosen.into, chosen.backend))
