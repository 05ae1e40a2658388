"""Where commands show what they deliver."""

from __future__ import annotations

import pytest

from focus_hf.output import WIDE, screen


def test_tables_in_logs_are_not_broken_up_and_columns_has_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert screen().width == WIDE  # pytest's standard output is no terminal
    monkeypatch.setenv("COLUMNS", "60")
    assert screen().width == 60
