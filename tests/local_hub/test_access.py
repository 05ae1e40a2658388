"""The local Hub's tokens, roles, namespaces, private and gated repositories, as the real client sees them."""

from __future__ import annotations

import socket

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from focus_hf.local_hub import LocalHub, User, owner_token
from tests.families import httpx

USERS = {
    "ada-w": "ada",
    "ada-r": User("ada", role="read"),
    "bob-w": "bob",
    "carol-w": "carol",
}

HTTP = httpx.Client()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), users=USERS) as running:
        yield running


@pytest.fixture
def api(hub):
    """The client of a token; ``False`` for none."""
    return lambda token: HfApi(endpoint=hub.endpoint, token=token)


@pytest.fixture
def repo(api, own_name):
    """A repository of ada's with a card and weights."""
    name = api("ada-w").create_repo(f"ada/{own_name}").repo_id
    api("ada-w").upload_file(path_or_fileobj=b"# Card\n", path_in_repo="README.md", repo_id=name)
    api("ada-w").upload_file(path_or_fileobj=b"weights", path_in_repo="w.bin", repo_id=name)
    return name


def refusal(call, *args, **kwargs):
    with pytest.raises(HfHubHTTPError) as error:
        call(*args, **kwargs)
    return error.value.response.status_code, str(error.value)


def test_whoami_tells_name_and_role(api):
    me = api("carol-w").whoami()
    assert me["name"] == "carol" and me["auth"]["accessToken"]["role"] == "write"
    assert api("ada-r").whoami()["auth"]["accessToken"]["role"] == "read"


def test_unknown_tokens(api, hub, repo):
    status, text = refusal(api("wrong").model_info, repo)
    assert status == 401 and "Invalid credentials in Authorization header" in text
    assert refusal(api("wrong").whoami)[0] == 401
    assert HTTP.get(f"{hub.endpoint}/api/whoami-v2").status_code == 401


def test_a_read_token_changes_nothing(api, repo):
    reader = api("ada-r")
    before = reader.model_info(repo).sha
    for call, args in (
        (reader.create_repo, ["ada/new"]),
        (reader.update_repo_settings, [repo]),
        (reader.delete_repo, [repo]),
        (reader.create_pull_request, [repo, "title"]),
    ):
        kwargs = {"private": True} if call == reader.update_repo_settings else {}
        status, text = refusal(call, *args, **kwargs)
        assert status == 403 and "write token" in text
    for kwargs in ({"create_pr": True}, {"create_pr": False}):
        status, _ = refusal(reader.upload_file, path_or_fileobj=b"x", path_in_repo="x", repo_id=repo, **kwargs)
        assert status == 403
    assert reader.create_branch and refusal(reader.create_branch, repo, branch="b")[0] == 403
    info = reader.model_info(repo)
    assert info.sha == before and not info.private and not reader.repo_exists("ada/new")


def test_users_write_in_their_own_namespaces(api, repo):
    status, text = refusal(api("bob-w").create_repo, "ada/bobs")
    assert status == 403 and "rights to create a model under the namespace" in text
    status, text = refusal(api("bob-w").upload_file, path_or_fileobj=b"x", path_in_repo="x", repo_id=repo)
    assert status == 403 and "create_pr=1" in text
    assert refusal(api("bob-w").delete_repo, repo)[0] == 403
    assert refusal(api("bob-w").create_tag, repo, tag="v1")[0] == 403
    assert refusal(api("bob-w").update_repo_settings, repo, private=True)[0] == 403
    assert api(False).list_repo_commits(repo)[0].authors == ["ada"]
    assert api("ada-w").model_info(repo).sha == api("bob-w").model_info(repo).sha


def test_anybody_may_suggest_changes_but_not_accept_them(api, repo):
    bob, ada = api("bob-w"), api("ada-w")
    info = bob.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=repo, create_pr=True)
    bob.upload_file(path_or_fileobj=b"y", path_in_repo="y.txt", repo_id=repo, revision=info.pr_revision)
    upload = {"path_or_fileobj": b"z", "path_in_repo": "z", "repo_id": repo, "revision": info.pr_revision}
    assert refusal(api("carol-w").upload_file, **upload)[0] == 403
    assert refusal(bob.merge_pull_request, repo, info.pr_num)[0] == 403
    ada.merge_pull_request(repo, info.pr_num)
    assert {"x.txt", "y.txt"} <= set(ada.list_repo_files(repo))


