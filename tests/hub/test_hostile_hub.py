"""A hostile or ill server: one line, in time, and nothing outside the target."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from huggingface_hub import constants

import focus_hf
from focus_hf.adapter.save import save_adapter
from focus_hf.hub import HubError, bounds
from focus_hf.hub.pull import adapter_info
from focus_hf.records import Evaluation, Results, save_results
from tests.families import focus_model
from tests.hub.hostile import (
    COMMIT,
    REPO,
    Asked,
    HonestHub,
    HostileHub,
    Sent,
    answer,
    as_json,
    pieces,
    read_files,
    then_silence,
)

# -- what goes wrong, whatever is asked ----------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


async def slowly(content: bytes) -> AsyncIterator[bytes]:
    for byte in content:
        yield bytes([byte])
        await asyncio.sleep(0.05)


#: Kept waiting, or fed without end.
ENDLESS = {
    "silence": lambda: then_silence(b""),
    "silence after the headers": lambda: then_silence(HEAD + b"content-length: 100\r\n\r\n{"),
    "headers byte by byte": lambda: pieces(HEAD + b"x: ", b"a", 0.05),
    "body byte by byte": lambda: pieces(HEAD + b"content-length: 1000000\r\n\r\n", b" ", 0.05),
    "chunks byte by byte": lambda: pieces(HEAD + CHUNKED, b"1\r\n \r\n", 0.05),
    "the length of a chunk byte by byte": lambda: slowly(HEAD + CHUNKED + b"0" * 15),
    "body without end": lambda: pieces(HEAD + b"\r\n", b" " * 65_536),
    "chunks without end": lambda: pieces(HEAD + CHUNKED, b"8000\r\n" + b" " * 32_768 + b"\r\n"),
    "headers without end": lambda: pieces(HEAD, b"x-%s: a\r\n" % (b"y" * 1000)),
    "promises to go on, without end": lambda: pieces(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
}

#: Not HTTP, or HTTP that contradicts itself.
BROKEN = {
    "nothing": b"",
    "noise": bytes(range(256)) * 10,
    "half a header": b"HTTP/1.1 200 OK\r\ncontent-le",
    "no such version": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "status 99999": b"HTTP/1.1 99999 OK\r\n\r\n{}",
    "status -1": b"HTTP/1.1 -1 OK\r\n\r\n{}",
    "a header of a megabyte": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "negative length": answer(b"{}", content_length="-5"),
    "a length of 30 digits": answer(b"{}", content_length="9" * 30),
    "shorter than its length": answer(b"{}", content_length="50"),
    "chunks that are none": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "escapes in a header": b"HTTP/1.1 200 OK\r\nx-\x1b[2J: \x1b[2J\r\n\r\n{}",
    "gzip": answer(gzip.compress(b"{}" + b" " * 10_000_000), content_encoding="gzip"),
    "an unknown encoding": answer(b"{}", content_encoding="br, zstd"),
}

ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\n\nTraceback (most recent call last)"

#: Refusals, and answers that are neither yes nor no.
REFUSED = {
    "204": answer(b"", "204 No Content"),
    "206 unasked": answer(b"{}", "206 Partial Content"),
    "300": answer(b"{}", "300 Multiple Choices"),
    "302 to nowhere": answer(b"", "302 Found"),
    "302 to a file": answer(b"", "302 Found", location="file:///etc/passwd"),
    "302 to noise": answer(b"", "302 Found", location="http://[::"),
    "302 to a port that is none": answer(b"", "302 Found", location="http://127.0.0.1:99999/"),
    "307 to itself": answer(b"", "307 Temporary Redirect", location="/loop"),
    "400 a list": answer(b"[1]", "400 Bad Request"),
    "400 errors": answer(b'{"errors": [1], "error": {"a": 1}}', "400 Bad Request"),
    "400 nested": answer(b"[" * 100_000, "400 Bad Request"),
    "400 escapes": answer(json.dumps({"error": ESCAPES}), "400 Bad Request", x_error_message="\\x1b[2J"),
    "401": answer(b"", "401 Unauthorized"),
    "403": answer(b'{"error": "no"}', "403 Forbidden", x_error_code="GatedRepo"),
    "404": answer(b"", "404 Not Found"),
    "409": answer(b"", "409 Conflict"),
    "416": answer(b"", "416 Range Not Satisfiable"),
    "418": answer(b"\xff" * 100, "418 I'm a teapot"),
    "429 for eleven days": answer(b"", "429 Too Many Requests", retry_after="1000000"),
    "429 for ages": answer(b"", "429 Too Many Requests", ratelimit='"api";r=0;t=99999999', retry_after="9" * 4000),
    "500": answer(b"", "500 Internal Server Error"),
    "503 for a day": answer(b"", "503 Service Unavailable", retry_after="86400"),
}

#: Not the JSON that was asked for.
NOT_JSON = {
    "empty": b"", "null": b"null", "a number": b"7", "a list": b"[]", "a list of a number": b"[7]", "a mapping": b"{}",
    "a text": b'"x"', "nested": b"[" * 200_000, "nested mappings": b'{"a":' * 100_000, "digits": b"9" * 5000,
    "NaN": b"NaN", "half": b'{"id": "org/ad', "bytes": b"\xff\xfe\x00", "a page": b"<html><script>alert(1)</script>",
    "unexpected types": b'{"id": [], "sha": {}, "siblings": 7, "files": [7], "url": 7, "commitOid": [], "errors": 7}',
}  # fmt: skip


# -- what goes wrong with what is asked ----------------------------------------------------------------------------


def described(**changes):
    """The description of a repository, changed."""
    return lambda honest: {**honest.describe(), **changes}


def listing(honest, *names, **facts):
    """The description with more files in it."""
    said = honest.describe()
    return {**said, "siblings": [*said["siblings"], *({"rfilename": name, **facts} for name in names)]}


DESCRIPTIONS = {
    **{f"sha {sha!r:.20}": described(sha=sha) for sha in ("../../x", "", 7, None, "c" * 39 + "/", ["c" * 40])},
    **{f"siblings {s!r:.20}": described(siblings=s) for s in (7, {}, [1], [{"rfilename": 1}], [{"size": 1}], None)},
    **{f"card {c!r:.20}": described(cardData=c) for c in (7, [], {"self": 1}, {"eval_results": 7}, {"tags": 7})},
    **{f"likes {n!r:.20}": described(likes=n, downloads=n) for n in ("many", -1, 10**400, 1.5, [])},
    "tags": described(tags=7),
    "dates": described(lastModified=ESCAPES),
    "another name": described(id="../../etc", modelId="x"),
    "names that lead away": lambda honest: listing(
        honest, "../evil.json", "figures/../../evil.png", "/etc/passwd", "figures/a\\..\\evil.png", "figures/\x1b.png",
        "figures/nul.png", "figures//evil.png", ".eval_results/../evil.yaml", size=1
    ),
    "100,000 figures": lambda honest: listing(honest, *(f"figures/{n}.png" for n in range(100_000))),
    "a file that is not there": lambda honest: listing(honest, "figures/not-there.png"),
    "sizes": lambda honest: listing(honest, "figures/a.png", size=-1, blobId=7, lfs=[]),
    "a size of 400 digits": lambda honest: listing(honest, "figures/a.png", size=10**400, lfs={"sha256": 1}),
    "a figure of a terabyte": lambda honest: listing(honest, "figures/a.png", size=10**12),
    "a pickle": lambda honest: listing(honest, "evil.pkl"),
}  # fmt: skip


def changed_file(name, content):
    """A file that holds something else, and is announced so."""

    def handle(asked: Asked, honest: HonestHub) -> Sent:
        return replace(honest, files={**honest.files, **handle.files})(asked)

    handle.files = {name: content}
    return handle


def with_headers(**headers):
    """Files with headers that the library would take for paths or for another way to download."""

    def handle(asked: Asked, honest: HonestHub) -> Sent:
        sent = honest(asked)
        if "/resolve/" not in asked.path or not isinstance(sent, bytes):
            return sent
        head, _, body = sent.partition(b"\r\n\r\n")
        head = re.sub(rb"\r\n(etag|x-repo-commit): [^\r]*", b"", head)
        added = "".join(f"\r\n{name.replace('_', '-')}: {value}" for name, value in headers.items())
        return head + added.encode() + b"\r\n\r\n" + body

    return handle


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


WEIGHTS, CONFIG, RESULTS, GROUPS = (
    "adapter_model.safetensors", "adapter_config.json", "focus_results.json", "focus_groups.json"
)  # fmt: skip
TENSOR = b'{"a.focus_proj": {"dtype": "F32", "shape": %s, "data_offsets": %s}}'
FILES = {
    "weights of 3 bytes": (WEIGHTS, b"abc"),
    "a header of 2^63 bytes": (WEIGHTS, safetensors(b"{}", length=2**63)),
    "a header that is longer than the file": (WEIGHTS, safetensors(b"{}", length=1000)),
    "a nested header": (WEIGHTS, safetensors(b"[" * 90_000)),
    "a header that is a list": (WEIGHTS, safetensors(b"[]")),
    "negative shapes": (WEIGHTS, safetensors(TENSOR % (b"[-1]", b"[0, 4]"))),
    "shapes of 400 digits": (WEIGHTS, safetensors(TENSOR % (b"[1" + b"0" * 400 + b"]", b"[0, 4]"))),
    "offsets that are none": (WEIGHTS, safetensors(TENSOR % (b"[1]", b"[0]"))),
    "tensors of another model": (WEIGHTS, safetensors(TENSOR % (b"[1]", b"[0, 4]"), b"0000")),
    "a configuration of brackets": (CONFIG, b"[" * 100_000),
    "a configuration of 5 MB": (CONFIG, b'{"peft_type": "FOCUS", "x": "' + b"y" * 5_000_000 + b'"}'),
    "a configuration that is a list": (CONFIG, b"[]"),
    "a configuration of escapes": (CONFIG, json.dumps({"peft_type": ESCAPES}).encode()),
    "results of 400 digits": (RESULTS, b'{"largest_group": 1' + b"0" * 400 + b"}"),
    "results of brackets": (RESULTS, b"[" * 100_000),
    "groups with labels that are none": (GROUPS, b'{"layers": [{"groups": [{"labels": [1]}]}]}'),
    "a card that YAML cannot read": ("README.md", b"---\na: [1\n---\n# x"),
    "a card that makes objects": ("README.md", b"---\na: !!python/object/apply:os.system [ls]\n---\n# x"),
    "a card of open sections": ("README.md", b"<!-- focus_hf:begin a -->\n" * 100_000),
    "a card of 9 MB": ("README.md", b"x" * 9_000_000),
    "a card that is not text": ("README.md", b"\xff\xfe\x00" * 100),
}

HEADERS = {
    "a name for a blob that leads away": with_headers(x_repo_commit=COMMIT, etag='"../../../../evil"'),
    "a name for a blob that is a file here": with_headers(
        x_repo_commit=COMMIT, etag="{secret}", x_linked_etag="{secret}"
    ),
    "a commit that leads away": with_headers(etag='"x"', x_repo_commit="../../../evil"),
    "another commit": with_headers(etag='"x"', x_repo_commit="e" * 40),
    "a short commit": with_headers(etag='"x"', x_repo_commit="ccccccc"),
    "no name for a blob": with_headers(x_repo_commit=COMMIT),
    "one name for all blobs": with_headers(x_repo_commit=COMMIT, etag='"x"'),
    "another store": with_headers(
        x_repo_commit=COMMIT, etag='"x"', x_xet_hash="0" * 64, link='<http://127.0.0.1:9/>; rel="xet-auth"'
    ),
    "a linked size": with_headers(x_repo_commit=COMMIT, etag='"x"', x_linked_size="9" * 30),
}


def other_content(asked: Asked, honest: HonestHub) -> Sent:
    """Not what was announced."""
    sent = honest(asked)
    return sent[:-3] + b"xyz" if "/resolve/" in asked.path and "range" not in asked.headers else sent


def ignores_ranges(asked: Asked, honest: HonestHub) -> Sent:
    if asked.kind == "header":
        return pieces(HEAD + b"\r\n", honest.files[WEIGHTS])
    return honest(asked)


def other_range(asked: Asked, honest: HonestHub) -> Sent:
    if asked.kind == "header":
        return answer(honest.files[WEIGHTS][50:], "206 Partial Content", content_range="bytes 50-99/100")
    return honest(asked)


def pages(step):
    """Pages of a search that go on without end."""

    def handle(asked: Asked, honest: HonestHub) -> Sent:
        if asked.kind != "list":
            return honest(asked)
        number = int(asked.query.rpartition("=")[2]) if "cursor" in asked.query else 0
        rows = [] if step == "empty" else [honest.describe()] * (400 if step == "full" else 1)
        following = "http://[" if step == "noise" else f"/api/models?cursor={0 if step == 'same' else number + 1}"
        if step != "noise":
            following = f"http://{asked.headers['host']}{following}"
        return as_json(rows, link=f'<{following}>; rel="next"')

    return handle


ODD = {"other content": other_content, "ignored ranges": ignores_ranges, "another range": other_range, **HEADERS}
PAGES = {f"pages: {step}": pages(step) for step in ("more", "same", "full", "empty", "noise")}
ROWS = {
    "bad rows among good ones": lambda honest: [
        7, None, {}, {"id": 7}, {"id": "a b"}, {**honest.describe(), "cardData": {"self": 1}, "id": "org/other"},
        {**honest.describe(), "sha": 7}, {"id": REPO, "tags": 7, "cardData": {"tags": ["focus"]}},
    ],
    "10^400 downloads": lambda honest: [{**honest.describe(), "downloads": 10**400, "likes": "x"}],
    "cards": lambda honest: [{**honest.describe(), "cardData": {"focus": {"num_groups": 1e999, "top_k": []}}}],
}  # fmt: skip


# -- asking ---------------------------------------------------------------------------------------------------------


def do_info(endpoint, place, adapter):
    return adapter_info(REPO, endpoint=endpoint)


def do_pull(endpoint, place, adapter):
    return focus_hf.pull(REPO, place / "target", endpoint=endpoint)


def do_search(endpoint, place, adapter):
    return focus_hf.hub.search("org/base", group="punctuation", endpoint=endpoint)


def do_push(endpoint, place, adapter):
    return focus_hf.push_to_hub(adapter, REPO, base_model="org/base", license="mit", endpoint=endpoint, token="t")


OPERATIONS = {"info": do_info, "pull": do_pull, "search": do_search, "push": do_push}

#: What each operation asks for.
ASKED = {
    "info": ("info", CONFIG, "header", RESULTS),
    "pull": ("info", CONFIG, "header", WEIGHTS, "README.md", "figures/a.png"),
    "search": ("list", CONFIG, GROUPS),
    "push": ("info", "README.md", "validate-yaml", "preupload", "commit"),
}


def only(kind, sent):
    """Something else for one kind of request."""

    def handle(asked: Asked, honest: HonestHub) -> Sent:
        if asked.kind != kind and asked.path != "/loop":
            return honest(asked)
        return sent() if callable(sent) else sent

    return handle


def made(kind, describe):
    return lambda asked, honest: as_json(describe(honest)) if asked.kind == kind else honest(asked)


def cases():
    """Operation, name, what the server sends, and whether it takes all the time that there is."""
    for operation, kinds in ASKED.items():
        for kind in kinds:
            answers = {**BROKEN, **REFUSED, **{name: answer(body) for name, body in NOT_JSON.items()}}
            if operation != "info":  # the same requests for another purpose: every third
                answers = dict(list(answers.items())[len(kind) % 3 :: 3])
            for name, sent in answers.items():
                yield operation, f"{kind}: {name}", only(kind, sent), "megabyte" in name
            waits = ENDLESS if kind in ("info", WEIGHTS) and operation in ("info", "pull") else {}
            for name, sent in (waits or dict(list(ENDLESS.items())[len(kind) % 5 :: 5])).items():
                yield operation, f"{kind}: {name}", only(kind, sent), True
    for operation in ("info", "pull", "push"):
        for name, describe in DESCRIPTIONS.items():
            yield operation, name, made("info", describe), False
    for operation in OPERATIONS:
        for name, (file, content) in FILES.items():
            yield operation, name, changed_file(file, content), False
    for name, handle in ODD.items():
        yield "pull", name, handle, False
        yield "info", name, handle, False
    for name, handle in PAGES.items():
        yield "search", name, handle, False
    for name, rows in ROWS.items():
        yield "search", name, made("list", rows), False


CASES = list(cases())

#: In the suite, one in four; all of them with ``-m slow``.
SHARE = 4


SECRET = "nobody's business"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = save_adapter(focus_model("llama"), tmp_path_factory.mktemp("hostile") / "adapter")
    rows = [{"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0}]
    save_results(Results([Evaluation("text", 48, rows)], largest_group=0.3), folder)
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"\x89PNG" + bytes(200))
    return folder


@pytest.fixture(scope="module")
def honest(adapter):
    return HonestHub({**read_files(adapter), "README.md": b"---\nlicense: mit\n---\n# By hand\n", GROUPS: b"{}"})


@pytest.fixture(scope="module")
def server(honest):
    with HostileHub(honest) as running:
        yield running


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a cache and a secret in it, in which nothing else may appear."""
    (tmp_path / "secret.txt").write_text(SECRET)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def check(operation, endpoint, place, adapter, announced, seconds):
    """One question to a hostile server: what came of it, ``None`` where it succeeded.

    Args:
        announced: contents by name that the server says it has.
        seconds: that it may take.
    """
    started = time.monotonic()
    error = None
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            OPERATIONS[operation](endpoint, place, adapter)
        except Exception as raised:
            error = raised
    took = time.monotonic() - started
    assert error is None or isinstance(error, HubError | ValueError), repr(error)
    for line in [str(error or ""), *(str(warning.message) for warning in noted)]:
        assert line.isprintable() and len(line) < 2_500, line[:3000]
    assert took < seconds, f"{took:.1f} seconds"
    found = {path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file()}
    assert found <= {"cache", "target", "secret.txt"} and (place / "secret.txt").read_text() == SECRET
    cached = [path for path in (place / "cache").rglob("*") if path.is_file() and path.name != "CACHEDIR.TAG"]
    assert all("models--org--" in str(path) for path in cached)
    assert all(path.resolve().is_relative_to(place / "cache") for path in cached)
    if (place / "target").exists():  # all of it, as it was announced
        assert operation == "pull" and error is None
        assert read_files(place / "target").items() <= announced.items()
    return error


