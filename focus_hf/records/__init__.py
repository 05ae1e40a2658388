"""What lies in an adapter's folder: its files, what was measured, what its groups hold. Nothing here needs torch."""

from .adapter_files import AdapterConfig, AdapterFileError, check_adapter, check_writable, read_config
from .group_facts import GroupFacts, LayerFacts
from .group_report import GroupReport
from .results import Evaluation, Results, load_results, save_results
from .sample import TokenSample
from .tasks import TaskTable, code_tables, ruler_tables

__all__ = [
    "AdapterConfig",
    "AdapterFileError",
    "Evaluation",
    "GroupFacts",
    "GroupReport",
    "LayerFacts",
    "Results",
    "TaskTable",
    "TokenSample",
    "check_adapter",
    "check_writable",
    "code_tables",
    "load_results",
    "read_config",
    "ruler_tables",
    "save_results",
]
