"""A whole training run: text and model in, an adapter with measured quality out."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peft import get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from ..adapter.save import save_adapter
from ..attention import HARD_GATE
from ..commits import commit_of
from ..evaluate import EvaluationPlan, TokenText, evaluate
from ..evaluate.checks import check_length, check_tokenizer, check_vocabulary
from ..evaluate.leave import take_sample, write_records
from ..machine import measured_with
from ..placement import check_placement, load_base
from ..records import Evaluation, Results
from ..texts import Texts, TextSource
from .calibration import calibrate, calibration_sample
from .callbacks import TrainingDiverged
from .checkpoints import last_checkpoint, load_base_weights, step_of
from .outcome import start_records, training_facts
from .recipe import TrainRecipe
from .trainer import make_trainer

#: A generous guess.
_CHARACTERS_PER_TOKEN = 10


@dataclass
class TrainResult:
    """What a training run leaves.

    Args:
        folder: of the adapter.
        results: quality as measured, and how it was trained.
        log: the Trainer's log, a mapping per entry.
    """

    folder: Path
    results: Results
    log: list[dict[str, Any]]


def train(
    recipe: TrainRecipe,
    callbacks: Sequence[TrainerCallback] = (),
    say: Callable[[str], None] = lambda text: None,
    on_saved: Callable[[Path], object] = lambda folder: None,
) -> TrainResult:
    """Train centroids (or a whole model with Focus on), balance the groups, save, and measure.

    Under ``accelerate launch`` every process calls it, and the first one writes. What is interrupted while it measures
    leaves an adapter that can be used, without figures.

    Args:
        recipe: what to do.
        callbacks: further Trainer callbacks.
        say: told what happens next.
        on_saved: called with the adapter's folder when it is written, and again when it is measured, by the process
            that writes; `focus_hf.card.write_card` makes its card.

    Returns:
        The adapter's folder, its results and the log.

    Raises:
        ValueError: bad input; says which and what to do.
        TrainingDiverged: the loss became NaN. The last good checkpoint stays, and the adapter as it was before that
            step is in ``trainer/last_good`` of the output folder.
    """
    recipe = replace(recipe)  # checks what may have been set since
    out = recipe.check_output_dir()
    if last_checkpoint(out / "trainer") is not None and not (recipe.resume or recipe.overwrite):
        raise ValueError(f"{out} holds checkpoints of a training: pass --resume to continue it, or --overwrite.")
    check_placement(device_map=recipe.device_map, dtype=recipe.dtype)
    if recipe.device_map is not None and _processes() > 1:
        raise ValueError(
            f"device_map={recipe.device_map!r} spreads the model of one process, and there are several: leave it out, "
            "or start without accelerate launch."
        )
    set_seed(recipe.seed)
    say("reading text")
    training, held_out = _texts(recipe)
    commit, tokenizer_commit = commit_of(recipe.model), commit_of(recipe.tokenizer or recipe.model)
    model, tokenizer = _load(recipe, commit, tokenizer_commit)
    check_length(recipe.seq_len, model.config)
    windows = _windows(training, tokenizer, recipe, recipe.stride)
    validation = _windows(held_out, tokenizer, recipe, None)[: recipe.eval_windows]
    for text, some in ((training, windows), (held_out, validation)):
        check_vocabulary(some, int(model.get_input_embeddings().weight.shape[0]), text.name)
    if not recipe.from_scratch:
        check_tokenizer(model, windows)

    pins = {"revision": commit, "tokenizer_revision": tokenizer_commit} if recipe.weights == "frozen" else {}
    model = get_peft_model(model, recipe.focus_config(**pins))
    if recipe.weights == "trained":
        for name, parameter in model.named_parameters():
            if "focus_" not in name:
                parameter.requires_grad_(True)
    trainer, monitor = make_trainer(model, recipe, windows, validation, callbacks)
    checkpoint = last_checkpoint(out / "trainer") if recipe.resume else None
    if checkpoint is not None and recipe.weights == "trained":
        load_base_weights(model, checkpoint)
    say("training" if checkpoint is None else f"training, from step {step_of(checkpoint)}")
    if recipe.overwrite and not recipe.resume and trainer.is_world_process_zero():
        for old in (out / "trainer").glob("checkpoint-*"):
            shutil.rmtree(old)  # or a later --resume would take up the training that was overwritten
    started = time.monotonic()
    with _told_what_disk(out):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.monotonic() - started
    main = trainer.is_world_process_zero()
    if monitor.diverged_at is not None:
        try:
            save_adapter(model, out / "trainer" / "last_good", write=main)
        except OSError as error:
            raise TrainingDiverged(f"Training diverged, and the adapter could not be saved: {error}") from None
        monitor.raise_if_diverged()

    model.eval()
    say("balancing groups")
    sample = calibration_sample(windows, recipe.calibration_windows)
    shares = calibrate(model, sample.split(recipe.batch_size))
    results = Results(
        largest_group=max(shares.values()),
        measured_with=measured_with(),
        training=training_facts(recipe, training, len(windows), trainer, seconds),
    )
    log = list(trainer.state.log_history)
    with _told_what_disk(out):
        folder = save_adapter(model, out, write=main)
        recorded = take_sample(model, validation[0])
        if main:
            start_records(model, recipe, recorded, log, folder)
            write_records(results, folder)  # whole, should measuring be interrupted
            on_saved(folder)
    results.evaluations = _measure(model, validation, held_out, recipe, say)
    if main:
        with _told_what_disk(out):
            write_records(results, folder)
            on_saved(folder)
    trainer.accelerator.wait_for_everyone()
    return TrainResult(folder, results, log)


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _texts(recipe: TrainRecipe) -> tuple[Texts, Texts]:
    """Training text and held-out text."""
    windows = recipe.max_steps * recipe.batch_size * recipe.gradient_accumulation_steps * _processes()
    tokens = windows * (recipe.stride or recipe.seq_len) + (recipe.eval_windows + 1) * recipe.seq_len
    # More than the run can read: there is no need to tokenize the rest of a huge data set.
    characters = int(_CHARACTERS_PER_TOKEN * tokens / (1 - recipe.eval_share))
    training = recipe.training_source().load(characters, recipe.seed)
    if recipe.eval_file:
        return training, TextSource(tuple(recipe.eval_file), column=recipe.column).load()
    if recipe.eval_share == 0:
        raise ValueError("Nothing to measure on: give eval_file, or an eval_share above 0.")
    return training.split_tail(recipe.eval_share)


def _load(recipe: TrainRecipe, commit: str | None, tokenizer_commit: str | None) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model, revision=tokenizer_commit)
    if recipe.from_scratch:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model, revision=commit)), tokenizer
    dtype = "float32" if recipe.weights == "trained" else recipe.dtype  # bf16 weights are too coarse to be trained
    return load_base(recipe.model, device_map=recipe.device_map, dtype=dtype, revision=commit), tokenizer


def _windows(text: Texts, tokenizer: Any, recipe: TrainRecipe, stride: int | None) -> Tensor:
    try:
        return text.windows(tokenizer, recipe.seq_len, stride)
    except ValueError as error:
        raise ValueError(f"{text.name}: {error}") from None


@contextlib.contextmanager
def _told_what_disk(out: Path) -> Iterator[None]:
    """Whatever library fails to write, say where and what is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        checkpoint = last_checkpoint(out / "trainer")
        left = "" if checkpoint is None else f", then continue from {checkpoint.name} with --resume"
        raise OSError(f"cannot write to {out} ({error}): free some space{left}.") from error


def _measure(
    model: nn.Module, validation: Tensor, held_out: Texts, recipe: TrainRecipe, say: Callable[[str], None]
) -> list[Evaluation]:
    modes = ["dense", "local", *([] if recipe.gate == HARD_GATE else ["soft"]), "hard", "window"]
    top_ks = sorted({recipe.top_k, min(recipe.top_k + 1, recipe.num_groups)})
    plan = EvaluationPlan([recipe.seq_len], modes, top_ks, batch_size=recipe.batch_size)
    text = TokenText.of(held_out, validation.reshape(-1))
    try:
        say("measuring")
        return evaluate(model, [text], plan, tick=lambda row: say(f"measured {row}")).evaluations
    except KeyboardInterrupt:
        out = recipe.output_dir
        raise KeyboardInterrupt(
            f"the adapter is in {out}, balanced but not measured (focus-hf eval --adapter {out} --text FILE --write)"
        ) from None
