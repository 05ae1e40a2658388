"""What a server says is shown as text, and the token stays with the Hub: hostile answers put to the commands."""

from __future__ import annotations

import contextvars
import json
import shutil
import sys
import time
import warnings
from dataclasses import replace

import pytest
from huggingface_hub import constants

from focus_hf.cli import main
from focus_hf.hub import HubError, bounds, search
from focus_hf.hub.bounds import _LIMIT, Bounds, _before, _Limit, same_origin
from tests.families import httpx
from tests.hub.hostile import REPO, HostileHub, answer, as_json
from tests.hub.test_hostile_hub import ESCAPES, RESULTS, WEIGHTS, adapter, honest, place  # noqa: F401

TOKEN = "hf_only-for-the-hub"

ASKED = {
    "info": ("info", "adapter_config.json", "header", RESULTS),
    "pull": ("info", "adapter_config.json", WEIGHTS, "README.md"),
    "search": ("list", "adapter_config.json", "focus_groups.json"),
    "push": ("info", "README.md", "validate-yaml", "preupload", "commit"),
    "try": ("info", "README.md"),
}


@pytest.fixture(scope="module")
def server(honest):  # noqa: F811
    with HostileHub(honest) as running:
        yield running


@pytest.fixture(scope="module")
def elsewhere(honest):  # noqa: F811
    """Another server, that would answer as the Hub does."""
    with HostileHub(honest) as running:
        yield running


