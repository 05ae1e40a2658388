"""How fast Focus should be on a GPU that is not here, predicted; and on one that is, measured beside it."""
