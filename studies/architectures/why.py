"""Why some families are refused: what their attention is. `unexplained` holds this against the table."""

from __future__ import annotations

#: Families, what their attention is, and why no routing is right for it.
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "falcon_mamba mamba mamba2 rwkv xlstm",
        "state-space models and recurrences",
        "There are no pairs of tokens.",
    ),
    (
        "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text",
        "an indexer chooses the tokens that each query attends to",
        "The layer is sparse already. What is left where both choose may be nothing, and which half of the work its "
        "training relied on is not ours to undo.",
    ),
    (
        "deepseek_v4",
        "keys are compressed over several tokens, and chosen",
        "A key is no token, so it has no group.",
    ),
    (
        "big_bird reformer xlnet",
        "blocks, hashes or two streams, in code of their own",
        "Their pattern is not causal attention between tokens; nothing calls the AttentionInterface.",
    ),
    (
        "bloom mpt",
        "ALiBi, in code of their own",
        "Nothing calls the AttentionInterface, so queries and keys never reach Focus.",
    ),
    (
        "codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert mvp openai-gpt prophetnet rembert "
        "roformer trocr xglm xlm",
        "scores, mask and softmax, in code of their own",
        "The same. They would be routed on the day on which transformers moves them to the interface. Masks alone "
        "could carry the pairs, but not the gradient by which centroids are trained, and would save nothing.",
    ),
)

_HEAD = """## Why the rest is refused

| model types | what their attention is | why no routing is right |
|---|---|---|
"""

_TAIL = """

Not made: gemma3n asks for timm, a package for images; the assistants of gemma4 read the keys of the model that they
assist, and are no models alone.
"""

#: A section of the page.
WHY = _HEAD + "\n".join(f"| {', '.join(types.split())} | {what} | {why} |" for types, what, why in REASONS) + _TAIL


def unexplained(by_type: dict[str, str]) -> list[str]:
    """Refused model types that `REASONS` does not name, and those that it names and are not refused."""
    named = {family for families, _, _ in REASONS for family in families.split()}
    refused = {family for family, result in by_type.items() if result == "refused"}
    return sorted((refused ^ named) & by_type.keys())
