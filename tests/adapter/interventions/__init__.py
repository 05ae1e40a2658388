"""What users do to a model and its cache between two calls, and what the definition says of the tokens after it.

`reference` computes the truth, `session` drives a model and the truth side by side, `catalogue` is what is done in
between, `run` draws models and counts.
"""
