"""The local Hub through the real `huggingface_hub` client, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from focus_hf.local_hub import LocalHub
from tests.families import httpx

CARD = """---
library_name: focus_hf
base_model: demo/base
base_model_relation: adapter
tags: [focus, peft]
license: apache-2.0
language: en
datasets: demo/books
pipeline_tag: text-generation
---
# A card
"""
WEIGHTS = os.urandom(300_000)


@pytest.fixture
def repo(api):
    name = f"demo/adapter-{uuid.uuid4().hex[:8]}"
    api.create_repo(name)
    return name


@pytest.fixture
def adapter(api, repo, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "figures").mkdir()
    (folder / "figures" / "groups.png").write_bytes(b"\x89PNG" + os.urandom(100))
    api.upload_folder(folder_path=folder, repo_id=repo, commit_message="first")
    return repo


def test_whoami_and_unknown_token(tmp_path):
    with LocalHub(tmp_path, users={"secret": "ada"}) as hub:
        assert HfApi(endpoint=hub.endpoint, token="secret").whoami()["name"] == "ada"
        with pytest.raises(HfHubHTTPError) as error:
            HfApi(endpoint=hub.endpoint, token="wrong").create_repo("ada/x")
        assert error.value.response.status_code == 401


def test_create_twice(api, repo):
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(repo)
    assert api.create_repo(repo, exist_ok=True).repo_id == repo


def test_writing_needs_a_token(hub):
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.endpoint, token=False).create_repo("demo/anonymous")


def test_upload_and_information(api, adapter):
    info = api.model_info(adapter, files_metadata=True)
    assert {s.rfilename for s in info.siblings} >= {"README.md", "adapter_model.safetensors", "figures/groups.png"}
    assert next(s.size for s in info.siblings if s.rfilename == "adapter_model.safetensors") == len(WEIGHTS)
    assert info.card_data["base_model"] == "demo/base" and info.library_name == "focus_hf"
    for tag in ("focus", "base_model:adapter:demo/base", "license:apache-2.0", "dataset:demo/books", "en"):
        assert tag in info.tags
    tree = {item.path: item for item in api.list_repo_tree(adapter, recursive=True)}
    assert tree["figures/groups.png"].size == 104 and tree["figures"].path == "figures"
    assert [item.path for item in api.list_repo_tree(adapter, "figures")] == ["figures/groups.png"]
    assert [item.path for item in api.get_paths_info(adapter, ["README.md", "missing"])] == ["README.md"]
    assert api.list_repo_commits(adapter)[0].title.startswith("first")


def test_download_file_and_snapshot(api, hub, adapter, tmp_path):
    path = hf_hub_download(adapter, "adapter_model.safetensors", endpoint=hub.endpoint, cache_dir=tmp_path / "a")
    assert Path(path).read_bytes() == WEIGHTS
    folder = snapshot_download(adapter, endpoint=hub.endpoint, cache_dir=tmp_path / "b")
    assert os.path.isfile(os.path.join(folder, "figures", "groups.png"))
    again = hf_hub_download(adapter, "adapter_model.safetensors", endpoint=hub.endpoint, cache_dir=tmp_path / "a")
    assert again == path


@pytest.mark.parametrize("lfs", [False, True])
def test_ranges(tmp_path, lfs):
    with LocalHub(tmp_path / "root", lfs_threshold=1000 if lfs else 10**9, token="t") as hub:
        upload_without_xet(hub.endpoint, tmp_path)
        url = f"{hub.endpoint}/demo/large/resolve/main/adapter_model.safetensors"
        whole = httpx.get(url)
        assert whole.status_code == 200 and whole.content == WEIGHTS and len(whole.headers["x-repo-commit"]) == 40
        part = httpx.get(url, headers={"Range": "bytes=100-199"})
        assert part.status_code == 206 and part.content == WEIGHTS[100:200]
        assert part.headers["content-range"] == f"bytes 100-199/{len(WEIGHTS)}"
        tail = httpx.get(url, headers={"Range": "bytes=-50"})
        assert tail.status_code == 206 and tail.content == WEIGHTS[-50:]
        assert httpx.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"}).status_code == 416
        head = httpx.head(url)
        assert int(head.headers["content-length"]) == len(WEIGHTS)
        etag = head.headers["x-linked-etag" if lfs else "etag"].strip('"')
        assert etag == (hashlib.sha256(WEIGHTS).hexdigest() if lfs else blob_id(WEIGHTS))


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\x00" % len(content) + content).hexdigest()


def upload_without_xet(endpoint, tmp_path):
    """Large files go through LFS only where Xet is off, which must be set before the client is imported."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    code = (
        "from huggingface_hub import HfApi; import sys\n"
        "api = HfApi(endpoint=sys.argv[1], token='t'); api.create_repo('demo/large')\n"
        "api.upload_folder(repo_id='demo/large', folder_path=sys.argv[2])\n"
        "info = api.model_info('demo/large', files_metadata=True)\n"
        "print(next(s.lfs for s in info.siblings if s.rfilename.endswith('safetensors')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, endpoint, str(folder)],
        env={**os.environ, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lfs_upload_is_stored_by_content_and_pointed_to(tmp_path):
    root = tmp_path / "root"
    with LocalHub(root, lfs_threshold=1000, token="t") as hub:
        assert hashlib.sha256(WEIGHTS).hexdigest() in upload_without_xet(hub.endpoint, tmp_path)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert (root / "models" / "demo" / "large.git" / "lfs" / digest).read_bytes() == WEIGHTS


def test_lfs_upload_with_the_wrong_content_is_refused(tmp_path):
    with LocalHub(tmp_path, token="t") as hub:
        oid = hashlib.sha256(b"promised").hexdigest()
        answer = httpx.put(f"{hub.endpoint}/lfs/{oid}", content=b"something else")
        assert answer.status_code == 403  # nobody was told to upload this
        assert not list(tmp_path.rglob(oid))


def test_a_client_with_xet_is_told_what_to_do(api, repo):
    answer = httpx.get(f"{api.endpoint}/api/models/{repo}/xet-write-token/main")
    assert answer.status_code == 400 and "HF_HUB_DISABLE_XET=1" in answer.json()["error"]


def test_search_filters_sorts_and_pages(api, adapter):
    wanted = ["base_model:adapter:demo/base", "focus"]
    assert adapter in [m.id for m in api.list_models(filter=wanted)]
    assert adapter not in [m.id for m in api.list_models(filter=[*wanted, "no-such-tag"])]
    assert adapter in [m.id for m in api.list_models(author="demo", search=adapter.split("/")[1].upper())]
    assert not list(api.list_models(author="somebody-else"))
    everything = [m.id for m in api.list_models(sort="downloads")]
    assert len(everything) == len(set(everything)) >= 1
    pages = httpx.get(f"{api.endpoint}/api/models", params={"limit": 1})
    assert len(pages.json()) == 1
    for number in range(3):
        api.create_repo(f"demo/page-{number}", exist_ok=True)
    assert 'rel="next"' in httpx.get(f"{api.endpoint}/api/models", params={"limit": 1}).headers["link"]
    assert len([m.id for m in api.list_models(author="demo", limit=2)]) == 2


def test_errors_are_the_clients_own_exceptions(api, adapter, tmp_path):
    def download(repo, file, revision="main"):
        return hf_hub_download(repo, file, revision=revision, endpoint=api.endpoint, cache_dir=tmp_path)

    with pytest.raises(RepositoryNotFoundError):
        download("demo/missing", "README.md")
    with pytest.raises(EntryNotFoundError):
        download(adapter, "missing.txt")
    with pytest.raises(RevisionNotFoundError):
        download(adapter, "README.md", "no-such-branch")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("demo/missing")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(adapter, revision="no-such-branch")


def test_branches_tags_and_commits_as_revisions(api, adapter, tmp_path):
    first = api.model_info(adapter).sha
    api.create_tag(adapter, tag="v1")
    api.create_branch(adapter, branch="feature/x", revision=first)
    api.upload_file(path_or_fileobj=b"new", path_in_repo="note.txt", repo_id=adapter, revision="feature/x")
    for revision in ("main", "v1", first):
        assert "note.txt" not in api.list_repo_files(adapter, revision=revision)
    assert "note.txt" in api.list_repo_files(adapter, revision="feature/x")
    refs = api.list_repo_refs(adapter)
    assert {b.name for b in refs.branches} == {"main", "feature/x"} and [t.name for t in refs.tags] == ["v1"]
    path = hf_hub_download(adapter, "note.txt", revision="feature/x", endpoint=api.endpoint, cache_dir=tmp_path)
    assert Path(path).read_text() == "new"
    api.delete_branch(adapter, branch="feature/x")
    api.delete_tag(adapter, tag="v1")
    assert not api.list_repo_refs(adapter).tags
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(adapter, branch="main")


def test_delete_files_and_folders(api, adapter):
    operations = [CommitOperationDelete("figures/"), CommitOperationDelete("README.md")]
    api.create_commit(adapter, operations, commit_message="clean up")
    assert set(api.list_repo_files(adapter)) == {".gitattributes", "adapter_model.safetensors"}


def test_same_content_again_makes_no_commit(api, adapter):
    before = api.model_info(adapter).sha
    api.create_commit(adapter, [CommitOperationAdd("README.md", CARD.encode())], commit_message="again")
    assert api.model_info(adapter).sha == before


def test_a_stale_parent_commit_is_refused(api, adapter):
    stale = api.model_info(adapter).sha
    api.upload_file(path_or_fileobj=b"1", path_in_repo="one.txt", repo_id=adapter)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(adapter, [CommitOperationAdd("two.txt", b"2")], commit_message="late", parent_commit=stale)
    assert "two.txt" not in api.list_repo_files(adapter)


def test_concurrent_commits_lose_nothing(api, repo):
    def push(number):
        api.create_commit(repo, [CommitOperationAdd(f"{number}.txt", b"x")], commit_message=f"file {number}")

    threads = [threading.Thread(target=push, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f"{n}.txt" for n in range(6)} <= set(api.list_repo_files(repo))
    assert len(list(api.list_repo_commits(repo))) == 7


def test_pull_request_in_one_commit(api, adapter):
    operation = CommitOperationAdd("extra.txt", b"extra")
    info = api.create_commit(adapter, [operation], commit_message="add extra", create_pr=True)
    assert info.pr_num == 1 and info.pr_revision == "refs/pr/1"
    assert "extra.txt" not in api.list_repo_files(adapter)
    assert "extra.txt" in api.list_repo_files(adapter, revision="refs/pr/1")
    api.merge_pull_request(adapter, 1)
    assert "extra.txt" in api.list_repo_files(adapter)
    assert api.get_discussion_details(adapter, 1).status == "merged"


def test_pull_request_opened_first_and_committed_to(api, adapter, tmp_path):
    request = api.create_pull_request(adapter, title="An idea")
    operation = CommitOperationAdd("idea.txt", b"idea")
    api.create_commit(adapter, [operation], commit_message="idea", revision=request.git_reference)
    assert "idea.txt" in api.list_repo_files(adapter, revision=request.git_reference)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "more.txt").write_text("more")
    api.upload_folder(folder_path=folder, repo_id=adapter, create_pr=True)
    numbers = [d.num for d in api.get_repo_discussions(adapter)]
    assert sorted(numbers) == [1, 2]
    assert "more.txt" in api.list_repo_files(adapter, revision="refs/pr/2")


def test_a_merge_that_would_overwrite_others_work_is_refused(api, adapter):
    api.create_commit(adapter, [CommitOperationAdd("n.txt", b"a")], commit_message="pr", create_pr=True)
    api.upload_file(path_or_fileobj=b"b", path_in_repo="n.txt", repo_id=adapter)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.merge_pull_request(adapter, 1)


def test_private_repositories_do_not_exist_for_strangers(api, hub):
    api.create_repo("demo/private", private=True)
    assert api.model_info("demo/private").private
    stranger = HfApi(endpoint=hub.endpoint, token=False)
    with pytest.raises(RepositoryNotFoundError):
        stranger.model_info("demo/private")
    assert "demo/private" not in [m.id for m in stranger.list_models()]
    api.update_repo_settings("demo/private", private=False)
    assert not stranger.model_info("demo/private").private


def test_delete_repository(api, repo):
    api.delete_repo(repo)
    assert not api.repo_exists(repo)
    api.create_repo(repo)
    assert api.list_repo_files(repo) == [".gitattributes"]


@pytest.mark.parametrize("name", ["demo/..", "demo/a--b", "demo/.x", "demo/a b", "../x"])
def test_odd_repository_names_are_refused(hub, api, name):
    with pytest.raises((HFValidationError, HfHubHTTPError)):
        api.create_repo(name)
    namespace, _, rest = name.partition("/")
    answer = httpx.post(
        f"{hub.endpoint}/api/repos/create",
        json={"name": rest, "organization": namespace},
        headers={"Authorization": "Bearer t"},
    )
    assert answer.status_code == 400


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ".git/config", "a//b"])
def test_paths_cannot_leave_the_repository(hub, repo, path):
    items = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "file", "value": {"path": path, "content": "eA==", "encoding": "base64"}},
    ]
    answer = httpx.post(
        f"{hub.endpoint}/api/models/{repo}/commit/main",
        content="\n".join(json.dumps(item) for item in items),
        headers={"Authorization": "Bearer t"},
    )
    assert answer.status_code == 400 and "Invalid path" in answer.json()["error"]


