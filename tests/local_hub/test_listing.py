"""What the local Hub says about repositories: listings with their filters and orders, odd metadata."""

from __future__ import annotations

import json
import time

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from focus_hf.local_hub import LocalHub
from tests.families import httpx

USERS = {"ada": "ada", "bob": "bob"}
HTTP = httpx.Client()

CARDS = {
    "ada/one": "library_name: focus_hf\npipeline_tag: text-generation\ntags: [focus, peft]\nlicense: mit\n"
    "base_model: org/base\nbase_model_relation: adapter\nlanguage: [en, de]\ndatasets: org/texts\n",
    "ada/two": "library_name: transformers\npipeline_tag: text-classification\ntags: [peft]\n",
    "bob/three": "library_name: focus_hf\ntags: [focus]\n",
    "ada/secret": "library_name: focus_hf\ntags: [focus]\n",
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), users=USERS) as running:
        for name, card in CARDS.items():
            api = HfApi(endpoint=running.endpoint, token=name.split("/")[0])
            api.create_repo(name, private=name == "ada/secret")
            text = f"---\n{card}---\n# {name}\n".encode()
            api.upload_file(path_or_fileobj=text, path_in_repo="README.md", repo_id=name)
        yield running


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=False)


FILTERS = [
    ({}, {"ada/one", "ada/two", "bob/three"}),
    ({"filter": "focus"}, {"ada/one", "bob/three"}),
    ({"filter": ["focus", "peft"]}, {"ada/one"}),
    ({"filter": ["base_model:adapter:org/base", "focus"]}, {"ada/one"}),
    ({"filter": "base_model:org/base"}, {"ada/one"}),
    ({"filter": "focus_hf"}, {"ada/one", "bob/three"}),
    ({"filter": "license:mit"}, {"ada/one"}),
    ({"filter": "de"}, {"ada/one"}),
    ({"filter": "foc"}, set()),
    ({"trained_dataset": "org/texts"}, {"ada/one"}),
    ({"pipeline_tag": "text-generation"}, {"ada/one"}),
    ({"author": "ada"}, {"ada/one", "ada/two"}),
    ({"author": "ad"}, set()),
    ({"search": "TW"}, {"ada/two"}),
    ({"author": "ada", "filter": "focus", "search": "on"}, {"ada/one"}),
    ({"gated": True}, set()),
    ({"gated": False}, {"ada/one", "ada/two", "bob/three"}),
]


@pytest.mark.parametrize(("filters", "expected"), FILTERS, ids=range(len(FILTERS)))
def test_filters(api, filters, expected):
    assert {m.id for m in api.list_models(**filters)} == expected


def test_owners_see_their_private_ones(hub):
    ada = HfApi(endpoint=hub.endpoint, token="ada")
    assert {m.id for m in ada.list_models(filter="focus")} == {"ada/one", "ada/secret", "bob/three"}


def test_orders(api, hub, monkeypatch):
    def ids(**kwargs):
        return [m.id for m in api.list_models(**kwargs)]

    assert ids(sort="created_at") == ["bob/three", "ada/two", "ada/one"]
    assert [m.likes for m in api.list_models(sort="likes")] == [0, 0, 0]
    HTTP.get(f"{hub.endpoint}/bob/three/resolve/main/config.json")
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    HfApi(endpoint=hub.endpoint, token="bob").upload_file(
        path_or_fileobj=b"{}", path_in_repo="config.json", repo_id="bob/three"
    )
    assert ids(sort="last_modified")[0] == "bob/three"
    HTTP.head(f"{hub.endpoint}/bob/three/resolve/main/config.json")
    assert api.model_info("bob/three").downloads == 0  # neither what failed nor what only looked
    HTTP.get(f"{hub.endpoint}/bob/three/resolve/main/config.json")
    assert ids(sort="downloads")[0] == "bob/three" and api.model_info("bob/three").downloads == 1
    assert set(ids(sort="trending_score")) == {"ada/one", "ada/two", "bob/three"}