def ways_to_look(api, repo, tmp_path):
    return {
        "info": lambda: api.model_info(repo),
        "files": lambda: list(api.list_repo_tree(repo)),
        "refs": lambda: api.list_repo_refs(repo),
        "commits": lambda: api.list_repo_commits(repo),
        "discussions": lambda: list(api.get_repo_discussions(repo)),
        "download": lambda: hf_hub_download(repo, "w.bin", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path),
        "check": lambda: api.auth_check(repo),
    }


def test_private_repositories_do_not_exist_for_others(api, repo, tmp_path):
    api("ada-w").update_repo_settings(repo, private=True)
    for token in ("bob-w", False):
        for way, look in ways_to_look(api(token), repo, tmp_path / "no").items():
            with pytest.raises(RepositoryNotFoundError) as error:
                look()
            assert error.value.response.status_code == (401 if token is False else 404), way
        assert repo not in [m.id for m in api(token).list_models()]
    for token in ("ada-w", "ada-r"):
        for look in ways_to_look(api(token), repo, tmp_path / token).values():
            look()
        assert repo in [m.id for m in api(token).list_models()]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer bob-w"}])
@pytest.mark.parametrize("kind", ["", "/api/models"])
def test_the_answer_for_a_private_name_is_that_for_a_free_one(hub, api, repo, headers, kind):
    api("ada-w").update_repo_settings(repo, private=True)
    answers = []
    for name in (repo, "ada/" + "x" * (len(repo) - 4)):
        for rest in ("", "/tree/main", "/resolve/main/w.bin", "/settings", "/discussions/1", "/commit/main"):
            answer = HTTP.get(f"{hub.endpoint}{kind}/{name}{rest}", headers=headers)
            fields = {key: value for key, value in answer.headers.items() if key != "date"}
            answers.append((answer.status_code, answer.text.replace(name, "NAME"), fields))
        answer = HTTP.post(f"{hub.endpoint}/api/models/{name}/discussions", json={"title": "x"}, headers=headers)
        answers.append((answer.status_code, answer.text, answer.headers["x-error-message"]))
        answer = HTTP.post(f"{hub.endpoint}/{name}.git/info/lfs/objects/batch", json={"objects": []}, headers=headers)
        answers.append((answer.status_code, answer.text, answer.headers["x-error-message"]))
    half = len(answers) // 2
    assert answers[:half] == answers[half:] and all(status in (401, 404, 405) for status, _, _ in answers)
    api("ada-w").delete_repo(repo)


def test_without_users_one_token_does_everything_and_no_other_does_anything(tmp_path):
    with LocalHub(tmp_path) as hub:
        owner, stranger = HfApi(endpoint=hub.endpoint, token=hub.token), HfApi(endpoint=hub.endpoint, token="any")
        assert len(hub.token) >= 32 and owner.whoami()["name"] == "demo"
        owner.create_repo("anybody/secret", private=True)
        assert owner.model_info("anybody/secret").private
        for call in (stranger.create_repo, stranger.delete_repo, stranger.model_info):
            assert refusal(call, "anybody/secret")[0] == 401
        assert owner.repo_exists("anybody/secret")
        assert not HfApi(endpoint=hub.endpoint, token=False).repo_exists("anybody/secret")
        assert HTTP.get(f"{hub.endpoint}/anybody/secret").status_code == 404
        assert "secret" not in HTTP.get(f"{hub.endpoint}/").text
    with LocalHub(tmp_path) as again:
        assert again.token != hub.token


def test_the_token_of_the_owner_is_kept_where_nobody_else_reads_it(tmp_path):
    token = owner_token(tmp_path / "hub")
    kept = tmp_path / "hub" / "token"
    assert owner_token(tmp_path / "hub") == token == kept.read_text() and kept.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in kept.parent.iterdir()] == ["token"]
    kept.write_text("")  # killed in the middle of making it
    assert len(owner_token(tmp_path / "hub")) >= 32 and owner_token(tmp_path / "hub") != token


