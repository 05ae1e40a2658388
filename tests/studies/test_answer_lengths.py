"""`python -m studies.answer_lengths`: prompts from a text, and answers as the model gives them alone."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf import FocusConfig
from focus_hf.adapter.save import save_adapter
from focus_hf.evaluate import Mode
from studies.answer_lengths import answer, make_prompts, same_until

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def chat(tiny, tmp_path):
    """A base model with a chat template, and an adapter of it."""
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    tokenizer.chat_template = TEMPLATE
    for part in (base, tokenizer):
        part.save_pretrained(tmp_path / "base")
    config = FocusConfig(num_groups=4, local_window=4, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return tokenizer, save_adapter(get_peft_model(base, config), tmp_path / "adapter")


def test_dense_answers_are_the_base_models(chat, tiny):
    tokenizer, adapter = chat
    prompts = make_prompts(tokenizer, (tiny / "held_out.txt").read_text(), 32, 2)
    assert len(prompts) == 2 and not torch.equal(prompts[0][:, :16], prompts[1][:, :16])
    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base").eval()
    model = AutoModelForCausalLM.from_pretrained(adapter.parent / "base").eval()
    model.load_adapter(str(adapter))
    alone = base.generate(prompts[0], max_new_tokens=6, do_sample=False)[0, prompts[0].shape[1] :].tolist()
    assert answer(model, tokenizer, prompts[0], Mode("dense"), 6) == alone
    assert 1 <= len(answer(model, tokenizer, prompts[0], Mode("hard", 1), 6)) <= 6
    assert (same_until([1, 2, 3], [1, 2, 4]), same_until([1], [1, 2]), same_until([], [1])) == (2, 1, 0)
    with pytest.raises(ValueError, match="2,000 were asked for"):
        make_prompts(tokenizer, "a b c", 2000, 1)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        make_prompts(tokenizer, "a b c", 1, 1)
