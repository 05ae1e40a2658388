"""Everything that can go wrong between two machines: one clear line, and nothing half done."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvicorn
from huggingface_hub import HfApi

import focus_hf
from focus_hf.adapter.save import save_adapter
from focus_hf.hub import HubError
from focus_hf.hub.errors import hub_errors
from focus_hf.local_hub import LocalHub
from focus_hf.local_hub.app import create_app
from focus_hf.records import AdapterFileError
from tests.families import focus_model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return save_adapter(focus_model("llama"), tmp_path_factory.mktemp("trouble") / "adapter")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, adapter):
    with LocalHub(tmp_path_factory.mktemp("hub"), token="t") as running:
        focus_hf.push_to_hub(
            adapter, "demo/a", base_model="demo/base", license="mit", endpoint=running.endpoint, token="t"
        )
        yield running


def in_a_process(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, focus_hf\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


PULL = "print(focus_hf.pull('demo/a', local_files_only=len(sys.argv) > 1))"


def test_offline_from_the_cache_and_without_it(hub, tmp_path):
    online = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    code, first, error = in_a_process(PULL, **online)
    assert code == 0, error
    code, again, error = in_a_process(PULL, "local", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "home"))
    assert code == 0 and again == first, error
    code, _, error = in_a_process(PULL, "local", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "empty"))
    assert code == 1 and "HubError: demo/a is not in the cache" in error
    code, _, error = in_a_process(PULL, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    assert code == 1 and "HubError: The Hub is switched off by HF_HUB_OFFLINE=1" in error


class CutOff:
    """An application that breaks the connection in the middle of a large file, the first times it is asked for."""

    def __init__(self, app, times):
        self.app, self.times, self.ranges = app, times, []

    async def __call__(self, scope, receive, send):
        large = scope["type"] == "http" and scope["method"] == "GET" and scope["path"].endswith("large.png")
        if not large:
            return await self.app(scope, receive, send)
        self.ranges.append(dict(scope["headers"]).get(b"range", b"").decode())
        if self.times == 0:
            return await self.app(scope, receive, send)
        self.times -= 1

        async def half(message):
            if message["type"] == "http.response.body" and message.get("body"):
                body = message["body"]
                await send({**message, "body": body[: len(body) * 3 // 4], "more_body": True})
                raise ConnectionAbortedError("cut")
            await send(message)

        await self.app(scope, receive, half)


def test_a_connection_cut_in_the_middle_of_a_download(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    app = CutOff(create_app(tmp_path / "hub", token="t"), times=2)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", port=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        pass
    try:
        endpoint = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        options = {"base_model": "demo/base", "license": "mit", "endpoint": endpoint, "token": "t"}
        large = shutil.copytree(adapter, tmp_path / "large")
        (large / "figures").mkdir()
        (large / "figures" / "large.png").write_bytes(os.urandom(25_000_000))
        focus_hf.push_to_hub(large, "demo/cut", **options)
        folder = focus_hf.pull("demo/cut", tmp_path / "pulled", endpoint=endpoint)
    finally:
        server.should_exit = True
        thread.join(10)
    assert app.times == 0 and len(app.ranges) >= 3
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0]) for wanted in app.ranges[1:]]
    assert starts[0] > 0 and starts == sorted(starts)  # it went on where it had stopped
    assert (folder / "figures" / "large.png").read_bytes() == (large / "figures" / "large.png").read_bytes()


def test_a_missing_file_and_a_file_that_is_cut_short(hub, adapter, tmp_path):
    api = HfApi(endpoint=hub.endpoint, token="t")
    api.create_repo("demo/no-weights")
    api.upload_file(
        path_or_fileobj=adapter / "adapter_config.json", path_in_repo="adapter_config.json", repo_id="demo/no-weights"
    )
    with pytest.raises(AdapterFileError, match="demo/no-weights on the Hub has no adapter_model.safetensors"):
        focus_hf.pull("demo/no-weights", endpoint=hub.endpoint)
    api.upload_file(
        path_or_fileobj=(adapter / "adapter_model.safetensors").read_bytes()[:-100],
        path_in_repo="adapter_model.safetensors",
        repo_id="demo/no-weights",
    )
    with pytest.raises(AdapterFileError, match="damaged or cut short"):
        focus_hf.pull("demo/no-weights", endpoint=hub.endpoint)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space is left on the disk.*free some, or move the cache with HF_HOME"),
        (errno.EROFS, "Files cannot be written here.*move the cache with HF_HOME"),
        (errno.EACCES, "Files cannot be written here.*move the cache with HF_HOME"),
    ],
)
def test_a_full_disk_and_a_read_only_cache(hub, tmp_path, monkeypatch, number, message):
    def fails(*args, **kwargs):
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))

    monkeypatch.setattr(HfApi, "hf_hub_download", fails)
    with pytest.raises(HubError, match=message):
        focus_hf.pull("demo/a", tmp_path / "new", endpoint=hub.endpoint)
    assert not (tmp_path / "new").exists()
    with pytest.raises(OSError, match="Is a directory"), hub_errors("demo/a", hub.endpoint):
        raise OSError(errno.EISDIR, "Is a directory")  # any other trouble stays what it is


def test_a_disk_that_fills_while_files_are_put_into_a_folder(hub, tmp_path, monkeypatch):
    def fails(source, target, **options):
        Path(target).write_bytes(Path(source).read_bytes()[:10])
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr("shutil.copyfile", fails)
    with pytest.raises(HubError, match="No space is left on the disk"):
        focus_hf.pull("demo/a", tmp_path / "out" / "adapter", endpoint=hub.endpoint)
    assert list((tmp_path / "out").iterdir()) == []  # not even a part of it


def test_errors_of_access_are_one_line(adapter, tmp_path):
    with LocalHub(tmp_path / "hub", users={"ada-token": "ada", "eve-token": "eve"}) as closed:
        api = HfApi(endpoint=closed.endpoint, token="ada-token")
        options = {"base_model": "demo/base", "license": "mit", "endpoint": closed.endpoint}
        focus_hf.push_to_hub(adapter, "ada/secret", private=True, token="ada-token", **options)
        with pytest.raises(HubError, match="ada/secret does not exist on .*, or is private.*hf auth login"):
            focus_hf.pull("ada/secret", endpoint=closed.endpoint, token="eve-token")
        with pytest.raises(HubError, match="ada/secret does not exist|does not accept the token"):
            focus_hf.pull("ada/secret", endpoint=closed.endpoint, token="expired-token")
        with pytest.raises(HubError, match="may not write to ada/new|does not exist"):
            focus_hf.push_to_hub(adapter, "ada/new", token="eve-token", **options)
        assert not api.repo_exists("ada/new")
        focus_hf.push_to_hub(adapter, "ada/gated", token="ada-token", **options)
        api.update_repo_settings("ada/gated", gated="manual")
        with pytest.raises(HubError, match="ada/gated is gated: ask for access on its page"):
            focus_hf.pull("ada/gated", endpoint=closed.endpoint, token="eve-token")
        assert Path(focus_hf.pull("ada/gated", endpoint=closed.endpoint, token="ada-token")).is_dir()
