"""Commits to the local Hub at once, and what must not be committed."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

from focus_hf.local_hub import LocalHub
from focus_hf.local_hub.changes import Changes
from focus_hf.local_hub.http import Gone
from focus_hf.local_hub.hub import Hub
from focus_hf.local_hub.repository import Repository
from tests.families import httpx

HEADERS = {"Authorization": "Bearer t"}
HTTP = httpx.Client()


@pytest.fixture
def repo(api, own_name):
    return api.create_repo(f"demo/{own_name}", exist_ok=True).repo_id


def at_once(calls):
    """Results of calls that start together; an exception is a result."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def add(api, repo, path, **kwargs):
    return lambda: api.create_commit(repo, [CommitOperationAdd(path, path.encode())], commit_message=path, **kwargs)


def test_of_pushes_with_the_same_parent_one_wins_and_nothing_is_lost(api, repo):
    start = api.model_info(repo).sha
    results = at_once([add(api, repo, f"{n}.txt", parent_commit=start) for n in range(6)])
    won = [n for n, result in enumerate(results) if not isinstance(result, Exception)]
    lost = [result for result in results if isinstance(result, Exception)]
    assert len(won) == 1 and {error.response.status_code for error in lost} == {412}
    assert all("A commit has happened since" in str(error) for error in lost)
    assert set(api.list_repo_files(repo)) == {".gitattributes", f"{won[0]}.txt"}
    for n in set(range(6)) - set(won):  # the losers look again and push again
        add(api, repo, f"{n}.txt", parent_commit=api.model_info(repo).sha)()
    assert {f"{n}.txt" for n in range(6)} < set(api.list_repo_files(repo))
    assert len(api.list_repo_commits(repo)) == 7


def test_pushes_through_two_servers_of_the_same_folder_lose_nothing(tmp_path):
    with LocalHub(tmp_path, token="t") as one, LocalHub(tmp_path, token="t") as two:
        apis = [HfApi(endpoint=hub.endpoint, token="t") for hub in (one, two)]
        apis[0].create_repo("demo/x")
        results = at_once([add(apis[n % 2], "demo/x", f"{n}.txt") for n in range(8)])
        assert not [result for result in results if isinstance(result, Exception)]
        assert {f"{n}.txt" for n in range(8)} < set(apis[1].list_repo_files("demo/x"))
        start = apis[0].model_info("demo/x").sha
        results = at_once([add(apis[n % 2], "demo/x", f"new-{n}.txt", parent_commit=start) for n in range(4)])
        assert sum(not isinstance(result, Exception) for result in results) == 1
    git = ["git", "--git-dir", str(tmp_path / "models" / "demo" / "x.git")]
    assert subprocess.run([*git, "fsck", "--strict"], capture_output=True).returncode == 0


def test_a_parent_may_be_shortened_and_a_pull_request_starts_there(api, repo):
    start = api.model_info(repo).sha
    add(api, repo, "a.txt", parent_commit=start[:7])()
    with pytest.raises(HfHubHTTPError, match="412"):
        add(api, repo, "b.txt", parent_commit=start[:7])()
    info = add(api, repo, "c.txt", parent_commit=start, create_pr=True)()
    assert set(api.list_repo_files(repo, revision=info.pr_revision)) == {".gitattributes", "c.txt"}
    api.merge_pull_request(repo, info.pr_num)
    assert {"a.txt", "c.txt"} < set(api.list_repo_files(repo))


def test_pull_requests_at_once_get_numbers_of_their_own(api, repo):
    calls = [add(api, repo, f"{n}.txt", create_pr=True) for n in range(4)]
    calls += [lambda: api.create_pull_request(repo, title="t")] * 4
    results = at_once(calls)
    assert not [result for result in results if isinstance(result, Exception)]
    numbers = sorted(d.num for d in api.get_repo_discussions(repo))
    assert numbers == list(range(1, 9))
    for result in results[:4]:
        assert result.commit_message in api.list_repo_files(repo, revision=result.pr_revision)


def test_a_pull_request_is_merged_once(api, repo):
    number = add(api, repo, "a.txt", create_pr=True)().pr_num
    results = at_once([lambda: api.merge_pull_request(repo, number)] * 4)
    assert sum(result is None for result in results) == 1
    assert {e.response.status_code for e in results if e is not None} == {400}
    assert len(api.list_repo_commits(repo)) == 2


def test_a_pull_request_that_fails_leaves_nothing(api, repo):
    with pytest.raises(EntryNotFoundError):
        api.create_commit(repo, [CommitOperationDelete("no.txt")], commit_message="x", create_pr=True)
    assert not list(api.get_repo_discussions(repo)) and not api.list_repo_refs(repo, include_pull_requests=True).tags
    assert add(api, repo, "a.txt", create_pr=True)().pr_num == 1


