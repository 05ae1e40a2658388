"""Figures such as an evaluation leaves them."""

from focus_hf.records import Evaluation, Results

ROWS = [
    {"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0},
    {"mode": "local", "top_k": None, "perplexity": 12.5, "pairs": 0.1},
    {"mode": "hard", "top_k": 1, "perplexity": 10.5, "pairs": 0.3},
]
RESULTS = Results(
    [Evaluation("held-out text", 48, ROWS, stride=24), Evaluation("a data set", 48, ROWS[1:], dataset="org/texts")],
    retrieval=[{"mode": "hard", "top_k": 1, "length": 64, "gain": 1.5, "exact": 0.25}],
    benchmarks=[{"task": "a_task", "metric": "acc", "dense": 0.5, "focus": 0.25, "stderr": None}],
    largest_group=0.27,
    measured_with={"torch": "2.13"},
    training={"steps": 3},
)
