import pytest

from tests.tiny import make_base


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder with ``base``, ``train.txt`` and ``held_out.txt``."""
    return make_base(tmp_path_factory.mktemp("tiny"))
