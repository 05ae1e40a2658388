"""The page as a file: small, closed to script from outside, with colours that everybody can tell apart."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from focus_hf import FocusConfig, FocusModelCard
from focus_hf.adapter.save import save_adapter
from focus_hf.explore import render, write, write_space
from focus_hf.explore.pack import LEAST, in_script, pack
from focus_hf.files import template_folder
from tests.explore.pages import Elements, made_up, page_data, unpack
from tests.families import unbalance

HOSTILE = "</script><script>window.bad=1</script><img src=x onerror=window.bad=1> <!-- {{ 7*7 }} & \u2028 \" '"


def test_a_page_stays_below_a_megabyte_and_a_half(tmp_path):
    """Random numbers, which nothing compresses: then the heads with most to show are on it."""
    page = render(made_up(tokens=1500, layers=30, heads=3))
    size = write(page, tmp_path / "page.html")
    assert size == (tmp_path / "page.html").stat().st_size < 1_500_000
    shown = page_data(page.html)
    with_tokens = [number for number, head in enumerate(shown["heads"]) if head["data"] is not None]
    assert 10 < len(with_tokens) == page.packed.heads < 90
    assert shown["order"][: len(with_tokens)] == sorted(with_tokens, key=shown["order"].index)
    interest = [page.packed.words[number].interest for number in shown["order"]]
    assert interest == sorted(interest, reverse=True) and len(interest) == 90
    assert all(head["words"] for head in shown["heads"])  # of the others there are words


def test_as_much_as_fits():
    data = made_up(tokens=400, layers=2)
    everything, fewer, some, none = (pack(data, budget) for budget in (10**9, 40_000, 20_000, 1))
    assert [(one.targets, one.heads) for one in (everything, fewer, none)] == [(8, 4), (4, 4), (4, 0)]
    assert some.targets == 4 and 0 < some.heads < 4 and len(some.text) <= 20_000
    for packed in (everything, fewer):
        for number, head in enumerate(data.heads):
            shown = unpack(json.loads(packed.text), number)
            assert (shown["groups"] == head.groups).all()
            for name in ("far", "lost"):
                assert np.abs(np.sqrt(shown[name]) - np.sqrt(getattr(head, name))).max() <= 0.5 / 255 + 1e-6
            kept = (shown["weight"] > 0) | (shown["dense"] > 0)
            assert kept[200:].all() and (shown["distance"][kept] == head.distance[:, : packed.targets][kept]).all()
            for name in ("weight", "dense"):
                rounded = np.abs(np.sqrt(shown[name]) - np.sqrt(getattr(head, name)[:, : packed.targets]))
                assert rounded.max() <= 0.5 / 255 + 1e-6


def test_small_weights_are_left_out():
    data = made_up(tokens=200, layers=1, heads=1)
    data.heads[0].weight[:], data.heads[0].dense[:] = LEAST * 0.9, 0.5
    data.heads[0].dense[100:] = LEAST * 0.9
    shown = unpack(json.loads(pack(data).text), 0)
    assert (shown["weight"] == 0).all() and (shown["dense"][:100] > 0.49).all()
    assert (shown["dense"][100:] == 0).all() and (shown["distance"][100:] == 0).all()


def hostile_page():
    data = made_up(tokens=200, layers=2)
    data.text = data.adapter = data.setting = HOSTILE
    data.tokens[:2] = [HOSTILE, "</script >"]
    data.tokens[100:140] = [HOSTILE] * 40  # typical of groups, so that names and words hold it
    for head in data.heads:
        head.name = HOSTILE
        head.groups[100:140] = 3
        head.received[100:140] = 4
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
    assert page_data(html)["tokens"] == data.tokens and page_data(html)["adapter"] == HOSTILE
    (first, *_) = page_data(html)["heads"]
    assert HOSTILE[:12] in first["words"] and HOSTILE[:12] in first["groups"][0]["name"]
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
    data = made_up(tokens=20, layers=1)
    data.adapter = "a\ud800b"
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
    weights = [colours[f"w{number}"] for number in range(5)]
    for background in (*groups, *weights, colours["paper"], colours["raised"]):
        assert contrast(colours["ink"], background) >= 4.5, background
    for background in (colours["paper"], colours["raised"]):
        for name in ("muted", "accent", "lost"):
            assert contrast(colours[name], background) >= 4.5, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ramp", ["w", "h"])
def test_shades_grow_evenly_from_the_paper(theme, ramp):
    colours = themes()[theme]
    names = sorted(name for name in colours if re.fullmatch(rf"{ramp}\d", name))
    steps = [contrast(colours[name], colours["paper"]) for name in names]
    assert len(steps) in (5, 6) and all(later > 1.1 * earlier for earlier, later in itertools.pairwise(steps)), steps


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_groups_are_told_apart_by_all_eyes(theme, eyes):
    """The distance of two colours in L*a*b* at which people see a difference is about 2.3."""
    colours = themes()[theme]
    seen = [lab(np.clip(np.array(SEEN[eyes]) @ linear(colours[name]), 0, 1)) for name in [f"g{n}" for n in range(8)]]
    distances = [np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)]
    assert min(distances) > 8, sorted(distances)[:3]


# -- files and the command -------------------------------------------------------------------------------------------


def test_a_space_has_what_the_hub_wants(tmp_path, monkeypatch):
    page = render(made_up(tokens=50, layers=1))
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
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example/")  # again, for another Hub
    write_space(page, tmp_path / "space", ["me/focus"])
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
    from focus_hf.cli import app

    done = CliRunner().invoke(app, ["explore", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, (SystemExit, ValueError)):
        raise done.exception
    return done


def test_the_command_writes_page_and_space(adapter, tiny, tmp_path):
    text = ["--adapter", adapter, "--text", tiny / "held_out.txt", "--max-tokens", 300]
    out = ["--out", tmp_path / "page.html"]
    done = run(*text, *out, "--space", tmp_path / "space", "--top-k", "2", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout.splitlines()[-1])
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert facts["bytes"] == len(html.encode()) and facts["tokens"] == 300 and facts["heads"] == 2
    assert facts["setting"] == "top_k=2" and facts["left_out"] > 0 and facts["perplexity"] > 1
    page = page_data(html)
    first = page["heads"][page["order"][0]]
    assert facts["first"] == f"layer {first['layer']}: {first['words']}"
    assert page["adapter"] == "mine" and page["text"] == "held_out.txt" and "All heads of a layer share" in html
    # no folder of this machine: not on the page, not in the Space
    for file in (tmp_path / "page.html", *(tmp_path / "space").iterdir()):
        assert str(tiny) not in file.read_text(encoding="utf-8") and str(adapter.parent) not in file.read_text()
    done = run(*text, *out)
    assert done.exit_code == 0 and "300 tokens, " in done.output and "It opens at layer" in done.output
    assert page_data((tmp_path / "page.html").read_text(encoding="utf-8"))["setting"] == "top_k=1"


def test_mistakes_are_told(adapter, tiny, tmp_path):
    text = ["--adapter", adapter, "--text", tiny / "held_out.txt"]
    for arguments, message in (
        (["--adapter", adapter], "Which text should be shown? Give --text."),
        ([*text, "--top-k", "9"], "top_k must be an integer from 1 to num_groups (4), got 9"),
        ([*text, "--pairs", "0.2"], "pairs is for routing='cells'"),
    ):
        done = run(*arguments, "--out", tmp_path / "page.html")
        assert message in str(done.exception), done.output
    assert not (tmp_path / "page.html").exists()
    assert run("--adapter", adapter, "--text", "/no/such/file").exit_code == 2
    assert "Example: focus-hf explore" in run("--help").output
