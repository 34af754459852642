"""Makes text from outside safe to show: in logs, error messages and tables of the command line. Pure."""

from __future__ import annotations


def safe_text(text: str, limit: int) -> str:
    """The text on one line and of at most `limit` characters, with all that is not printable escaped.

    Not printable are control characters (line ends, terminal escapes), Unicode's line separators, and characters that
    change the direction or width of others: with them one line of a log can look like several, or like another one.
    """
    if len(text) > limit:
        left_out = f"… ({len(text) - limit} more characters)"
        return f"{safe_text(text[:limit], limit)}{left_out}"
    if text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 1]}…"
