"""Where a test pushes to."""

from __future__ import annotations

import pytest


@pytest.fixture
def name(own_name):
    """A repository of the test's own."""
    return f"demo/{own_name}"
