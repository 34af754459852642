"""What became of a map that coordinators share, in numbers. Kept by `SharedMap`, shown by its metrics."""

from __future__ import annotations


class Counts:
    """What was done since the process began."""

    published = 0
    """Reports that were published, and marks."""
    followed = 0
    """Entries that changed what is known."""
    loads = 0
    """Instances that were loaded whole."""
    losses = 0
    """Times that the map was lost."""
