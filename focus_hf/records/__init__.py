"""What lies in an adapter's folder: its files, what was measured, what its groups hold. Nothing here needs torch."""

from .adapter_files import AdapterConfig, AdapterFileError, check_adapter, check_writable, read_config
from .group_facts import GroupFacts, LayerFacts
from .group_report import GroupReport
from .results import Evaluation, Results, load_results, save_results
from .ruler import RulerTable, ruler_tables
from .sample import TokenSample

__all__ = [
    "AdapterConfig",
    "AdapterFileError",
    "Evaluation",
    "GroupFacts",
    "GroupReport",
    "LayerFacts",
    "Results",
    "RulerTable",
    "TokenSample",
    "check_adapter",
    "check_writable",
    "load_results",
    "read_config",
    "ruler_tables",
    "save_results",
]
