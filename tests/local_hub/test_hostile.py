"""The local Hub asked by who means it ill: an answer below 500, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from focus_hf.local_hub import LocalHub, http, uploads, visit
from focus_hf.local_hub.changes import Changes
from focus_hf.local_hub.pages import MAX_RENDERED
from tests.families import httpx

OWNER = {"Authorization": "Bearer t"}
HTTP = httpx.Client(headers=OWNER, timeout=60)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), token="t") as running:
        yield running


@pytest.fixture(scope="module")
def api(hub):
    return HfApi(endpoint=hub.endpoint, token="t")


@pytest.fixture(scope="module")
def repo(api):
    api.create_repo("demo/fuzzed")
    api.upload_file(path_or_fileobj=b"hello", path_in_repo="a/b.txt", repo_id="demo/fuzzed")
    api.create_pull_request("demo/fuzzed", title="talk")
    return "demo/fuzzed"


def commit(hub, repo, *lines):
    """A commit's answer; a line is what JSON holds, or bytes as they are."""
    body = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return HTTP.post(f"{hub.endpoint}/api/models/{repo}/commit/main", content=body)


HEADER = {"key": "header", "value": {"summary": "s"}}


def add(path, content="x"):
    return {"key": "file", "value": {"path": path, "content": content}}


# -- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["refs/heads/main", "refs/pr/1", "refs/tags/x", "HEAD", "0" * 40])
def test_tags_and_branches_cannot_be_called_like_something_else(api, repo, name):
    for create in (lambda: api.create_tag(repo, tag=name), lambda: api.create_branch(repo, branch=name)):
        with pytest.raises(HfHubHTTPError) as error:
            create()
        assert error.value.response.status_code == 400


def test_a_full_name_means_that_reference_whatever_tags_there_are(hub, api):
    api.create_repo("demo/shadow")
    first = api.model_info("demo/shadow").sha
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id="demo/shadow")
    pull_request = api.upload_file(path_or_fileobj=b"2", path_in_repo="b", repo_id="demo/shadow", create_pr=True)
    git = hub.app.state.hub.find("models", "demo/shadow").git
    for name in (b"refs/heads/main", b"refs/pr/1"):  # as an older version of this Hub let anybody make
        git.refs[b"refs/tags/" + name] = first.encode()
    assert api.model_info("demo/shadow", revision="refs/heads/main").sha == api.model_info("demo/shadow").sha != first
    assert api.model_info("demo/shadow", revision="refs/pr/1").sha == pull_request.oid != first


# -- bodies --------------------------------------------------------------------------------------------------------

ODD = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\ud800",
    "a\nb",
    [],
    [[]],
    [1],
    {},
    {"a": {}},
    [{}],
    [None],
    ["x" * 9],
]
RAW = [b"Infinity", b"-Infinity", b"NaN", b"1e999", b"9" * 5000, b"[" * 100_000, b"\xff", b"{", b'{"a":1}{"a":2}']

PLACES = [
    ("POST", "/api/repos/create", ("name", "organization", "type", "private", "visibility")),
    ("DELETE", "/api/repos/delete", ("name", "organization", "type")),
    ("POST", "/api/validate-yaml", ("content",)),
    ("PUT", "/api/models/demo/fuzzed/settings", ("gated",)),
    ("POST", "/api/models/demo/fuzzed/paths-info/main", ("paths",)),
    ("POST", "/api/models/demo/fuzzed/preupload/main", ("files",)),
    ("POST", "/demo/fuzzed.git/info/lfs/objects/batch", ("objects",)),
    ("POST", "/api/models/demo/fuzzed/branch/new", ("startingPoint",)),
    ("POST", "/api/models/demo/fuzzed/tag/main", ("tag",)),
    ("POST", "/api/models/demo/fuzzed/discussions", ("title", "pullRequest")),
    ("POST", "/api/models/demo/fuzzed/discussions/1/status", ("status",)),
    ("POST", "/api/models/demo/fuzzed/discussions/1/merge", ("comment",)),
    ("POST", "/api/models/demo/fuzzed/user-access-request/grant", ("user",)),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1].rpartition("/")[2])
