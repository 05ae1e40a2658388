"""The documents of a batch: whole sequences, or several packed into a row, without padding."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .definition import PADDING, WhoAttends


def sequences(who: WhoAttends, num_queries: int) -> Iterator[tuple[int, Tensor | slice, Tensor | slice]]:
    """Every document that has queries, without padding: its row in the batch, its tokens, and its queries.

    Yields:
        Indices of the tokens in ``0 .. S - 1``, and of those that are queries in ``0 .. Q - 1``.
    """
    positions, documents = who.positions, who.documents
    num_keys = positions.shape[1]
    first_query = num_keys - num_queries
    if who.first_position is not None and documents is None:
        yield from ((row, slice(0, num_keys), slice(0, num_queries)) for row in range(positions.shape[0]))
        return
    for row in range(positions.shape[0]):
        real = positions[row] != PADDING
        if documents is None and bool(real.all()):
            yield row, slice(0, num_keys), slice(0, num_queries)
            continue
        tokens = real.nonzero().squeeze(-1)
        counts = (
            [tokens.shape[0]]
            if documents is None
            else documents[row, tokens].unique_consecutive(return_counts=True)[1].tolist()
        )
        for document in tokens.split(counts):
            queries = document[document >= first_query] - first_query
            if queries.numel():
                yield row, document, queries
