"""Files of the local Hub: large ones through LFS, parts of them, and downloads that break off."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, HfApi, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from focus_hf.local_hub import LocalHub, app, uploads
from tests.families import httpx

USERS = {"ada-w": "ada", "bob-w": "bob"}
LARGE = os.urandom(700_000)
OID = hashlib.sha256(LARGE).hexdigest()
HTTP = httpx.Client()
ADA, BOB = ({"Authorization": f"Bearer {token}"} for token in USERS)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), users=USERS, lfs_threshold=1000) as running:
        yield running


@pytest.fixture(autouse=True)
def without_xet(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token="ada-w")


@pytest.fixture
def repo(api, own_name):
    return api.create_repo(f"ada/{own_name}", exist_ok=True).repo_id


def batch(hub, repo, oid, size, headers=ADA):
    body = {"operation": "upload", "objects": [{"oid": oid, "size": size}]}
    answer = HTTP.post(f"{hub.endpoint}/{repo}.git/info/lfs/objects/batch", json=body, headers=headers)
    answer.raise_for_status()
    return answer.json()["objects"][0].get("actions")


def stored(hub, oid):
    here = hub.app.state.hub
    return any(here.root.glob(f"*/*/*.git/lfs/{oid}")) or any(here.staging.iterdir())


def test_large_files_go_there_and_come_back(hub, api, repo, tmp_path):
    api.upload_file(path_or_fileobj=LARGE, path_in_repo="large.bin", repo_id=repo)
    entry = api.get_paths_info(repo, ["large.bin"])[0]
    assert entry.lfs.sha256 == OID and entry.size == len(LARGE)
    path = hf_hub_download(repo, "large.bin", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert Path(path).read_bytes() == LARGE
    assert batch(hub, repo, OID, len(LARGE)) is None  # nothing to send a second time
    copied = CommitOperationCopy("large.bin", "copy.bin")
    api.create_commit(repo, [copied], commit_message="copy")
    assert api.get_paths_info(repo, ["copy.bin"])[0].lfs.sha256 == OID
    api.create_repo(repo, repo_type="dataset")
    api.upload_file(path_or_fileobj=LARGE + b"d", path_in_repo="large.bin", repo_id=repo, repo_type="dataset")
    path = hf_hub_download(repo, "large.bin", repo_type="dataset", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert Path(path).read_bytes() == LARGE + b"d"


def test_wrong_content_is_refused_and_not_kept(hub, repo):
    promised = b"promised" * 1000
    oid = hashlib.sha256(promised).hexdigest()
    actions = batch(hub, repo, oid, len(promised))
    for content in (b"Promised" * 1000, promised[:-1], promised + b"x", b""):
        answer = HTTP.put(actions["upload"]["href"], content=content)
        assert answer.status_code == 422, content[:20]
        assert not stored(hub, oid)
    assert HTTP.put(actions["upload"]["href"], content=promised).status_code == 200
    assert stored(hub, oid)


def test_uploads_need_the_address_that_was_given_for_them(hub, repo, monkeypatch):
    content = b"x" * 2000
    oid, other = hashlib.sha256(content).hexdigest(), hashlib.sha256(b"other").hexdigest()
    href = batch(hub, repo, oid, len(content))["upload"]["href"]
    forged = [
        f"{hub.endpoint}/lfs/{oid}",
        href.replace(oid, other),
        href.replace("size=2000", "size=9000"),
        href.replace("ada%2F", "bob%2F"),
        href.replace("expires=", "expires=9"),
        href[:-1] + ("0" if href[-1] != "0" else "1"),
        href.replace("signature=", "signature=%C3%A9"),
    ]
    for address in forged:
        assert HTTP.put(address, content=content, headers=ADA).status_code == 403, address
    late = time.time() + uploads.UPLOAD_STARTS_WITHIN + 1
    monkeypatch.setattr(uploads.time, "time", lambda: late)
    assert HTTP.put(href, content=content).status_code == 403
    monkeypatch.undo()
    assert not stored(hub, oid)
    assert HTTP.put(href, content=content).status_code == 200


def test_who_only_knows_a_hash_does_not_get_the_file(hub, api, repo, tmp_path):
    """Through a repository of one's own, to which one commits a pointer to somebody else's private file."""
    secret = os.urandom(5000)
    oid = hashlib.sha256(secret).hexdigest()
    api.update_repo_settings(repo, private=True)
    api.upload_file(path_or_fileobj=secret, path_in_repo="secret.bin", repo_id=repo)
    assert Path(hf_hub_download(repo, "secret.bin", endpoint=hub.endpoint, token="ada-w", cache_dir=tmp_path)).exists()
    for headers in ({}, BOB):
        url = f"{hub.endpoint}/{repo}/resolve/main/secret.bin"
        for answer in (HTTP.get(url, headers=headers), HTTP.head(url, headers=headers)):
            assert answer.status_code in (401, 404) and "x-linked-etag" not in answer.headers
    bob = HfApi(endpoint=hub.endpoint, token="bob-w")
    bob.create_repo("bob/thief")
    assert batch(hub, "bob/thief", oid, len(secret), BOB)["upload"]  # as if it were not there
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(secret)}\n".encode()
    with pytest.raises(HfHubHTTPError, match="not uploaded"):
        bob.create_commit("bob/thief", [CommitOperationAdd("x.bin", pointer)], commit_message="regular file")
    header = {"key": "header", "value": {"summary": "s"}}
    item = {"key": "lfsFile", "value": {"path": "x", "oid": oid}}
    body = f"{json.dumps(header)}\n{json.dumps(item)}"
    answer = HTTP.post(f"{hub.endpoint}/api/models/bob/thief/commit/main", content=body, headers=BOB)
    assert answer.status_code == 400 and "not uploaded" in answer.json()["error"]
    assert bob.list_repo_files("bob/thief") == [".gitattributes"]
    with pytest.raises(RepositoryNotFoundError):
        bob.model_info(repo)


def test_files_that_look_nearly_like_pointers_are_just_files(hub, api, repo):
    for n, rest in enumerate(("", "oid sha256:xyz\nsize 1\n", "oid\nsize", f"oid sha256:{'0' * 64}\nsize -1\n")):
        content = b"version https://git-lfs.github.com/spec/v1\n" + rest.encode()
        api.upload_file(path_or_fileobj=content, path_in_repo=f"{n}.txt", repo_id=repo)
        assert HTTP.get(f"{hub.endpoint}/{repo}/resolve/main/{n}.txt").content == content


def test_a_client_that_dies_in_the_middle_leaves_nothing(hub, api, repo):
    content = os.urandom(300_000)
    oid, before = hashlib.sha256(content).hexdigest(), api.model_info(repo).sha
    href = batch(hub, repo, oid, len(content))["upload"]["href"]
    port = int(hub.endpoint.rsplit(":", 1)[1])
    for method, path, headers in (
        ("PUT", href.removeprefix(hub.endpoint), ""),
        ("POST", f"/api/models/{repo}/commit/main", "Authorization: Bearer ada-w\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content[:150_000])
    deadline = time.monotonic() + 5
    while stored(hub, oid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stored(hub, oid) and api.model_info(repo).sha == before
    api.upload_file(path_or_fileobj=content, path_in_repo="w.bin", repo_id=repo)
    assert api.get_paths_info(repo, ["w.bin"])[0].lfs.sha256 == oid


# -- parts ---------------------------------------------------------------------------------------------------------

SMALL = bytes(range(256)) * 2
FILES = {"small.bin": SMALL, "large.bin": SMALL[::-1], "empty.bin": b""}
RANGES = {
    "bytes=0-0": (0, 1),
    "bytes=100-199": (100, 200),
    "bytes=500-": (500, 512),
    "bytes=-12": (500, 512),
    "bytes=-9999": (0, 512),
    "bytes=510-9999": (510, 512),
    "Bytes = 1 - 2": (1, 3),
    "bytes=512-": None,
    "bytes=600-700": None,
    "bytes=-0": None,
    "bytes=0-1,5-6": ...,
    "bytes=5-1": ...,
    "bytes=-": ...,
    "bytes=a-b": ...,
    "bytes=²-": ...,
    "items=0-1": ...,
    "bytes": ...,
    f"bytes={'9' * 5000}-": ...,
}


@pytest.fixture(scope="module")
def parts(hub):
    """Address of the same content inside git and in LFS."""
    api = HfApi(endpoint=hub.endpoint, token="ada-w")
    api.create_repo("ada/parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for path, content in FILES.items():
            patch.setattr(hub.app.state.hub, "lfs_threshold", 100 if path == "large.bin" else 1000)
            api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id="ada/parts")
    lfs_files = [entry.path for entry in api.list_repo_tree("ada/parts") if entry.lfs]
    assert lfs_files == ["large.bin"]
    return f"{hub.endpoint}/ada/parts/resolve/main"


@pytest.mark.parametrize("name", ["small.bin", "large.bin"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ranges(parts, name, method):
    content = FILES[name]
    for header, span in RANGES.items():
        answer = HTTP.request(method, f"{parts}/{name}", headers={"Range": header.encode()})
        if span is None:
            assert answer.status_code == 416, header
            assert answer.headers["content-range"] == f"bytes */{len(content)}"
            continue
        start, stop = (0, len(content)) if span is ... else span
        assert answer.status_code == (200 if span is ... else 206), header
        assert answer.headers["content-length"] == str(stop - start)
        assert answer.content == (b"" if method == "HEAD" else content[start:stop])
        expected = None if span is ... else f"bytes {start}-{stop - 1}/{len(content)}"
        assert answer.headers.get("content-range") == expected


def test_ranges_of_another_version_and_of_nothing(parts):
    etag = HTTP.head(f"{parts}/large.bin").headers["etag"]
    for condition, status in ((etag, 206), ('"other"', 200)):
        headers = {"Range": "bytes=1-2", "If-Range": condition}
        assert HTTP.get(f"{parts}/large.bin", headers=headers).status_code == status
    assert HTTP.get(f"{parts}/empty.bin").content == b""
    assert HTTP.get(f"{parts}/empty.bin", headers={"Range": "bytes=0-"}).status_code == 416


class CutsOff:
    """A Hub whose first answer to a download ends in the middle."""

    def __init__(self, app):
        self.app, self.state, self.ranges = app, app.state, []

    async def __call__(self, scope, receive, send):
        if scope["method"] != "GET" or "/resolve/" not in scope["path"]:
            return await self.app(scope, receive, send)
        self.ranges.append(dict(scope["headers"]).get(b"range"))
        left = 300_000 if len(self.ranges) == 1 else 10**9

        async def cutting(message):
            nonlocal left
            body = message.get("body", b"")
            if len(body) > left:
                await send({**message, "body": body[:left], "more_body": True})
                raise ConnectionAbortedError("the test pulled the plug")
            left -= len(body)
            await send(message)

        await self.app(scope, receive, cutting)


def test_a_download_that_breaks_off_is_resumed(tmp_path, monkeypatch):
    plain = app.create_app
    monkeypatch.setattr(app, "create_app", lambda *args, **kwargs: CutsOff(plain(*args, **kwargs)))
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # it keeps the whole chunks of a broken download
    with LocalHub(tmp_path / "root", lfs_threshold=1000, token="t") as hub:
        api = HfApi(endpoint=hub.endpoint, token="t")
        api.create_repo("demo/x")
        api.upload_file(path_or_fileobj=LARGE, path_in_repo="large.bin", repo_id="demo/x")
        path = hf_hub_download("demo/x", "large.bin", endpoint=hub.endpoint, cache_dir=tmp_path)
        assert Path(path).read_bytes() == LARGE
        assert hub.app.ranges == [None, b"bytes=300000-"]