def test_no_body_breaks_it(hub, repo, place):
    method, path, fields = place
    sound = {
        "name": "nobody",
        "type": "model",
        "status": "closed",
        "title": "t",
        "pullRequest": True,
        "oid": "0" * 64,
        "size": 1,
    }
    bodies = [json.dumps({**sound, name: value}).encode() for name, value in itertools.product(fields, ODD)]
    bodies += [b'{"%s": %s}' % (name.encode(), raw) for name, raw in itertools.product(fields, RAW)] + RAW
    for size in RAW[:5]:
        bodies += [b'{"files": [{"path": "a", "size": %s}], "objects": [{"oid": "a", "size": %s}]}' % (size, size)]
    for body in bodies:
        answer = HTTP.request(method, hub.endpoint + path, content=body)
        assert answer.status_code < 500, (body[:100], answer.text[:300])


def test_no_line_of_a_commit_breaks_it(hub, repo):
    fields = {
        "file": ("path", "content", "encoding"),
        "lfsFile": ("path", "oid"),
        "deletedFile": ("path",),
        "deletedFolder": ("path",),
        "header": ("summary", "description", "parentCommit"),
    }
    for kind, value in itertools.product(fields, (None, 1.5, 10**30, "", "\ud800", [], {})):
        sound = {"path": "p", "content": "x", "oid": "0" * 64, "summary": "s"}
        for line in (value, *({**sound, inside: value} for inside in fields[kind])):
            assert commit(hub, repo, HEADER, {"key": kind, "value": line}).status_code < 500, line
        assert commit(hub, repo, HEADER, {"key": value, "value": sound}).status_code < 500
    for raw in RAW:
        assert commit(hub, repo, HEADER, raw).status_code == 400


# -- sizes ---------------------------------------------------------------------------------------------------------


def refused(answer, status, *words):
    assert answer.status_code == status, answer.text
    assert all(word in answer.json()["error"] for word in words), answer.text


@pytest.fixture
def small(tmp_path):
    """A Hub that takes small files only."""
    with LocalHub(tmp_path, token="t", lfs_threshold=60_000) as running:
        client = HfApi(endpoint=running.endpoint, token="t")
        client.create_repo("demo/fuzzed")
        yield running


def test_every_bound_says_its_size(small, monkeypatch):
    hub, repo = small, "demo/fuzzed"
    monkeypatch.setattr(visit, "MAX_JSON", 10_000)
    monkeypatch.setattr(http, "MAX_FILES", 100)
    monkeypatch.setattr(uploads, "MAX_FILES", 100)
    monkeypatch.setattr(uploads, "MAX_COMMIT", 200_000)
    api = f"{hub.endpoint}/api/models/{repo}"
    refused(HTTP.post(f"{hub.endpoint}/api/validate-yaml", json={"content": "x" * 10_000}), 413, "10,000 bytes")
    files = [{"path": "a", "size": 1}] * 101
    refused(HTTP.post(f"{api}/preupload/main", json={"files": files}), 413, "101 files", "100")
    refused(HTTP.post(f"{api}/paths-info/main", json={"paths": ["a"] * 101}), 413, "101 files", "100")
    batch = {"objects": [{"oid": "0" * 64, "size": 1}] * 101}
    refused(HTTP.post(f"{hub.endpoint}/{repo}.git/info/lfs/objects/batch", json=batch), 413, "101 files", "100")
    batch = {"objects": [{"oid": "0" * 64, "size": uploads.MAX_LFS + 1}]}
    refused(HTTP.post(f"{hub.endpoint}/{repo}.git/info/lfs/objects/batch", json=batch), 422, "50,000,000,000")
    refused(commit(hub, repo, HEADER, *[add(f"{n}") for n in range(101)]), 413, "100 files")
    refused(commit(hub, repo, HEADER, add("a", "x" * 150_000)), 413, "145,536 bytes", "LFS")
    refused(commit(hub, repo, HEADER, *[add("a", "x" * 60_000)] * 4), 413, "200,000 bytes")
    assert commit(hub, repo, HEADER, add("a.txt", "x" * 60_000)).status_code == 200
    refused(HTTP.post(f"{api}/discussions", json={"title": "x" * 600, "pullRequest": True}), 400, "600", "512")