def test_cards_are_checked_before_they_are_committed(api, repo):
    with pytest.raises(ValueError, match="Invalid metadata"):
        api.upload_file(path_or_fileobj=b"---\na: [1\n---\n", path_in_repo="README.md", repo_id=repo)
    api.upload_file(path_or_fileobj=CARD.encode(), path_in_repo="README.md", repo_id=repo)
    assert api.model_info(repo).card_data["license"] == "apache-2.0"


def test_downloads_are_counted(api, hub, repo, tmp_path):
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="adapter_config.json", repo_id=repo)
    for number in range(2):
        hf_hub_download(repo, "adapter_config.json", endpoint=hub.endpoint, cache_dir=tmp_path / str(number))
    assert api.model_info(repo).downloads == 2


def test_repositories_outlive_the_server_and_are_real_git(tmp_path):
    with LocalHub(tmp_path, token="t") as hub:
        api = HfApi(endpoint=hub.endpoint, token="t")
        api.create_repo("demo/kept")
        api.upload_file(path_or_fileobj=b"hello", path_in_repo="a.txt", repo_id="demo/kept")
    with LocalHub(tmp_path, token="t") as hub:
        assert "a.txt" in HfApi(endpoint=hub.endpoint).list_repo_files("demo/kept")
    git = ["git", "--git-dir", str(tmp_path / "models" / "demo" / "kept.git")]
    assert subprocess.run([*git, "fsck", "--strict"], capture_output=True).returncode == 0
    shown = subprocess.run([*git, "show", "main:a.txt"], capture_output=True, text=True)
    assert shown.stdout == "hello"
