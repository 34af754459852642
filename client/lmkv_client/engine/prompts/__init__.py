"""One prompt of an engine: the message of its lookup, where its chunks were, and what is counted and reported of it."""
