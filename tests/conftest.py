"""Set before any library of Hugging Face is imported: no test may reach for the network."""

import gc
import os
import tempfile

_HOME = tempfile.TemporaryDirectory(prefix="focus-hf-tests-")
os.environ["HF_HOME"] = _HOME.name  # a cache of its own: what an earlier run left there must not matter
os.environ["HF_HUB_OFFLINE"] = "0"  # tests talk to a Hub on this machine
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # and nothing else: this port refuses
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402

try:
    from hypothesis import settings
except ImportError:  # the environment of vLLM's tests has none, and they need none
    pass
else:  # how long an example takes says nothing on a busy machine
    settings.register_profile("focus", settings.default, deadline=None)
    settings.load_profile("focus")

torch.set_num_threads(1)  # tests run in several processes at once; tiny tensors gain nothing from threads


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder with a saved model ``base``, ``train.txt`` and ``held_out.txt``."""
    from tests.tiny import make_base

    return make_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def adapter(tmp_path):
    """Folder of a tiny adapter, saved by this package."""
    from focus_hf.adapter.save import save_adapter
    from tests.families import focus_model

    return save_adapter(focus_model("llama"), tmp_path / "adapter")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A local Hub in which the token "t" may do everything."""
    from focus_hf.local_hub import LocalHub

    with LocalHub(tmp_path_factory.mktemp("hub"), token="t") as running:
        yield running


@pytest.fixture
def api(hub):
    """The client of that Hub."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.endpoint, token="t")


@pytest.fixture
def own_name(request):
    """A name of the test's own, for a repository."""
    return request.node.name.split("[")[0].replace("_", "-")[-60:].strip("-")


def pytest_collection_modifyitems(config, items):
    """Slow tests run when they are asked for; GPU tests where there is one."""
    if "slow" not in (config.getoption("-m") or ""):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What the imports left is for good: the collections that follow (some of transformers' own) pass over it."""
    gc.freeze()
