"""The notebook of the first steps and the Space, with an adapter of a tiny model that routes by cells."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from focus_hf import FocusConfig, FocusModelCard
from focus_hf.adapter.save import save_adapter
from tests.explore.pages import page_data
from tests.families import CELLS, unbalance

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CURVES = {"128": [[-3.0, 0.2], [-6.0, 0.6], [-9.0, 0.99]]}


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    config = FocusConfig(
        num_groups=4, local_window=8, sink_tokens=2, task_type="CAUSAL_LM", pairs_curves=CURVES, **CELLS
    )
    model = get_peft_model(base, config).eval()
    unbalance(model)
    model.peft_config["default"].base_model_name_or_path = str(tiny / "base")
    folder: Path = save_adapter(model, tmp_path_factory.mktemp("adapters") / "mine")
    FocusModelCard.from_adapter(folder, repo_id="me/mine", base_model="org/base").save(folder / "README.md")
    return folder


@pytest.mark.slow
def test_the_notebook_runs_from_first_line_to_last(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, as a reader runs it."""
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("FOCUS_ADAPTER", str(adapter))
    monkeypatch.setenv("FOCUS_TOKENS", "200")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    assert all(cell.cell_type == "markdown" or not cell.outputs for cell in book.cells)
    where = {"metadata": {"path": adapter}}
    nbclient.NotebookClient(book, timeout=240, startup_timeout=240, resources=where).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    shares = [float(share) for share in re.findall(r"([\d.]+) % of the pairs, loss", printed)]
    assert len(shares) == 4 and shares[0] == 100 and shares == sorted(shares, reverse=True) and shares[3] < 60
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    assert any("# " in data.get("text/markdown", "") for data in shown)
    (frame,) = [data["text/html"] for data in shown if "iframe" in data.get("text/html", "")]
    assert page_data(html.unescape(frame))["setting"] == "pairs=0.15"


def test_the_space_shows_the_page_of_an_adapter(adapter: Path) -> None:
    gradio = pytest.importorskip("gradio", reason="needs gradio: pip install 'focus-hf[space]'")
    space: dict[str, Any] = runpy.run_path(str(EXAMPLES / "space" / "app.py"))
    frame = space["page"](f" {adapter} ", "", 40)
    assert frame.startswith('<iframe sandbox="allow-scripts" srcdoc="') and frame.count("<") == 2
    shown = page_data(html.unescape(frame))
    assert shown["setting"] == "pairs=0.4" and "".join(shown["tokens"])[:100] == space["TEXT"][:100]
    own = page_data(html.unescape(space["page"](str(adapter), "one two three " * 30, 100)))
    assert own["setting"] == "pairs=1" and own["pairs"] == 1
    with pytest.raises(gradio.Error, match="no-such"):
        space["page"]("./no-such", "", 20)
    assert isinstance(space["app"](), gradio.Blocks)


def test_the_space_is_one_for_the_hub() -> None:
    _, front, _ = (EXAMPLES / "space" / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["sdk"] == "gradio" and (EXAMPLES / "space" / facts["app_file"]).is_file()
    assert len(facts["short_description"]) <= 60
    assert (EXAMPLES / "space" / "requirements.txt").read_text().split() == ["focus-hf[space]"]
