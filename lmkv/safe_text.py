"""Makes untrusted text safe for logs, error messages and tables of the command line. Pure."""

from __future__ import annotations


def safe_text(text: str, limit: int) -> str:
    """The text on one line of at most `limit` characters, with characters that are not printable escaped.

    Not printable are control characters (line ends, terminal escapes), Unicode's line separators, and characters that
    change the direction or width of others. With them a caller could forge log lines.
    """
    if len(text) > limit:
        left_out = f"… ({len(text) - limit} more characters)"
        return f"{safe_text(text[:limit], limit)}{left_out}"
    if text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 1]}…"
