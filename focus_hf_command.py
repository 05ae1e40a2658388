"""Starts the command line without importing torch.

Importing ``focus_hf`` registers the adapter type with PEFT, and so imports torch, which takes seconds. Commands that
only talk to the Hub do not need it, so the package is entered here without running its ``__init__``; what needs the
adapter imports ``focus_hf.adapter``, and the registration comes with that.
"""

import importlib.util
import sys


def main() -> None:
    """Entry point of ``focus-hf`` and of ``hf focus``."""
    spec = importlib.util.find_spec("focus_hf")
    assert spec is not None
    sys.modules["focus_hf"] = importlib.util.module_from_spec(spec)
    from focus_hf.cli import main as run

    run()
