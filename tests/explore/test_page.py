"""The page as a file: small, closed to script from outside, with colours that everybody can tell apart."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import time

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from focus_hf import FocusConfig, FocusModelCard
from focus_hf.adapter.save import save_adapter
from focus_hf.explore import GroupNote, render, write, write_space
from focus_hf.explore.pack import NOT_PREDICTED, in_script, pack, pack_losses
from focus_hf.templates import template_folder
from tests.explore.pages import Elements, made_up, page_data, unpack
from tests.families import unbalance

HOSTILE = "</script><script>window.bad=1</script><img src=x onerror=window.bad=1> <!-- {{ 7*7 }} & \u2028 \" '"


@pytest.mark.parametrize("sides", [1, 2])
def test_5000_tokens_of_32_layers_are_small(sides, tmp_path):
    """Random numbers, which nothing compresses: a real page is smaller."""
    begun = time.perf_counter()
    page = render(made_up(tokens=5000, layers=32, groups=8, sides=sides))
    assert write(page, tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size < 5_000_000
    assert page.targets >= 1 and time.perf_counter() - begun < 60


def test_as_many_targets_as_fit():
    data = made_up(tokens=400, layers=2, groups=4)
    sizes = {}
    for budget in (10**9, 15_000, 1):
        text, targets = pack(data, budget)
        sizes[targets] = len(text)
        shown = unpack(json.loads(text), 0, 1)
        view = data.sides[0].layers[1]
        assert (shown["groups"] == view.groups).all()
        assert shown["far_distance"].shape == (400, targets)
        kept = shown["far_weight"] > 0
        assert (shown["far_distance"][kept] == view.far_distance[:, :targets][kept]).all()
        rounded = np.abs(np.sqrt(shown["far_weight"]) - np.sqrt(view.far_weight[:, :targets]))
        assert (rounded <= 0.5 / 255 + 1e-6).all()
    assert sorted(sizes) == sorted({4, 0, *sizes}) and len(sizes) == 3 and sizes[4] > sizes[0]


def test_losses_are_packed_to_a_thousandth():
    import zlib

    losses = np.array([np.nan, 0.0, 1.2345, 65.534, 1e9], dtype=np.float32)
    found = np.frombuffer(zlib.decompress(base64.b64decode(pack_losses(losses)), -15), dtype="<u2")
    assert found.tolist() == [NOT_PREDICTED, 0, 1234, 65_534, 65_534]


def hostile_page():
    data = made_up(tokens=200, layers=2, groups=4, sides=2)
    data.text = HOSTILE
    data.tokens[:2] = [HOSTILE, "</script >"]
    data.layers[0] = HOSTILE
    for side in data.sides:
        side.name = HOSTILE
        side.notes = [[GroupNote(HOSTILE, 0.25, [HOSTILE])] * 4] * 2
    return data


def test_text_from_strangers_is_only_data():
    data = hostile_page()
    html = render(data).html
    elements = Elements(html)
    scripts = elements.attributes("script")
    assert [script.get("type") for script in scripts] == ["application/json", None]
    assert not {"img", "iframe", "link", "object", "base", "form"} & {name for name, _ in elements.found}
    for name, attributes in elements.found:
        assert not any(key.startswith("on") or key in ("src", "href", "style") for key in attributes), name
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")  # nothing to load, nowhere to go
    assert page_data(html)["tokens"] == data.tokens and page_data(html)["sides"][1]["name"] == HOSTILE
    assert json.loads(in_script(json.dumps(HOSTILE))) == HOSTILE and not set("<>&\u2028") & set(in_script(HOSTILE))
    (policy,) = [meta["content"] for meta in elements.attributes("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    (code,) = [text for kind, text in elements.inside if kind == "script" and not text.startswith("{")]
    (style,) = [text for kind, text in elements.inside if kind == "style"]
    for content, directive in ((code, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way_in not in code


def test_the_page_is_written_even_if_a_name_cannot_be(tmp_path):
    data = made_up(tokens=20, layers=1, groups=4)
    data.sides[0].name = "a\ud800b"
    write(render(data), tmp_path / "page.html")
    assert "a?b" in (tmp_path / "page.html").read_text(encoding="utf-8")


# -- colours ---------------------------------------------------------------------------------------------------------

#: How people with protanopia, deuteranopia and tritanopia see linear RGB (Machado, Oliveira and Fernandes 2009).
SEEN = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def themes():
    """Colours by name, light and dark."""
    style = (template_folder() / "explore.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", block)) for block in blocks)
    return {"light": light, "dark": {**light, **dark}}


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    bright, dark = sorted((linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(rgb):
    """CIE L*a*b* (D65) of linear RGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(theme):
    """WCAG AA: 4.5 for text, 3 for frames and lines."""
    colours = themes()[theme]
    groups = [colours[f"g{number}"] for number in range(8)]
    for background in (*groups, colours["paper"], colours["raised"]):
        assert contrast(colours["ink"], background) >= 4.5, background
    for background in (colours["paper"], colours["raised"]):
        for name in ("muted", "accent", "lost", "dense"):
            assert contrast(colours[name], background) >= 4.5, name
        for name in ("one", "two"):
            assert contrast(colours[name], background) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_groups_are_told_apart_by_all_eyes(theme, eyes):
    """The distance of two colours in L*a*b* at which people see a difference is about 2.3."""
    colours = themes()[theme]
    seen = [lab(np.clip(np.array(SEEN[eyes]) @ linear(colours[name]), 0, 1)) for name in [f"g{n}" for n in range(8)]]
    distances = [np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)]
    assert min(distances) > 8, sorted(distances)[:3]


