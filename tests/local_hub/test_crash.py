"""The local Hub killed at any moment: a repository is as it was, or as it should become, never in between."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from functools import partial

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from focus_hf.local_hub import LocalHub, serve
from focus_hf.local_hub.changes import Changes
from focus_hf.local_hub.http import Gone
from focus_hf.local_hub.hub import OWNER, Hub
from focus_hf.local_hub.pull_requests import new_pull_request
from tests.families import httpx

LARGE = os.urandom(400_000)


def start(root, port):
    """A server in a process of its own, to be killed."""
    child = os.fork()
    if child == 0:
        try:
            serve(root, port=port, users={"t": OWNER})
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return child
        except OSError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)


def send_half(port, method, path, length, content):
    client = socket.create_connection(("127.0.0.1", port))
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer t\r\nContent-Length: {length}\r\n\r\n"
    )
    client.sendall(head.encode() + content)
    return client


def everything(api):
    info = api.model_info("demo/x", files_metadata=True)
    return info.sha, [(s.rfilename, s.blob_id) for s in info.siblings], len(api.list_repo_commits("demo/x"))


def test_killed_in_the_middle_of_uploads(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = HfApi(endpoint=f"http://127.0.0.1:{port}", token="t")
    oid = hashlib.sha256(LARGE).hexdigest()
    server = start(tmp_path, port)
    try:
        api.create_repo("demo/x")
        api.upload_file(path_or_fileobj=b"kept", path_in_repo="kept.txt", repo_id="demo/x")
        before = everything(api)
        body = {"operation": "upload", "objects": [{"oid": oid, "size": len(LARGE)}]}
        headers = {"Authorization": "Bearer t"}
        answer = httpx.post(f"{api.endpoint}/demo/x.git/info/lfs/objects/batch", json=body, headers=headers)
        href = answer.json()["objects"][0]["actions"]["upload"]["href"].removeprefix(api.endpoint)
        whole = b'{"key": "header", "value": {"summary": "s"}}\n'
        whole += b'{"key": "file", "value": {"path": "a", "content": "b"}}\n'
        clients = [
            send_half(port, "PUT", href, len(LARGE), LARGE[:200_000]),
            send_half(port, "POST", "/api/models/demo/x/commit/main", len(whole) + 10, whole),
        ]
        deadline = time.monotonic() + 10
        while not list((tmp_path / "staging").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)  # until there is a file that is not complete
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    for client in clients:
        client.close()
    assert list((tmp_path / "staging").iterdir())

    with LocalHub(tmp_path, token="t") as again:
        api = HfApi(endpoint=again.endpoint, token="t")
        assert everything(api) == before
        assert not list((tmp_path / "staging").iterdir()) and not list(tmp_path.glob("models/*/*.git/lfs/*"))
        api.upload_file(path_or_fileobj=LARGE, path_in_repo="large.bin", repo_id="demo/x")
        assert httpx.get(f"{api.endpoint}/demo/x/resolve/main/large.bin").content == LARGE


def killed_at(step, work):
    """Whether a process doing ``work`` was killed at its ``step``-th change of a file, and had not finished before."""
    child = os.fork()
    if child == 0:
        steps = 0
        gc.disable()

        def counting(real):
            def call(*args, **kwargs):
                nonlocal steps
                steps += 1
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("replace", "rename", "write", "ftruncate"):
            setattr(os, name, counting(getattr(os, name)))
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the work itself failed at step {step}"
    return status == signal.SIGKILL


def check(folder):
    """git's own opinion, and that nothing of the killed process is left once somebody writes again."""
    found = subprocess.run(["git", "--git-dir", str(folder), "fsck", "--strict"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not list(folder.glob("**/*.lock")) and not (folder.parents[2] / "writing").read_bytes()


def push(root, step, head):
    """As another server would: with nothing open yet."""
    repository = Hub(root).find("models", "demo/x")
    changes = Changes({f"folder-{step}/{step}.txt": repository.store_blob(b"content %d" % step)})
    repository.commit("refs/heads/main", changes, f"step {step}", "demo", head)


def test_killed_at_any_step_of_a_commit(tmp_path):
    hub = Hub(tmp_path)
    hub.create("models", "demo/x", "demo", private=False)
    found = hub.find("models", "demo/x")
    head = found.resolve("main")
    seen = {"before": 0, "after": 0}
    for step in range(1, 200):
        killed = killed_at(step, partial(push, tmp_path, step, head))
        now = found.resolve("main")
        if now == head:
            assert killed
            seen["before"] += 1
        else:  # all of it is there
            assert found.read(found.entry(now, f"folder-{step}/{step}.txt")) == b"content %d" % step
            seen["after"] += 1
        # The same push again works, though the killed process may have left locks behind.
        changes = Changes({f"again-{step}.txt": found.store_blob(b"again")})
        head = found.commit("refs/heads/main", changes, "again", "demo", now)
        if not killed:
            break
    assert seen["before"] > 5 and seen["after"] >= 2
    check(found.folder)
    assert {f"again-{n}.txt" for n in range(1, step + 1)} <= set(found.files(head))


def change(root, what, name):
    hub = Hub(root)
    if what == "create":
        hub.create("models", name, "demo", private=True)
    elif what == "delete":
        hub.delete("models", name)
    else:
        repository = hub.find("models", name)
        with new_pull_request(repository, "demo", "title", "main") as entry:
            changes = Changes({"x.txt": repository.store_blob(b"x")})
            start = repository.resolve("main")
            repository.commit(entry["ref"], changes, "title", "demo", start=start)


@pytest.mark.parametrize("what", ["create", "delete", "pull request"])
def test_killed_at_any_step_of_other_changes(tmp_path, what):
    hub = Hub(tmp_path)
    seen = set()
    for step in range(1, 300):
        name = f"demo/x{step}"
        if what != "create":
            hub.create("models", name, "demo", private=True)

        killed = killed_at(step, partial(change, tmp_path, what, name))
        try:
            found = hub.find("models", name)
        except Gone:
            found = None
        seen.add(found is not None if what != "pull request" else len(found.meta()["pull_requests"]))
        if found is not None:  # and if so, whole
            assert set(found.files(found.resolve("main"))) == {".gitattributes"} and found.meta()["private"]
        if what == "pull request":
            with new_pull_request(found, "demo", "again", "main") as entry:
                found.add_ref(entry["ref"], found.resolve("main"))
            numbers = [known["num"] for known in found.meta()["pull_requests"]]
            assert numbers == list(range(1, len(numbers) + 1)) and numbers
            check(found.folder)
        elif found is None:
            hub.create("models", name, "demo", private=True)
        if not killed:
            break
    assert not killed and len(seen) == 2
    hub.close()
    Hub(tmp_path).close()
    assert not list((tmp_path / "staging").iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("threshold", [10**9, 1000], ids=["in the commit", "in LFS"])
def test_a_full_disk_is_told_and_nothing_is_half_written(small_disk, threshold, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with LocalHub(small_disk / "hub", token="t", lfs_threshold=threshold) as hub:
        api = HfApi(endpoint=hub.endpoint, token="t")
        api.create_repo("demo/x")
        api.upload_file(path_or_fileobj=b"small", path_in_repo="a.txt", repo_id="demo/x")
        for size in (6_000_000, 3_900_000, 2_500_000):  # more than the disk; and more than half of it, twice
            before = everything(api)
            with pytest.raises((HfHubHTTPError, RuntimeError)) as error:
                for _ in range(3):
                    api.upload_file(path_or_fileobj=os.urandom(size), path_in_repo="large", repo_id="demo/x")
                    before = everything(api)
            cause = error.value if isinstance(error.value, HfHubHTTPError) else error.value.__cause__
            assert cause.response.status_code == 507 and "No space is left on the Hub's disk" in str(cause)
            assert everything(api) == before
            left = [path for path in small_disk.rglob("*") if path.is_file() and path.suffix == ".lock"]
            left += (small_disk / "hub" / "staging").iterdir()
            assert not left
        assert api.upload_file(path_or_fileobj=b"fits", path_in_repo="b.txt", repo_id="demo/x").oid
        fsck = ["git", "-C", str(small_disk / "hub" / "models" / "demo" / "x.git"), "fsck", "--strict"]
        assert shutil.which("git") is None or subprocess.run(fsck, capture_output=True).returncode == 0
    assert "Traceback" not in caplog.text
