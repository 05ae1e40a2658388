"""A Space that shows the explorer for any Focus adapter, by its Hub id.

    pip install "focus-hf[space]" && python examples/space/app.py

Put this folder into a Space on the Hub as it is: `hf upload ORG/NAME . --repo-type space`. It runs on a CPU. Adapters
are safetensors, and no code of a model's repository is run.
"""

from __future__ import annotations

import functools
import html
from pathlib import Path
from typing import Any

import gradio as gr

from focus_hf import set_routing
from focus_hf.adapter import focus_layers
from focus_hf.explore import explore, render
from focus_hf.explore.command import reported_names
from focus_hf.explore.page import is_hub_id
from focus_hf.hub import load_adapted

TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
MOST_TOKENS = 1500


@functools.lru_cache(maxsize=1)
def loaded(adapter: str) -> Any:
    """Model, tokenizer and folder of the last adapter that was asked for."""
    return load_adapted(adapter)


def page(adapter: str, text: str, pairs: float) -> str:
    """The explorer's page of an adapter, in a frame that can do nothing but show it."""
    if not is_hub_id(adapter.strip()):  # nor are folders of the machine that it runs on anybody's business
        raise gr.Error("Give an adapter by its id on the Hub: org/name.")
    try:
        model, tokenizer, folder = loaded(adapter.strip())
        if focus_layers(model)[0].routing_config.by_cells:
            set_routing(model, pairs=pairs / 100)
        data = explore(model, tokenizer, text or TEXT, adapter=adapter.strip(), name="a text", max_tokens=MOST_TOKENS)
        data.names = reported_names(folder)
    except (ValueError, OSError) as error:  # an id that does not exist, a gated base model, an adapter of another kind
        raise gr.Error(html.escape(str(error))) from error
    content = html.escape(render(data).html)
    return f'<iframe sandbox="allow-scripts" srcdoc="{content}" style="width:100%;height:85vh;border:0"></iframe>'


def app() -> gr.Blocks:
    """The form and, below it, the page."""
    with gr.Blocks(title="Focus explorer") as blocks:
        with gr.Row():
            adapter = gr.Textbox(label="Adapter", placeholder="org/base-focus", scale=2)
            pairs = gr.Slider(5, 100, value=20, step=1, label="Pairs to attend to, in % (routing by cells)")
        text = gr.Textbox(label="Text (a page of Dickens, if none is given)", lines=2, max_lines=8)
        button = gr.Button("Show what it reads", variant="primary")
        shown = gr.HTML()
        button.click(page, [adapter, text, pairs], shown)
        adapter.submit(page, [adapter, text, pairs], shown)
    return blocks


if __name__ == "__main__":
    app().launch()