# -- files and the command -------------------------------------------------------------------------------------------


def test_a_space_has_what_the_hub_wants(tmp_path):
    page = render(made_up(tokens=50, layers=1, groups=4))
    files = write_space(page, tmp_path / "space", ["me/focus", "org/base", "./here", str(tmp_path), "gpt2"], HOSTILE)
    assert sorted(path.name for path in files) == ["README.md", "index.html"]
    assert (tmp_path / "space" / "index.html").read_text(encoding="utf-8") == page.html
    readme = (tmp_path / "space" / "README.md").read_text(encoding="utf-8")
    _, front, body = readme.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["sdk"] == "static" and facts["models"] == ["me/focus", "org/base"] and "focus" in facts["tags"]
    assert len(facts["short_description"]) <= 60 and facts["colorFrom"] in ("blue", "green")
    assert f"[me/focus]({constants.ENDPOINT}/me/focus)" in body
    assert "<script" not in body and str(tmp_path) not in body
    assert FocusModelCard(readme).data.to_dict()["sdk"] == "static"
    write_space(page, tmp_path / "space", ["me/focus"], endpoint="https://hub.example/")  # again, for another Hub
    assert "[me/focus](https://hub.example/me/focus)" in (tmp_path / "space" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match="does not belong to a static Space"):
        write_space(page, tmp_path / "other")
    assert not (tmp_path / "other" / "index.html").exists()


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny / "base"),
        FocusConfig(num_groups=4, local_window=8, sink_tokens=2, task_type="CAUSAL_LM"),
    ).eval()
    unbalance(model)
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    return save_adapter(model, tmp_path_factory.mktemp("adapters") / "mine")


def run(*arguments):
    from focus_hf.cli import app, explore  # noqa: F401

    done = CliRunner().invoke(app, ["explore", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, (SystemExit, ValueError)):
        raise done.exception
    return done


def test_the_command_writes_page_and_space(adapter, tiny, tmp_path):
    text = ["--adapter", adapter, "--text", tiny / "held_out.txt", "--max-tokens", 300]
    out = ["--out", tmp_path / "page.html"]
    done = run(*text, *out, "--space", tmp_path / "space", "--top-k", "1,2", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout.splitlines()[-1])
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert facts["bytes"] == len(html.encode()) and facts["tokens"] == 300 and facts["layers"] == 2
    assert [side["top_k"] for side in facts["sides"]] == [1, 2] and facts["left_out"] > 0
    page = page_data(html)
    assert [side["name"] for side in page["sides"]] == ["mine, top_k=1", "mine, top_k=2"]
    assert page["text"] == "held_out.txt"
    # no folder of this machine: not on the page, not in the Space
    for file in (tmp_path / "page.html", *(tmp_path / "space").iterdir()):
        assert str(tiny) not in file.read_text(encoding="utf-8") and str(adapter.parent) not in file.read_text()
    done = run(*text, *out, "--against", adapter)
    assert done.exit_code == 0 and "300 tokens, " in done.output and "Open it in a browser" in done.output
    side = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))["sides"][1]
    assert side["colours"] == [[0, 1, 2, 3]] * 2 and set(side["overlaps"][0]) <= {0.0, 1.0}


def test_mistakes_are_told(adapter, tiny, tmp_path):
    text = ["--adapter", adapter, "--text", tiny / "held_out.txt"]
    for arguments, message in (
        (["--adapter", adapter], "Which text should be shown? Give --text."),
        ([*text, "--top-k", "1,2,3"], "The page has two sides"),
        ([*text, "--against", adapter, "--top-k", "1,2"], "The page has two sides"),
        ([*text, "--top-k", "9"], "top_k must be from 1 to num_groups (4), got 9"),
    ):
        done = run(*arguments, "--out", tmp_path / "page.html")
        assert message in str(done.exception), done.output
    assert not (tmp_path / "page.html").exists()
    assert run("--adapter", adapter, "--text", "/no/such/file").exit_code == 2
    assert "Example: focus-hf explore" in run("--help").output