def test_pages(api, hub):
    pages, url = [], f"{hub.endpoint}/api/models?limit=2&filter=focus&filter=focus_hf&sort=createdAt"
    while url:
        answer = HTTP.get(url)
        pages.append([row["id"] for row in answer.json()])
        url = answer.links.get("next", {}).get("url")
    assert pages == [["bob/three", "ada/one"]]
    answer = HTTP.get(f"{hub.endpoint}/api/models?limit=1&author=ada")
    assert HTTP.get(answer.links["next"]["url"]).json()[0]["id"] != answer.json()[0]["id"]
    assert len(list(api.list_models(limit=2))) == 2
    for bad in ("limit=x", "limit=-1", "cursor=x", "sort=name", "limit=²"):
        assert HTTP.get(f"{hub.endpoint}/api/models?{bad}").status_code == 400, bad


def test_a_listing_says_everything(api):
    full = next(iter(api.list_models(search="one")))
    assert full.sha and full.last_modified and full.gated is False and full.card_data["license"] == "mit"
    assert "README.md" in {s.rfilename for s in full.siblings}
    assert next(iter(api.list_models(search="one", expand=["downloads"]))).downloads == 0


ODD_CARDS = {
    "dates": ("date: 2026-01-31\nwhen: 2026-01-31T10:00:00Z\n", {"date": "2026-01-31"}),
    "no numbers": ("a: .nan\nb: .inf\nc: 1.5\n", {"a": None, "b": None, "c": 1.5}),
    "huge number": (f"a: {'9' * 400}\n", {"a": None}),
    "odd keys": ("1: a\nnull: b\n? [x, y]\n: c\n", {}),
    "binary": ("a: !!binary aGVsbG8=\nb: !!set {x}\n", {"b": ["x"]}),
    "python": ("a: !!python/object/apply:os.system ['true']\n", {}),
    "list": ("- a\n- b\n", {}),
    "broken": ("a: [1\n", {}),
    "tags of all kinds": ("tags: [1, {a: b}, null, x]\nlicense: {a: b}\n", {"license": {"a": "b"}}),
    "deep": ("a: " + "[" * 700 + "]" * 700 + "\n", {}),
    "billion laughs": (
        "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
        {},
    ),
    "endless": ("a: &a [*a]\n", {}),
}


@pytest.mark.parametrize("name", ODD_CARDS)
def test_odd_metadata_breaks_nothing(hub, name):
    block, expected = ODD_CARDS[name]
    api = HfApi(endpoint=hub.endpoint, token="bob")
    repo = "bob/card-" + name.replace(" ", "-")
    api.create_repo(repo)
    header = {"key": "header", "value": {"summary": "s"}}
    item = {"key": "file", "value": {"path": "README.md", "content": f"---\n{block}---\n# Card\n"}}
    HTTP.post(
        f"{hub.endpoint}/api/models/{repo}/commit/main",
        content=f"{json.dumps(header)}\n{json.dumps(item)}",
        headers={"Authorization": "Bearer bob"},
    ).raise_for_status()
    known = HTTP.get(f"{hub.endpoint}/api/models/{repo}").json()
    assert expected.items() <= known["cardData"].items()
    assert repo in [m.id for m in api.list_models(author="bob", full=True, cardData=True)]
    page = HTTP.get(f"{hub.endpoint}/{repo}")
    assert page.status_code == 200 and "<h1>Card</h1>" in page.text
    api.delete_repo(repo)


def test_a_card_the_hub_cannot_read_is_refused_beforehand(hub):
    api = HfApi(endpoint=hub.endpoint, token="bob")
    for name in ("broken", "list", "billion laughs", "python"):
        with pytest.raises((ValueError, HfHubHTTPError)):
            content = f"---\n{ODD_CARDS[name][0]}---\n".encode()
            api.upload_file(path_or_fileobj=content, path_in_repo="README.md", repo_id="bob/three")