def test_repositories_created_at_once_are_created_once(api):
    results = at_once([lambda: api.create_repo("demo/created-at-once")] * 5)
    failed = [result for result in results if isinstance(result, Exception)]
    assert len(failed) == 4 and {error.response.status_code for error in failed} == {409}
    assert api.list_repo_files("demo/created-at-once") == [".gitattributes"]


def test_deleted_while_others_write(api, repo):
    calls = [add(api, repo, f"{n}.txt") for n in range(3)] + [lambda: api.delete_repo(repo)] * 2
    failed = [result for result in at_once(calls) if isinstance(result, Exception)]
    assert {error.response.status_code for error in failed} <= {404} and not api.repo_exists(repo)
    api.create_repo(repo)
    assert api.list_repo_files(repo) == [".gitattributes"]
    add(api, repo, "new.txt")()


@pytest.mark.parametrize("made_again", [False, True])
def test_deleted_between_finding_and_reading(tmp_path, made_again):
    """Who found a repository before it was deleted hears that it is not there, whoever has its name now."""
    hub = Hub(tmp_path)
    hub.create("models", "demo/x", "demo", private=False)
    found = hub.find("models", "demo/x")
    commit = found.commit("refs/heads/main", Changes({"a": found.store_blob(b"a")}), "a", "demo")
    entry = found.entry(commit, "a")
    hub.delete("models", "demo/x")
    if made_again:
        hub.create("models", "demo/x", "demo", private=False)
    reads = [lambda: found.resolve("v1"), lambda: found.files(commit), lambda: list(found.history(commit))]
    for read in [*reads, lambda: found.describe_commit(commit), lambda: found.read(entry)]:
        with pytest.raises(Gone, match="Repository not found"):
            read()


def test_damage_is_not_taken_for_a_deletion(tmp_path):
    hub = Hub(tmp_path)
    hub.create("models", "demo/x", "demo", private=False)
    found = hub.find("models", "demo/x")
    commit = found.resolve("main")
    (found.folder / "objects" / commit[:2] / commit[2:]).unlink()
    with pytest.raises(KeyError):
        found.files(commit)


def test_lists_leave_out_what_is_deleted_meanwhile(hub, api, monkeypatch):
    names = [f"demo/of-a-list-{n}" for n in range(2)]
    for name in names:
        api.create_repo(name)

    def deleted_while_it_is_read(self):
        if self.folder.name == "of-a-list-0.git":
            raise Gone
        return meta(self)

    meta = Repository.meta
    monkeypatch.setattr(Repository, "meta", deleted_while_it_is_read)
    listed = {model.id for model in api.list_models(search="of-a-list")}
    page = HTTP.get(hub.endpoint)
    assert listed == {names[1]} and page.status_code == 200 and "of-a-list-0" not in page.text
    assert names[1] in page.text


def test_a_slow_upload_holds_up_nobody(hub, api, repo):
    head = f"POST /api/models/{repo}/commit/main HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer t\r\n"
    with socket.create_connection(("127.0.0.1", int(hub.endpoint.rsplit(":", 1)[1]))) as slow:
        slow.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b"x" * 500)
        add(api, repo, "meanwhile.txt")()
        assert "meanwhile.txt" in api.list_repo_files(repo)
    assert len(api.list_repo_commits(repo)) == 2


# -- what must not be committed ------------------------------------------------------------------------------------


def commit(hub, repo, *items, revision="main", summary="s"):
    lines = [{"key": "header", "value": {"summary": summary}}, *items]
    body = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return HTTP.post(f"{hub.endpoint}/api/models/{repo}/commit/{revision}", content=body, headers=HEADERS)


def file(path, content=b"x"):
    value = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
    return {"key": "file", "value": value}


BAD_PATHS = ["..", "a/..", "a/./b", ".GIT/x", ".git /x", "git~1/x", ".g\u200cit/config", "x\ny", "x\x00y", "a\\b"]
BAD_PATHS += ["\ud800", "x" * 256, "d/" * 3000 + "x", ""]


@pytest.mark.parametrize("path", BAD_PATHS, ids=range(len(BAD_PATHS)))
def test_bad_paths_are_refused(hub, api, repo, path):
    assert commit(hub, repo, file(path)).status_code == 400
    assert api.list_repo_files(repo) == [".gitattributes"]


