"""Why parts of prompts were missed: the reasons, and a bounded memory of what was lost and why."""

from __future__ import annotations
