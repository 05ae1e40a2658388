"""A local Hub and its client."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi

from focus_hf.local_hub import LocalHub


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), token="t") as running:
        yield running


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token="t")


@pytest.fixture
def name(request):
    """A repository of the test's own."""
    return "demo/" + request.node.name.split("[")[0].replace("_", "-")[:60]
