"""What `Store` raises when it is of no use any more, and `SharedMap` takes in."""

from __future__ import annotations


class StoreLost(Exception):
    """The store does not answer, refuses, or is another one than it was: connect anew."""