# -- names of the Hub itself (DNS rebinding) -----------------------------------------------------------------------


HOSTS = {
    421: ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost", "",
          "[", "192.168.0.7", "0.0.0.0", "127.0.0.1@evil.example", "evil.example, localhost", "[::ffff:10.0.0.1]"),
    200: ("localhost", "LOCALHOST:8888", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "hub.localhost", "localhost.",
          "my-machine.example", "My-Machine.Example.:8888"),
}  # fmt: skip


@pytest.mark.parametrize(("status", "host"), [(status, host) for status, hosts in HOSTS.items() for host in hosts])
def test_names_of_strangers_get_no_answer(named_hub, status, host):
    for method, path in (("GET", "/api/models"), ("GET", "/"), ("DELETE", "/api/repos/delete")):
        answer = HTTP.request(
            method, named_hub.endpoint + path, headers={"Host": host, "Authorization": f"Bearer {named_hub.token}"}
        )
        if status == 421:
            assert answer.status_code == 421 and "--allow-host" in answer.json()["error"]
        else:
            assert answer.status_code != 421


@pytest.fixture(scope="module")
def named_hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("named"), allow_hosts=["my-machine.example"]) as running:
        yield running


@pytest.mark.parametrize("lines", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_no_name_and_two_names_get_no_answer(named_hub, lines):
    port = int(named_hub.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET /api/models HTTP/1.0\r\n" + lines + b"\r\n")
        assert client.recv(100).split()[1] in (b"400", b"421")


@pytest.mark.parametrize("fields", [{"name": "a\nb"}, {"name": "a", "role": "admin"}])
def test_users_that_cannot_be(fields):
    with pytest.raises(ValueError):
        User(**fields)


# -- gated ---------------------------------------------------------------------------------------------------------


def test_gated_repositories_show_their_card_and_keep_their_files(api, hub, repo, tmp_path):
    api("ada-w").update_repo_settings(repo, gated="manual")
    for token, status, message in (
        (False, 401, "Please log in"),
        ("bob-w", 403, "not in the authorized list"),
    ):
        stranger = api(token)
        info = stranger.model_info(repo)
        assert info.gated == "manual" and [s.rfilename for s in info.siblings][-1] == "w.bin"
        assert ModelCard.load(hf_hub_download(repo, "README.md", endpoint=hub.endpoint, token=token)).text.strip()
        with pytest.raises(GatedRepoError, match=message) as error:
            hf_hub_download(repo, "w.bin", endpoint=hub.endpoint, token=token, cache_dir=tmp_path)
        assert error.value.response.status_code == status
        with pytest.raises(GatedRepoError):
            stranger.auth_check(repo)
        assert stranger.repo_exists(repo)
    for owner in ("ada-w", "ada-r"):
        hf_hub_download(repo, "w.bin", endpoint=hub.endpoint, token=owner, cache_dir=tmp_path / owner)
    assert repo in [m.id for m in api(False).list_models(gated=True)]
    assert repo not in [m.id for m in api(False).list_models(gated=False)]


def test_access_is_granted(api, repo, hub):
    ada, bob = api("ada-w"), api("bob-w")
    assert refusal(ada.grant_access, repo, "bob")[0] == 400  # it is not gated
    ada.update_repo_settings(repo, gated="auto")
    assert refusal(bob.grant_access, repo, "bob")[0] == 403
    ada.grant_access(repo, "bob")
    bob.auth_check(repo)
    with pytest.raises(GatedRepoError):
        api("carol-w").auth_check(repo)
    assert refusal(ada.grant_access, repo, "bob")[0] == 400
    ada.update_repo_settings(repo, gated=False)
    api(False).auth_check(repo)
    answer = HTTP.put(
        f"{hub.endpoint}/api/models/{repo}/settings", json={"gated": "yes"}, headers={"Authorization": "Bearer ada-w"}
    )
    assert answer.status_code == 400
