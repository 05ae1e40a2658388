"""Pull requests of the local Hub, through the real client."""

from __future__ import annotations

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from focus_hf.local_hub import LocalHub

USERS = {"ada": "ada", "bob": "bob", "eve": "eve"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), users=USERS) as running:
        yield running


@pytest.fixture
def ada(hub):
    return HfApi(endpoint=hub.endpoint, token="ada")


@pytest.fixture
def bob(hub):
    return HfApi(endpoint=hub.endpoint, token="bob")


@pytest.fixture
def repo(ada, own_name):
    return ada.create_repo(f"ada/{own_name}").repo_id


def test_who_may_do_what(ada, bob, repo, hub):
    eve = HfApi(endpoint=hub.endpoint, token="eve")
    bob.create_pull_request(repo, "Bob's")
    for call, args in (
        (eve.change_discussion_status, (1, "closed")),
        (eve.merge_pull_request, (1,)),
        (bob.merge_pull_request, (1,)),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            call(repo, *args)
        assert error.value.response.status_code == 403
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.endpoint, token=False).create_pull_request(repo, "anonymous")
    with pytest.raises(HfHubHTTPError, match="404"):
        ada.get_discussion_details(repo, 9)
    with pytest.raises(HfHubHTTPError, match="no other discussions"):
        ada.create_discussion(repo, "Which licence?")
    assert bob.change_discussion_status(repo, 1, "closed").new_status == "closed"
    assert ada.change_discussion_status(repo, 1, "open").new_status == "open"


def test_pull_requests_show_their_commits_and_conflicts(ada, bob, repo):
    request = bob.create_pull_request(repo, "Better", description="Faster too")
    assert request.status == "draft" and request.git_reference == "refs/pr/1" and request.target_branch
    for text in (b"a", b"b"):
        operation = CommitOperationAdd("n.txt", text)
        bob.create_commit(repo, [operation], commit_message=f"set {text!r}", revision=request.git_reference)
    details = ada.get_discussion_details(repo, 1)
    assert {event.summary for event in details.events if event.type == "commit"} == {"set b'a'", "set b'b'"}
    assert details.conflicting_files == [] and details.merge_commit_oid is None
    ada.upload_file(path_or_fileobj=b"c", path_in_repo="n.txt", repo_id=repo)
    assert ada.get_discussion_details(repo, 1).conflicting_files == ["n.txt"]
    with pytest.raises(HfHubHTTPError, match="409"):
        ada.merge_pull_request(repo, 1)
    assert ada.get_discussion_details(repo, 1).status == "draft"
    bob.create_commit(repo, [CommitOperationAdd("n.txt", b"c")], commit_message="agree", revision="refs/pr/1")
    ada.merge_pull_request(repo, 1, comment="Thank you")
    details = ada.get_discussion_details(repo, 1)
    assert details.status == "merged" and details.merge_commit_oid == ada.model_info(repo).sha
    for call in (lambda: ada.merge_pull_request(repo, 1), lambda: ada.change_discussion_status(repo, 1, "closed")):
        with pytest.raises(HfHubHTTPError):
            call()


def test_closed_pull_requests_are_not_merged(ada, bob, repo):
    operation = CommitOperationAdd("n.txt", b"a")
    info = bob.create_commit(repo, [operation], commit_message="one", create_pr=True)
    assert info.pr_url == f"{ada.endpoint}/{repo}/discussions/1"
    assert ada.get_discussion_details(repo, 1).status == "open"
    bob.change_discussion_status(repo, 1, "closed")
    with pytest.raises(HfHubHTTPError):
        ada.merge_pull_request(repo, 1)
    assert "n.txt" not in ada.list_repo_files(repo)


def test_listing(ada, bob, repo):
    ada.create_pull_request(repo, "one")
    bob.create_pull_request(repo, "two")
    ada.change_discussion_status(repo, 1, "closed")

    def numbers(**kwargs):
        return [d.num for d in ada.get_repo_discussions(repo, **kwargs)]

    assert numbers() == numbers(discussion_type="pull_request") == [2, 1]
    assert numbers(author="bob") == numbers(discussion_status="open") == [2]
    assert numbers(discussion_status="closed") == [1] and numbers(discussion_type="discussion") == []
