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
from focus_hf.explore import ExplorerData, LayerView, Side


def made_up(tokens: int, layers: int, groups: int, top_k: int = 1, sides: int = 1) -> ExplorerData:
    """A page as hard to pack as can be: groups, weights and distances are random."""
    random = np.random.default_rng(0)
    words = ["the", " tendril", " of", " Bignonia", ",", " and", "ly", ".\n", " ", " observed"]

    def layer() -> LayerView:
        view = LayerView.empty(tokens, top_k, Pattern(64, 4))
        view.groups[:] = random.permuted(np.tile(np.arange(groups), (tokens, 1)), axis=1)[:, :top_k]
        for mass in (view.confidence, view.near, view.sink, view.lost):
            mass[:] = random.random(tokens)
        for distance, weight in (
            (view.far_distance, view.far_weight),
            (view.lost_distance, view.lost_weight),
        ):
            distance[:] = (random.random(distance.shape) * np.arange(tokens)[:, None]).astype(int)
            weight[:] = np.sort(random.random(weight.shape) * 0.1, axis=1)[:, ::-1]
        return view

    def losses() -> np.ndarray:
        found = random.gamma(4, 1, tokens).astype(np.float32)
        found[0] = np.nan
        return found

    return ExplorerData(
        "a text",
        [words[i] for i in random.integers(len(words), size=tokens)],
        [0],
        [f"model.layers.{number}.self_attn" for number in range(layers)],
        [
            Side(
                f"side {number}",
                top_k,
                groups,
                Pattern(64, 4),
                [layer() for _ in range(layers)],
                losses(),
                colours=[list(range(groups))] * layers,
            )
            for number in range(sides)
        ],
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


def unpack(page: dict, side: int, layer: int) -> dict[str, np.ndarray]:
    """A layer's planes, by `focus_hf/explore/pack.py`'s description and not by its code."""
    of_side, length, targets = page["sides"][side], len(page["tokens"]), page["targets"]
    planes = np.frombuffer(zlib.decompress(base64.b64decode(of_side["layers"][layer]), -15), dtype=np.uint8)
    planes = planes.reshape(-1, length).astype(float)
    pattern = of_side["patterns"][layer]
    top_k, reads = pattern["groups"], pattern["reads"] or 0
    assert len(planes) == top_k + reads + 4 + 6 * targets
    read, planes = planes[top_k : top_k + reads], np.delete(planes, range(top_k, top_k + reads), axis=0)
    found = {"groups": planes[:top_k].T.astype(int), "confidence": planes[top_k] / 255, "reads": read.T.astype(int)}
    for number, name in enumerate(("near", "sink", "lost_mass")):
        found[name] = (planes[top_k + 1 + number] / 255) ** 2
    for number, name in enumerate(("far", "lost")):
        rest = planes[top_k + 4 + number * 3 * targets :][: 3 * targets].reshape(targets, 3, length)
        found[f"{name}_distance"] = (rest[:, 0] + 256 * rest[:, 1]).T
        found[f"{name}_weight"] = (rest[:, 2].T / 255) ** 2
    return found


def find_browser() -> str | None:
    """A Chromium on this machine: the system's, or the one that Playwright brings."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    home = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or os.path.expanduser("~/.cache/ms-playwright")
    return next(iter(glob.glob(os.path.join(home, "chromium*", "chrome-linux*", "*chrom*"))), None)