@pytest.mark.parametrize(
    "path",
    ["NUL", "con.txt", "a/Aux", "com1.tar.gz", "lpt9 .x", "COM¹", "conout$", "figures/prn.png", "/".join("a" * 70)],
)
def test_names_that_windows_or_a_walk_cannot_have(hub, api, repo, path):
    refused(commit(hub, repo, HEADER, add(path)), 400, "Invalid path")
    for fine in ("console.txt", "a/nullable", "com.txt", "COM10"):
        assert commit(hub, repo, HEADER, add(f"fine/{fine}", path)).status_code == 200
    with pytest.raises(HfHubHTTPError, match="device on Windows"):
        api.create_repo("demo/nul")


@pytest.mark.parametrize(
    "path",
    ["C:/x", "c:x", "a.", "a /b", "a./b", "x ", "evil\u202egnp.exe", "a\u200b", "a\x1b[2J", "a\x85b", "a\u2028b",
     "\ufeffa", "stream:name"],
)  # fmt: skip
def test_names_that_show_something_else_or_change_on_their_way(hub, repo, path):
    answer = commit(hub, repo, HEADER, add(path))
    refused(answer, 400, "Invalid path", "every system")
    assert answer.json()["error"].isprintable()
    for fine in ("a.b", ".gitignore", "a b", "größe.txt", "数据.json", "नमूना.md"):
        assert commit(hub, repo, HEADER, add(f"fine/{fine}", path)).status_code == 200


# -- time ----------------------------------------------------------------------------------------------------------


def seconds(call):
    """CPU time of this process, in which the Hub runs: other work on the machine does not count."""
    started = time.process_time()
    answer = call()
    assert answer.status_code < 500
    return time.process_time() - started


def test_many_paths_among_many_files(hub, api):
    """Took 7.5 s when each path was compared with each file."""
    api.create_repo("demo/many")
    repository = hub.app.state.hub.find("models", "demo/many")
    blob = repository.store_blob(b"x")
    changes = Changes({f"folder-{n % 40}/{n}.txt": blob for n in range(2_000)})
    repository.commit("refs/heads/main", changes, "many", "demo")
    body = {"paths": [f"folder-{n % 50}" for n in range(http.MAX_FILES)]}
    assert seconds(lambda: HTTP.post(f"{hub.endpoint}/api/models/demo/many/paths-info/main", json=body)) < 4
    found = HTTP.post(
        f"{hub.endpoint}/api/models/demo/many/paths-info/main", json={"paths": ["folder-1", "folder-99"]}
    )
    assert [row["path"] for row in found.json()] == ["folder-1"]


@pytest.mark.parametrize("row", ["|a|\n", "|a" * 50 + "|\n"], ids=["narrow", "wide"])
def test_a_large_table_on_a_card(hub, api, row):
    """Took 9.6 s at 0.8 MB; longer cards are shown as they were written."""
    api.create_repo("demo/table", exist_ok=True)
    head = row + row.replace("a", "-")
    for size in (MAX_RENDERED, 800_000):
        card = (head + row * (size // len(row)))[:size]
        assert commit(hub, "demo/table", HEADER, add("README.md", card)).status_code == 200
        assert seconds(lambda: HTTP.get(f"{hub.endpoint}/demo/table")) < 5
        page = HTTP.get(f"{hub.endpoint}/demo/table").text
        assert ("<table>\n<thead>" in page) == (size == MAX_RENDERED) and "a</td>" in page or "|a|" in page
