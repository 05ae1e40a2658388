"""Pages of the local Hub: cards with their pictures, and what hostile text comes to."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from focus_hf.local_hub import LocalHub
from focus_hf.local_hub.markdown import to_html
from tests.families import httpx

PNG = b"\x89PNG\r\n\x1a\n picture"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
CARD = """---
license: mit
tags: [focus, "<script>alert(2)</script>"]
model-index:
- name: x
---
<!-- focus_hf:generated -->
# Adapter

| mode | perplexity |
|---|---:|
| hard | 10.50 |

```python
print("<b>")
```

![Quality of it](figures/quality%20plot.png) ![dot](./figures/../a.svg) ![gone](figures/none.png)
[results](focus_results.json), [part](#adapter), [web](https://example.com/a?b=c&d) and ![far](https://example.com/x.png)
"""
HOSTILE = """# Hostile <script>alert(1)</script>

<img src=x onerror=alert(1)> <a href="javascript:alert(1)">x</a>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>) [d](vbscript:x)
[e](//example.com/x) [f](/api/models) [g](../../../etc/passwd) [h](\\\\example.com) [i](java&#10;script:alert(1))
<javascript:alert(1)> [j](file:///etc/passwd) [k](http://[bad) [l](?x=1)

![m](data:image/svg+xml;base64,PHN2Zz4=) ![n](javascript:alert(1)) ![o](//example.com/x.png) ![p](/api/models)
[![q](https://example.com/q.png)](https://example.com/) ![r" onerror="alert(1)](a.svg "t\\" onload=alert(1)")

\u202egnp.exe \u2066x\u2069 &#x202e;gnp &lrm;

```"><script>alert(1)</script>
x
```

<!-- <script>alert(1)</script>
<style>*{display:none}</style>
-->
text --> <iframe src="https://example.com"></iframe>
"""
USERS = {"ada": "ada", "bob": "bob"}
HTTP = httpx.Client()


class Page(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.attributes = [], {"href": [], "src": []}, set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in self.addresses:
                self.addresses[name].append(value)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LocalHub(tmp_path_factory.mktemp("hub"), users=USERS) as running:
        api = HfApi(endpoint=running.endpoint, token="ada")
        files = {
            "README.md": CARD.encode(),
            "figures/quality plot.png": PNG,
            "a.svg": SVG,
            "page.html": b"<script>alert(1)</script>",
            "focus_results.json": b'{"a": "<script>"}',
            "\u202egnp.exe": b"MZ\x00",
        }
        for name in ("ada/adapter", "ada/secret", "ada/hostile"):
            if name == "ada/hostile":
                files["README.md"] = HOSTILE.encode()
            operations = [CommitOperationAdd(path, content) for path, content in files.items()]
            api.create_repo(name, private=name == "ada/secret")
            with pytest.MonkeyPatch.context() as patch:  # repositories that were made before such names were refused
                patch.setattr("focus_hf.local_hub.uploads.check_path", lambda path: path)
                api.create_commit(
                    name, operations, commit_message=f"Files <b>of</b> {name}\n\nwith a \u202e description"
                )
        api.create_pull_request("ada/adapter", "Title <script>")
        info = api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="ada/adapter", create_pr=True)
        assert info.pr_num == 2
        yield running


def get(hub, path, token=None, status=200):
    answer = HTTP.get(hub.endpoint + path, headers={"Authorization": f"Bearer {token}"} if token else {})
    assert answer.status_code == status, answer.text
    return answer


def test_the_card_and_its_pictures(hub):
    answer = get(hub, "/ada/adapter")
    page = Page(answer.text)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<h1>Adapter</h1>" in answer.text and "focus_hf:generated" not in answer.text
    assert '<td style="text-align:right">10.50</td>' in answer.text and "print(&quot;&lt;b&gt;&quot;)" in answer.text
    assert re.search(r"<th><bdi>license</bdi></th><td><bdi>mit</bdi>", answer.text)
    assert "&lt;script&gt;alert(2)" in answer.text and "script" not in page.tags
    figure = "/ada/adapter/resolve/main/figures/quality%20plot.png"
    assert page.addresses["src"] == [figure, "/ada/adapter/resolve/main/a.svg"]
    assert 'alt="Quality of it"' in answer.text and "[picture: gone]" in answer.text
    picture = get(hub, figure)
    assert picture.content == PNG and picture.headers["content-type"] == "image/png"
    assert "/ada/adapter/resolve/main/focus_results.json" in page.addresses["href"]
    assert "https://example.com/x.png" in page.addresses["href"]  # to be followed, not fetched


def test_a_page_fetches_and_runs_nothing_from_elsewhere(hub):
    for path in ("/", "/ada/adapter", "/ada/hostile", "/ada/adapter/discussions/1", "/no/such"):
        answer = HTTP.get(hub.endpoint + path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; img-src 'self';") and "script-src" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        page = Page(answer.text)
        assert not {"script", "iframe", "link", "object", "form", "base"} & set(page.tags)
        assert all(address.startswith("/") for address in page.addresses["src"])
        assert 'name="viewport"' in answer.text and "prefers-color-scheme: dark" in answer.text


def test_hostile_cards_are_only_text(hub):
    text = get(hub, "/ada/hostile").text
    page = Page(text)
    assert page.addresses["src"] == ["/ada/hostile/resolve/main/a.svg"]
    inside = [a for a in page.addresses["href"] if not a.startswith(("/ada/hostile", "#"))]
    assert set(inside) == {"/", "https://example.com/", "http://%5Bbad"}
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and text.count("<a ") == text.count("</a>")


def test_hostile_titles_are_only_text(hub):
    for path in ("/ada/adapter/discussions", "/ada/adapter/discussions/1"):
        assert "Title &lt;script&gt;" in get(hub, path).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<!-- a --> <!-- b -->\n\n# T", "<h1>T</h1>\n"),
        ("<!-- a -->\n# T", "<h1>T</h1>\n"),
        ("a <!-- b -->", "<p>a &lt;!-- b --&gt;</p>\n"),
        ("- <!-- a -->\n", "<ul>\n<li></li>\n</ul>\n"),
        ("~~old~~ [x](mailto:a@b.c)", '<p><s>old</s> <a href="mailto:a@b.c" rel="noopener noreferrer nofollow">x</a>'),
        ("[x](own.md)", '<p><a href="#" rel="noopener noreferrer nofollow">x</a></p>\n'),
    ],
)
def test_markdown(text, expected):
    assert to_html(text).startswith(expected)


def test_files_a_browser_must_not_run(hub):
    for path, kind in (
        ("page.html", "application/octet-stream"),
        ("a.svg", "image/svg+xml"),
        ("README.md", "text/plain; charset=utf-8"),
        ("focus_results.json", "text/plain; charset=utf-8"),
    ):
        for answer in (
            get(hub, f"/ada/adapter/resolve/main/{path}"),
            HTTP.head(f"{hub.endpoint}/ada/adapter/resolve/main/{path}"),
        ):
            assert answer.headers["content-type"] == kind
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "sandbox" in answer.headers["content-security-policy"]


def test_other_pages(hub):
    api = HfApi(endpoint=hub.endpoint)
    index = get(hub, "/").text
    assert "/ada/adapter" in index and "/ada/secret" not in index
    assert "/ada/secret" in get(hub, "/", token="ada").text and "/ada/secret" not in get(hub, "/", token="bob").text

    tree = get(hub, "/ada/adapter/tree/main").text
    assert "figures/" in tree and "/ada/adapter/resolve/main/page.html" in tree
    assert "\u202e" not in tree and "\\u202egnp.exe" in tree
    folder = get(hub, "/ada/adapter/tree/main/figures").text
    assert "/ada/adapter/resolve/main/figures/quality%20plot.png" in folder and "page.html" not in folder
    shown = get(hub, "/ada/adapter/blob/main/focus_results.json")
    assert shown.text == '{"a": "<script>"}' and shown.headers["content-type"] == "text/plain; charset=utf-8"

    sha = api.model_info("ada/adapter").sha
    assert sha in get(hub, "/ada/adapter/commits/main").text
    commit = get(hub, f"/ada/adapter/commit/{sha}").text
    assert "Files &lt;b&gt;of&lt;/b&gt; ada/adapter" in commit and "added" in commit and "\u202e" not in commit
    assert "page.html" in commit and ".gitattributes" not in commit
    assert "Title" in get(hub, "/ada/adapter/discussions").text
    HfApi(endpoint=hub.endpoint, token="ada").create_repo("ada/texts", repo_type="dataset")
    assert "/datasets/ada/texts" in get(hub, "/").text
    assert "/datasets/ada/texts/resolve/main/.gitattributes" in get(hub, "/datasets/ada/texts/tree/main").text
    pull = get(hub, "/ada/adapter/discussions/2").text
    assert "/ada/adapter/tree/refs%2Fpr%2F2" in pull
    assert "/resolve/refs%2Fpr%2F2/x" in get(hub, "/ada/adapter/tree/refs%2Fpr%2F2").text


@pytest.mark.parametrize("rest", ["", "/tree/main", "/blob/main/README.md", "/commits/main", "/discussions", "/x/y"])
def test_pages_that_are_not_there(hub, rest):
    private, missing = get(hub, f"/ada/secret{rest}", status=404), get(hub, f"/ada/nobody{rest}", status=404)
    assert private.text == missing.text
    assert get(hub, f"/ada/secret{rest}", token="bob", status=404).text == missing.text
    if rest != "/x/y":
        assert get(hub, f"/ada/secret{rest}", token="ada").status_code == 200


def test_pages_of_things_that_are_not_there(hub):
    for rest in ("/tree/no", "/tree/main/no", "/blob/main/no", "/commit/main:x", "/discussions/9", "/commits/0000"):
        answer = get(hub, f"/ada/adapter{rest}", status=404)
        assert answer.headers["content-type"].startswith("text/html")
    for path in (
        "/../../etc/passwd",
        "/ada/..%2f..%2fetc",
        "/ada/%00",
        "/%1f/%1f",
        "/ada/adapter/tree/main/..%2f..",
        "/ada",
    ):
        assert HTTP.get(hub.endpoint + path).status_code == 404, path


def test_the_page_of_a_gated_repository(hub):
    api = HfApi(endpoint=hub.endpoint, token="ada")
    api.create_repo("ada/gated")
    api.upload_file(path_or_fileobj=b"# Ask first\n", path_in_repo="README.md", repo_id="ada/gated")
    api.upload_file(path_or_fileobj=b"weights", path_in_repo="w.txt", repo_id="ada/gated")
    api.update_repo_settings("ada/gated", gated="manual")
    text = get(hub, "/ada/gated").text
    assert "<h1>Ask first</h1>" in text and "This repository is gated" in text
    assert "weights" not in get(hub, "/ada/gated/blob/main/w.txt", status=401).text
    assert "weights" in get(hub, "/ada/gated/blob/main/w.txt", token="ada").text
    assert "This repository is gated" not in get(hub, "/ada/gated", token="ada").text
