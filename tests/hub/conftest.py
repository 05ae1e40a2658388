"""A local Hub, its client, and an adapter to push."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi

from focus_hf.hub.save import save_adapter
from focus_hf.hub.server import LocalHub
from tests.families import focus_model


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token="t")


@pytest.fixture
def adapter(tmp_path):
    return save_adapter(focus_model("llama"), tmp_path / "adapter")


@pytest.fixture
def name(request):
    """A repository of the test's own."""
    return "demo/" + request.node.name.split("[")[0].replace("_", "-")[:60]
