"""Pages for tests: made up, and read back by other code than the page's own; a browser, where there is one."""

from __future__ import annotations

import base64
import glob
import html.parser
import json
import os
import shutil
import zlib

import numpy as np

from focus_hf.attention import Pattern
from focus_hf.explore import ExplorerData, Head


def made_up(tokens: int, layers: int, heads: int | None = 2, groups: int = 12, bands: int = 3) -> ExplorerData:
    """A page as hard to pack as can be: groups, weights and distances are random. Without heads layers share."""
    random = np.random.default_rng(0)
    words = ["the", " tendril", " of", " Bignonia", ",", " and", "ly", ".\n", " ", " observed"]

    def head(layer: int, number: int | None) -> Head:
        name = f"model.layers.{layer}.self_attn"
        made = Head(name, layer, number, tokens, bands)
        made.groups[:] = random.integers(groups, size=tokens)
        made.far[:], made.lost[:] = random.random((2, tokens))
        begin = np.maximum(np.arange(tokens)[:, None] - 64, 0)
        made.distance[:] = np.where(begin > 0, 64 + 1 + (random.random(made.distance.shape) * begin).astype(int), 0)
        made.distance[:] = np.minimum(made.distance, np.arange(tokens)[:, None])
        made.weight[:], made.dense[:] = np.sort(random.random((2, *made.weight.shape)) * 0.1 + 0.01)[..., ::-1]
        made.weight[:, 1::3] = 0  # what dense attention reads and the head does not
        made.weight[begin[:, 0] == 0], made.dense[begin[:, 0] == 0] = 0, 0
        made.received[:], made.places[:] = random.random((tokens, bands)) * 2, 100
        made.sums[:] = [0, 1, random.random() * 400, 1]
        made.sums[0] = random.random()
        return made

    def losses() -> np.ndarray:
        found = random.gamma(4, 1, tokens).astype(np.float32)
        found[0] = np.nan
        return found

    numbers: list[int | None] = [None] if heads is None else list(range(heads))
    return ExplorerData(
        "org/adapter",
        "a text",
        "pairs=0.15",
        [words[i] for i in random.integers(len(words), size=tokens)],
        [0],
        Pattern(64, 4, num_bands=bands),
        [head(layer, number) for layer in range(layers) for number in numbers],
        losses(),
        losses(),
    )


class Elements(html.parser.HTMLParser):
    """Every element of a page with its attributes, and what is inside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag: str) -> None:
        self.open = None

    def handle_data(self, data: str) -> None:
        if self.open in ("script", "style"):
            self.inside.append((self.open, data))

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page_data(page: str) -> dict:
    """The page's data, as JSON."""
    (text,) = [data for (_, data) in Elements(page).inside if data.startswith("{")]
    return json.loads(text)


def unpack(page: dict, number: int) -> dict[str, np.ndarray]:
    """A head's planes, by `focus_hf/explore/pack.py`'s description and not by its code."""
    length, targets = len(page["tokens"]), page["targets"]
    planes = np.frombuffer(zlib.decompress(base64.b64decode(page["heads"][number]["data"]), -15), dtype=np.uint8)
    planes = planes.reshape(-1, length).astype(float)
    assert len(planes) == 3 + 4 * targets
    rest = planes[3:].reshape(targets, 4, length)
    return {
        "groups": planes[0].astype(int),
        "far": (planes[1] / 255) ** 2,
        "lost": (planes[2] / 255) ** 2,
        "distance": (rest[:, 0] + 256 * rest[:, 1]).T,
        "weight": (rest[:, 2].T / 255) ** 2,
        "dense": (rest[:, 3].T / 255) ** 2,
    }


def find_browser() -> str | None:
    """A Chromium on this machine: the system's, or the one that Playwright brings."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    home = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or os.path.expanduser("~/.cache/ms-playwright")
    return next(iter(glob.glob(os.path.join(home, "chromium*", "chrome-linux*", "*chrom*"))), None)
