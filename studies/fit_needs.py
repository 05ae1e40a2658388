"""What a fit takes for models of several sizes, computed from shapes: ``python -m studies.fit_needs``."""

from __future__ import annotations

import math

from focus_hf import FocusConfig
from focus_hf.fit import FitRecipe
from focus_hf.fit.estimate import Shapes, needs

#: By name: shapes, and bytes of a number of the weights.
MODELS = {
    "SmolLM2-135M, float32": (Shapes(30, 576, 49_152, 9, 3, 64, 134_515_008), 4),
    "Qwen2.5-0.5B": (Shapes(24, 896, 151_936, 14, 2, 64, 494_032_768), 2),
    "Llama-3.1-8B": (Shapes(32, 4096, 128_256, 32, 8, 128, 8_030_261_248), 2),
    "Llama-3.1-70B": (Shapes(80, 8192, 128_256, 64, 8, 128, 70_553_706_496), 2),
}


def main() -> None:
    """Print a row for each model."""
    recipe = FitRecipe(model="", output_dir="").for_model(None)
    print("| | weights and longest window | scratch of all layers | a layer being fitted | passes | the adapter |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (shapes, size) in MODELS.items():
        found = needs(shapes, recipe, size)
        scratch = shapes.layers * sum(shapes.bytes_of_window(length, recipe.rows) for length in recipe.lengths)
        heads = {"key_value_heads": shapes.kv_heads, "query_heads": shapes.heads, "head_dim": shapes.head_dim}
        config: FocusConfig = recipe.focus_config(hidden_size=shapes.hidden, **heads)
        numbers = shapes.layers * sum(math.prod(shape) for shape in config.tensor_shapes().values())
        print(
            f"| {name} | {found.memory / 1e9:.0f} GB | {scratch / 1e9:.0f} GB | {found.layer / 1e9:.1f} GB "
            f"| {found.passes} | {2 * numbers / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    main()
