"""Windows begin as the tokenizer begins a text: a model trained with ``<bos>`` is lost without."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from focus_hf.demo.tiny_base import train_tokenizer
from focus_hf.evaluate import EvaluationPlan, SlidingWindows, TokenText, evaluate, token_losses
from focus_hf.evaluate.code_tasks.names import make_names_prompts
from focus_hf.evaluate.retrieval import Haystack
from focus_hf.explore.text import passages
from focus_hf.fit.windows import spread_windows
from focus_hf.interpret.windows import Document, Word, gold_windows, text_windows
from focus_hf.texts import Texts, first_tokens, tokenize, tokenize_windows
from focus_hf.verify.measured import _windows
from tests.families import base_model, focus_model

TEXT = "The cat sat on the mat, and the dog sat on the cat. " * 30
BOS = 0


def tokenizer_that_begins(template: str):
    tokenizer = train_tokenizer(TEXT)
    special = [("<s>", BOS), ("</s>", 1)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


with_bos = tokenizer_that_begins("<s> $A")
PLAIN = torch.tensor(tokenize(with_bos, TEXT))


@pytest.mark.parametrize(
    "template, first",
    [("$A", []), ("<s> $A", [BOS]), ("<s> $A </s>", [BOS]), ("$A </s>", []), ("<s> </s> $A", [BOS, 1])],
)
def test_what_a_tokenizer_puts_before_a_text(template, first):
    tokenizer = tokenizer_that_begins(template)
    assert first_tokens(tokenizer) == first
    assert tokenizer(TEXT)["input_ids"][: len(first) + 5] == first + PLAIN[:5].tolist()


@settings(max_examples=40, deadline=None)
@given(length=st.integers(3, 60), first=st.lists(st.integers(900, 999), max_size=2), data=st.data())
def test_every_token_is_predicted_once(length, first, data):
    """After what the windows begin with and, from the second window on, at least as many tokens as overlap."""
    stride = data.draw(st.integers(1, length))
    text = SlidingWindows.of(PLAIN, length, stride, first)
    assert (text.windows[:, : len(first)] == torch.tensor(first)).all() and text.windows.shape[1] == length
    found = text.windows[:, 1:][text.scored]
    expected = PLAIN if first else PLAIN[1:]
    if first or stride < length:
        assert torch.equal(found, expected[: len(found)])
    assert PLAIN.numel() - len(found) <= length + (0 if first else len(text.windows))


def test_windows_of_a_text_hold_each_token_once():
    windows = tokenize_windows(with_bos, TEXT, 33)
    assert (windows[:, 0] == BOS).all() and windows.shape[1] == 33
    assert torch.equal(windows[:, 1:].flatten(), PLAIN[: windows[:, 1:].numel()])
    assert len(windows) == len(PLAIN) // 32
    for windows_of in (partial(tokenize_windows, with_bos, TEXT), partial(text_windows, with_bos, [TEXT])):
        with pytest.raises(ValueError, match="A window of 1 tokens has no room for text"):
            windows_of(length=1)


def test_all_that_reads_texts_begins_them():
    texts = [Texts([TEXT], "text")]
    fitted = spread_windows(texts, with_bos, [20, 30, 20], seed=0)
    assert [len(window) for window in fitted] == [20, 30, 20] and all(window[0] == BOS for window in fitted)
    assert all((window[1:] != BOS).all() for window in fitted)

    plain = text_windows(with_bos, [TEXT], 25)
    assert all(window.ids[0] == BOS and len(window.ids) <= 25 for window in plain)
    assert torch.equal(torch.cat([window.ids[1:] for window in plain])[:200], PLAIN[:200])

    words = [Word(0, 3, "DET"), Word(4, 7, "NOUN")]
    (gold, *_) = gold_windows(with_bos, [Document(TEXT, words)], ["DET", "NOUN"], 25)
    assert gold.ids[0] == BOS and gold.gold[0] == -1 and len(gold.gold) == len(gold.ids) == 25
    assert gold.gold[1] == 0

    found, left_out = passages(with_bos, [TEXT], 100, 25)
    assert all(passage.ids[0] == BOS and len(passage.ids) == len(passage.pieces) <= 25 for passage in found)
    assert sum(len(passage.ids) - 1 for passage in found) == 100 and left_out == len(PLAIN) - 100
    assert TEXT.startswith("".join(piece for passage in found for piece in passage.pieces[1:]))

    names = [make_names_prompts(tokenizer, 300, 1)[0] for tokenizer in (tokenizer_that_begins("$A"), with_bos)]
    assert names[1].ids[0] == BOS and torch.equal(names[1].ids[1:], names[0].ids[:-1])
    bare, begun = ({use.tokens: use.distance for use in prompt.asked} for prompt in names)
    assert begun and begun.items() <= {tuple(t + 1 for t in use): far for use, far in bare.items()}.items()

    hay = Haystack.make(PLAIN, 120, 2, first=[BOS])
    assert hay.text[0] == BOS and len(hay.text) + hay.present.shape[1] == 120


class Letters:
    """A tokenizer whose tokens are characters, as few as the tiny models know."""

    def __call__(self, text, add_special_tokens=True, **kwargs):
        return {"input_ids": [BOS] * add_special_tokens + [ord(letter) - 31 for letter in text]}


@pytest.mark.parametrize("stride", [1.0, 0.5])
def test_verify_cuts_what_was_measured(stride):
    """By ``eval`` from the text; by ``train`` from the windows of its validation text."""
    text, letters = Texts([TEXT], "text"), Letters()
    plan = EvaluationPlan(seq_lens=[40], modes=["dense"], stride=stride)
    begun = TokenText.of(text, text.token_ids(letters), first_tokens(letters))
    model = focus_model("llama")
    (evaluation,) = evaluate(model, [begun], plan).evaluations
    again = _windows(text, letters, evaluation)
    assert evaluation.tokens == again.scored.sum()
    perplexity = again.perplexity(token_losses(base_model("llama"), again.windows))
    assert evaluation.rows[0]["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    if stride == 1:
        windows = text.windows(letters, 40)
        (trained,) = evaluate(model, [TokenText.of(text, windows.reshape(-1))], plan).evaluations
        assert torch.equal(_windows(text, letters, trained).windows, windows)
        assert trained.rows[0]["perplexity"] == evaluation.rows[0]["perplexity"]
