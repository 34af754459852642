"""Every link and every file that README and the pages name has its target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("docker/README.md", "protos/README.md", "tests/README.md", "tests/bounds.md")),
        ROOT / "helm/lmkv/README.md",
        ROOT / "client/typescript/README.md",
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"")
REPOSITORY = "https://github.com/lmkv/lmkv/blob/main/"
"""How pages of the site name files outside `docs/`."""
RAW = "https://raw.githubusercontent.com/lmkv/lmkv/main/"
"""How README names pictures, so that package indexes show them, too."""
SCHEME = re.compile(r"#gh-(light|dark)-mode-only$")
"""Ends the path of a picture that is shown in one color scheme only."""
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
FILE = re.compile(r"`([\w./{},-]+/[\w./{},-]+\.(?:c|cpp|cu|h|json|md|proto|py|yaml))`")
FOLDERS = (".", "docs", "client/lmkv_client", "server/lmkv_server", "kernels", "protos", "tests")
"""Where files are that a page names by the end of their path."""


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, except those in code and those outside the repository."""
    text = CODE.sub("", CODE_BLOCK.sub("", page.read_text()))
    found = [link for pair in LINK.findall(text) for link in pair if link]
    local = [SCHEME.sub("", link.replace(REPOSITORY, f"{ROOT}/").replace(RAW, f"{ROOT}/")) for link in found]
    return [link for link in local if "://" not in link]


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", word).strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    spans = [span for span in FILE.findall(page.read_text()) if not span.startswith("google/")]  # which is Google's
    named = [path for span in spans for path in spelt_out(span)]
    assert [path for path in named if not any((ROOT / folder / path).exists() for folder in FOLDERS)] == []


def spelt_out(span: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    before, brace, rest = span.partition("{")
    inner, _, after = rest.partition("}")
    return [path for one in inner.split(",") for path in spelt_out(f"{before}{one}{after}")] if brace else [span]


def test_headings_are_called_as_github_calls_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `key`, and more\n\n```\n# no heading\n```\n\n## [LMCache](x.md)'s *own*: 5 GB\n")
    assert anchors(page) == {"a-key-and-more", "lmcaches-own-5-gb"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```mermaid" in page.read_text()], ids=lambda page: page.name
)
def test_diagrams_have_no_semicolon(page: Path) -> None:
    """Mermaid takes it for the end of a line, and shows an error instead of the diagram."""
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for diagram in diagrams for line in diagram.splitlines() if ";" in line] == []