@pytest.fixture
def run(server, adapter, place, monkeypatch, capfd):  # noqa: F811
    """Run a command against the server: its exit code and all that it printed."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    address = server.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(bounds, "PATIENCE", 1.5)
    monkeypatch.setattr("focus_hf.hub.prepare._SECONDS", 1.0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    push = ["push", str(adapter), REPO, "--base-model", "org/base", "--license", "mit"]
    commands = {
        "info": ["info", REPO],
        "pull": ["pull", REPO, str(place / "target")],
        "search": ["search", "--base", "org/base", "--group", "punctuation"],
        "push": push,
        "try": [*push, "--dry-run"],
    }

    def command(name):
        monkeypatch.setattr(sys, "argv", ["focus-hf", *commands[name]])
        times = []
        while not times or (times[-1] >= 5 and len(times) < 3):  # on a machine that is busy otherwise, once more
            started, code = time.monotonic(), 0
            shutil.rmtree(place / "target", ignore_errors=True)
            try:
                main()
            except SystemExit as stop:
                code = stop.code
            times.append(time.monotonic() - started)
        assert times[-1] < 5, times
        out, err = capfd.readouterr()
        raw = {c for c in out + err if not c.isprintable() and c not in "\n\r"}  # bars of uploads
        assert not raw and "Traceback (most recent call last):\n" not in err, (raw, (out + err)[-2000:])
        return code, out + err

    return command


def told_elsewhere(elsewhere):
    """Whether another server was told the token."""
    asked, elsewhere.asked[:] = list(elsewhere.asked), []
    return [each for each in asked if TOKEN in json.dumps(each.headers) or TOKEN.encode() in each.body]


# -- the token -----------------------------------------------------------------------------------------------------

LOCATIONS = {
    "another port": "http://127.0.0.1:{port}{path}",
    "no scheme": "//127.0.0.1:{port}{path}",
    "the Hub as a user's name": "http://{hub}@127.0.0.1:{port}{path}",
    "another name": "http://localhost:{port}{path}",
}
REDIRECTS = [
    (name, kind, form, status)
    for name, kinds in ASKED.items()
    for kind in kinds
    for form in LOCATIONS
    for status in ("302 Found", "307 Temporary Redirect", "308 Permanent Redirect")[len(form) % 2 :: 2]
]


def location(form, elsewhere, asked):
    path = f"{asked.path}?{asked.query}" if asked.query else asked.path
    return LOCATIONS[form].format(port=elsewhere.endpoint.rpartition(":")[2], hub=asked.headers["host"], path=path)


@pytest.mark.parametrize(("name", "kind", "form", "status"), REDIRECTS, ids=map(" ".join, REDIRECTS))
def test_redirects_take_no_token_along(name, kind, form, status, run, server, elsewhere, honest):  # noqa: F811
    def handle(asked):
        if asked.kind != kind:
            return honest(asked)
        return answer(b"", status, location=location(form, elsewhere, asked))

    server.handle = handle
    run(name)
    assert not told_elsewhere(elsewhere)


@pytest.mark.parametrize("form", LOCATIONS)
def test_the_next_page_of_a_search_is_on_the_same_server(form, run, server, elsewhere, honest):  # noqa: F811
    server.handle = lambda asked: (
        as_json([honest.describe()], link=f'<{location(form, elsewhere, asked)}>; rel="next"')
        if asked.kind == "list"
        else honest(asked)
    )
    code, text = run("search")
    assert code == 1 and "not on the same server" in text and not elsewhere.asked


def test_a_relative_next_page_is_followed(server, honest, monkeypatch):  # noqa: F811
    def handle(asked):
        if "cursor=2" in asked.query:
            return as_json([{**honest.describe(), "id": "org/second"}])
        return as_json([honest.describe()], link='</api/models?cursor=2>; rel="next"')

    server.handle = handle
    found = search(endpoint=server.endpoint, token=TOKEN)
    assert [each.repo_id for each in found] == [REPO, "org/second"]
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in server.asked[-2:])


@pytest.mark.parametrize("large", [[WEIGHTS], [WEIGHTS, "README.md", "figures/a.png"]])
@pytest.mark.parametrize("where", ["upload", "verify"])
def test_addresses_of_uploads_get_no_token(large, where, run, server, elsewhere, honest):  # noqa: F811
    def handle(asked):
        here, there = f"http://{asked.headers['host']}", elsewhere.endpoint
        if asked.kind == "preupload":
            rows = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"] in large else "regular", "shouldIgnore": False}
                for f in json.loads(asked.body)["files"]
            ]
            return as_json({"files": rows})
        if asked.path.endswith("/objects/batch"):
            objects = json.loads(asked.body)["objects"]
            for wanted in objects:
                wanted["actions"] = {
                    kind: {"href": f"{there if kind == where else here}/{kind}", "header": {}}
                    for kind in ("upload", "verify")
                }
            return as_json({"transfer": "basic", "objects": objects})
        return as_json({}) if asked.path in ("/upload", "/verify") else honest(asked)

    server.handle = handle
    elsewhere.handle = lambda asked: as_json({})
    run("push")
    reached = [each.path for each in elsewhere.asked]
    assert reached and set(reached) == {f"/{where}"} and not told_elsewhere(elsewhere)
    elsewhere.handle = honest


def test_no_step_from_an_encrypted_address_to_another():
    asking = contextvars.copy_context()
    asking.run(_LIMIT.set, _Limit(Bounds("https://hub.example"), 100, False))
    with pytest.raises(HubError, match="not encrypted: it is not followed"):
        asking.run(_before, httpx.Request("GET", "http://hub.example/api/models"))
    for url, kept in (("https://hub.example/x", True), ("https://hub.example:444/x", False), ("https://a.b/", False)):
        request = httpx.Request("GET", url, headers={"authorization": f"Bearer {TOKEN}"})
        asking.run(_before, request)
        assert ("authorization" in request.headers) == kept == same_origin(url, "https://hub.example:443")


def test_a_client_that_the_library_makes_anew_is_bounded_too(server, elsewhere, honest):  # noqa: F811
    """It does so after a failed connection, which a server can cause."""
    from huggingface_hub.utils import close_session, get_session

    def ask():
        close_session()
        return get_session().get(elsewhere.endpoint, headers={"authorization": f"Bearer {TOKEN}"}).status_code

    Bounds(server.endpoint).run(ask)
    assert elsewhere.asked and not told_elsewhere(elsewhere)


# -- words ---------------------------------------------------------------------------------------------------------

CARD = {
    "license": "mit",
    "language": ["en"],
    "base_model": "org/base",
    "datasets": ["a"],
    "tags": ["focus"],
    "focus": {
        "num_groups": 4,
        "top_k": 1,
        "local_window": 8,
        "groups": ["NOUN"],
        "perplexity_change": 1.0,
        "losses": {"a": 1.0},
    },
    "model-index": [{"name": "x", "results": []}],
    "eval_results": [{"x": 1}],
}


def with_escapes(value, path=()):
    """A value with escapes in the place of one of its parts, or of a name, and where."""
    yield "/".join(map(str, path)), ESCAPES
    if isinstance(value, dict):
        yield "/".join([*map(str, path), "a name"]), {**value, ESCAPES: ESCAPES}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for where, changed in with_escapes(item, (*path, key)):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield where, copy


DESCRIBED = {
    "id": REPO, "sha": "c" * 40, "private": False, "gated": False, "downloads": 1, "likes": 1, "tags": ["focus"],
    "siblings": [{"rfilename": "README.md", "size": 1, "blobId": "a" * 40, "lfs": {"size": 1, "sha256": "a" * 64}}],
    "lastModified": "2026-01-01T00:00:00Z", "cardData": CARD,
}  # fmt: skip
SAID = {
    "info": DESCRIBED,
    "list": [DESCRIBED],
    "validate-yaml": {"warnings": [{"message": "a"}], "errors": [{"message": "a"}]},
    "preupload": {"files": [{"path": "README.md", "uploadMode": "regular", "shouldIgnore": False, "oid": "a"}]},
    "commit": {"success": True, "commitOid": "d" * 40, "commitUrl": "http://hub/x", "pullRequestUrl": "http://hub/1"},
    "create": {"url": "http://hub/x", "name": REPO},
}
COMMANDS = {"info": ("info", "pull", "try"), "list": ("search",)}


def words():
    """Command, what is asked for, where escapes are, and the answer."""
    for kind, said in SAID.items():
        for number, (where, changed) in enumerate(with_escapes(said)):
            commands = COMMANDS.get(kind, ("push",))
            yield commands[number % len(commands)], kind, f"in {where}", as_json(changed)
    yield (
        "push",
        "validate-yaml",
        "of errors",
        answer(json.dumps({"errors": [{"message": ESCAPES}]}), "400 Bad Request"),
    )
    refusals = [{"error": ESCAPES}, {"error": [ESCAPES]}, {"errors": [{"message": ESCAPES}]}, ESCAPES]
    hidden = ESCAPES.replace("\n", " ").encode().decode("latin-1")
    for command, kinds in ASKED.items():
        for kind in kinds:
            status = ("400 Bad Request", "403 Forbidden", "404 Not Found", "409 Conflict", "422 No", "500 Error")
            for number, said in enumerate(refusals):
                body = json.dumps(said) if number < 3 else said
                yield command, kind, f"refused {number}", answer(body, status[(len(kind) + number) % len(status)])
            for number, name in enumerate(("x_error_message", "x_error_code", "x_hf_warning", "x_request_id", "etag")):
                sent = answer(b"{}", status[number], **{name: f"a; {hidden}"})
                yield command, kind, f"in {name}", sent.decode().encode("latin-1")


WORDS = list(words())


@pytest.mark.parametrize(("command", "kind", "where", "sent"), WORDS, ids=[" ".join(case[:3]) for case in WORDS])
def test_words_of_a_server_reach_the_terminal_as_text(command, kind, where, sent, run, server, honest):  # noqa: F811
    server.handle = lambda asked: sent if asked.kind == kind else honest(asked)
    run(command)


FILES = {
    "README.md": f"---\nlicense: mit\n---\n# {ESCAPES}\n\nWords of a person \x1b[31m.\n",
    "adapter_config.json": json.dumps({"peft_type": "FOCUS", "num_groups": ESCAPES}),
    RESULTS: json.dumps({"evaluations": [{"data": ESCAPES, "context_length": 8, "rows": []}]}),
    "focus_groups.json": json.dumps({"layers": [{"name": ESCAPES, "groups": [{"labels": {"upos": ESCAPES}}]}]}),
    "\x1b[2J.pkl": "",
}


@pytest.mark.parametrize("command", ASKED)
@pytest.mark.parametrize("name", FILES)
def test_words_in_files_reach_the_terminal_as_text(name, command, run, server, honest):  # noqa: F811
    server.handle = replace(honest, files={**honest.files, name: FILES[name].encode()})
    run(command)


def test_there_are_enough_of_them():
    assert len(REDIRECTS) + len(WORDS) + len(FILES) * len(ASKED) + 2 * len(LOCATIONS) >= 150
