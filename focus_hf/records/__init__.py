"""What lies in an adapter's folder: its files, what was measured, what its groups hold. Nothing here needs torch."""

from .adapter_files import AdapterConfig, AdapterFileError, check_adapter, check_writable, read_config
from .group_report import GroupFacts, GroupReport, LayerFacts
from .results import Evaluation, Results, load_results, save_results

__all__ = [
    "AdapterConfig",
    "AdapterFileError",
    "Evaluation",
    "GroupFacts",
    "GroupReport",
    "LayerFacts",
    "Results",
    "check_adapter",
    "check_writable",
    "load_results",
    "read_config",
    "save_results",
]