@pytest.mark.parametrize(
    "path", ["größe/日本語.txt", "a b+c%20&?#.txt", "x" * 255, "'\"<b>.md", "-rf", "~", "console.txt"]
)
def test_odd_paths_come_back_as_they_are(hub, api, repo, path, tmp_path):
    assert commit(hub, repo, file(path, path.encode())).status_code == 200
    assert path in api.list_repo_files(repo)
    assert HTTP.get(f"{hub.endpoint}/{repo}/resolve/main/{quote(path)}").content == path.encode()
    if len(path) < 100:
        downloaded = hf_hub_download(repo, path, endpoint=hub.endpoint, cache_dir=tmp_path)
        assert open(downloaded, encoding="utf-8").read() == path  # noqa: SIM115


MALFORMED = [
    "{",
    "[]",
    '"text"',
    "[" * 100_000,
    {"key": "file"},
    {"key": "file", "value": {"path": 5, "content": ""}},
    {"key": "file", "value": {"path": "x", "content": "not base64!", "encoding": "base64"}},
    {"key": "file", "value": {"path": "x", "content": None}},
    {"key": "lfsFile", "value": {"path": "x", "oid": "../../etc/passwd"}},
    {"key": "lfsFile", "value": {"path": "x", "oid": "0" * 64}},
    {"key": "symlink", "value": {"path": "x"}},
]


@pytest.mark.parametrize("item", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_commits_change_nothing(hub, api, repo, item):
    assert commit(hub, repo, file("good.txt"), item).status_code in (400, 422)
    assert api.list_repo_files(repo) == [".gitattributes"]


def test_other_commits_that_change_nothing(hub, api, repo):
    assert commit(hub, repo, file("a"), file("a/b")).status_code == 400
    assert commit(hub, repo, file("d/e/f")).status_code == 200
    for path in ("d", "d/e", "d/e/f/g"):
        assert commit(hub, repo, file(path)).status_code == 400, path
    assert commit(hub, repo, file("x"), revision="no-branch").status_code == 404
    assert commit(hub, repo, file("x"), summary="").status_code == 400
    assert commit(hub, repo, file("x"), summary="\ud800").status_code == 400
    with pytest.raises(EntryNotFoundError):
        api.delete_file("missing.txt", repo)
    with pytest.raises(EntryNotFoundError):
        api.delete_folder("missing", repo)
    assert set(api.list_repo_files(repo)) == {".gitattributes", "d/e/f"}
    replaced = commit(hub, repo, {"key": "deletedFolder", "value": {"path": "d"}}, file("d"))
    assert replaced.status_code == 200 and set(api.list_repo_files(repo)) == {".gitattributes", "d"}


BAD_REFERENCES = ["a..b", "x.lock", "-/", "a b", "\u202e\x07", "@{", "refs/heads/x", "a" * 40, "../../x"]


@pytest.mark.parametrize("ref", BAD_REFERENCES, ids=range(len(BAD_REFERENCES)))
def test_bad_references_are_refused(hub, api, repo, ref):
    answer = HTTP.post(f"{hub.endpoint}/api/models/{repo}/branch/{quote(ref, safe='')}", json={}, headers=HEADERS)
    assert answer.status_code == 400
    tag = HTTP.post(f"{hub.endpoint}/api/models/{repo}/tag/main", json={"tag": ref}, headers=HEADERS)
    assert tag.status_code == 400
    assert [branch.name for branch in api.list_repo_refs(repo).branches] == ["main"]


def test_branches_that_are_in_each_others_way(api, repo):
    api.create_branch(repo, branch="feature/a")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(repo, branch="feature")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(repo, branch="feature/a/b")
    with pytest.raises(HfHubHTTPError, match="default branch cannot be deleted"):
        api.delete_branch(repo, branch="main")
    for revision in ("z" * 40, "0" * 40, "main:x", "refs/heads", "../main"):
        with pytest.raises(RevisionNotFoundError):
            api.model_info(repo, revision=revision)
    blob = api.list_repo_tree(repo)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision=next(iter(blob)).blob_id)


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b'{"type": 5}', b'{"name": "\\ud800"}', b"[" * 100_000])
def test_requests_that_are_no_proper_json(hub, repo, body):
    for method, path in (
        ("POST", "/api/repos/create"),
        ("POST", f"/api/models/{repo}/preupload/main"),
        ("POST", f"/api/models/{repo}/discussions"),
        ("POST", f"/api/models/{repo}/tag/main"),
        ("POST", f"/{repo}.git/info/lfs/objects/batch"),
        ("DELETE", "/api/repos/delete"),
    ):
        answer = HTTP.request(method, hub.endpoint + path, content=body, headers=HEADERS)
        assert answer.status_code in (400, 404, 422), path


def test_no_message_can_add_a_header(hub, repo):
    answer = HTTP.get(f"{hub.endpoint}/{repo}/resolve/main/x%0d%0aSet-Cookie:%20a=b%00é")
    assert answer.status_code == 404 and "set-cookie" not in answer.headers
    assert answer.headers["x-error-code"] == "EntryNotFound"