def test_an_honest_server_is_understood(server, adapter, honest, place):
    server.handle = honest
    for operation in ("info", "push", "pull"):
        assert check(operation, server.endpoint, place, adapter, honest.files, 60) is None
    assert read_files(place / "target") == honest.files
    with pytest.warns(UserWarning, match="left out.*not a group report"):
        assert do_search(server.endpoint, place, adapter) == []


@pytest.mark.parametrize(
    ("operation", "handle", "takes_time"),
    [
        pytest.param(operation, handle, takes_time, marks=[pytest.mark.slow] if number % SHARE else [])
        for number, (operation, _, handle, takes_time) in enumerate(CASES)
    ],
    ids=[f"{operation}-{name}" for operation, name, _, _ in CASES],
)
def test_hostile_answers(operation, handle, takes_time, server, adapter, honest, place, monkeypatch):
    monkeypatch.setattr(bounds, "PATIENCE", 1.0 if takes_time or operation == "push" else 30.0)
    monkeypatch.setattr(bounds, "SLOWEST", 1_000_000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("focus_hf.hub.prepare._SECONDS", 1.0)
    secret = str(place / "secret.txt")
    announced = {**honest.files, **getattr(handle, "files", {})}
    server.handle = lambda asked: _filled(handle(asked, honest), secret)
    check(operation, server.endpoint, place, adapter, announced, 40)


def _filled(sent: Sent, secret: str) -> Sent:
    return sent.replace(b"{secret}", secret.encode()) if isinstance(sent, bytes) else sent


def test_there_are_enough_of_them():
    assert len(CASES) >= 600 and len(CASES[::SHARE]) >= 150
    assert {operation for operation, *_ in CASES[::SHARE]} == set(OPERATIONS)


@pytest.mark.slow
def test_the_stated_limits_hold(adapter, honest, place):
    """With the real bounds, all of what has no end at once."""
    waits = [(operation, kind, sent) for operation, kind in LONGEST for sent in ENDLESS.values()]
    late: list[str] = []

    def ask(operation, kind, sent):
        mine = place / f"{operation}-{kind}-{id(sent)}"
        handle = only(kind, sent)
        with HostileHub(lambda asked: handle(asked, honest)) as own:
            started = time.monotonic()
            with pytest.raises((HubError, ValueError)):
                OPERATIONS[operation](own.endpoint, mine, adapter)
            if time.monotonic() - started > bounds.PATIENCE + 10:
                late.append(f"{operation}-{kind}: {time.monotonic() - started:.0f} s")

    with ThreadPoolExecutor(len(waits)) as together:
        list(together.map(ask, *zip(*waits, strict=True)))
    assert not late


LONGEST = (("info", "info"), ("info", "header"), ("pull", WEIGHTS), ("search", "list"), ("push", "commit"))
