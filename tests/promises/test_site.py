"""The site builds without a warning, and what `make docs-publish` pushes has a root and every page that links name."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Route, sync_playwright

from tests.promises.conftest import BIN, ROOT
from tests.server.coordinator.http.page.conftest import arguments

DOCS = ROOT / "docs"
SITE = "https://lmkv.github.io/lmkv/"
LINK = re.compile(re.escape(SITE) + r"[\w./-]*(?:#[\w-]+)?")
TIMEOUT_SECONDS = 580.0
IDENTITY = {f"GIT_{role}_{part}": f"site@{role}" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}


def publish(folder: Path, *arguments: str) -> Path:
    """Runs what `make docs-publish` runs in `folder/clone`; everything that is published by then, checked out."""
    clone, published = folder / "clone", folder / "published"
    if not (clone / ".git").exists():
        shutil.copytree(ROOT / "scripts", clone / "scripts")
        git(folder, "init", "--quiet", "--bare", "origin")
        git(folder, "init", "--quiet", "clone")
        git(clone, "remote", "add", "origin", folder / "origin")
        git(clone, "commit", "--quiet", "--allow-empty", "--message", "What the site is built from")
    run(clone / "scripts/docs-publish", *arguments, cwd=clone)
    shutil.rmtree(published, ignore_errors=True)
    git(folder, "clone", "--quiet", "--branch", "gh-pages", "origin", "published")
    return published


def git(folder: Path, *arguments: str | Path) -> str:
    return run("git", *arguments, cwd=folder)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | IDENTITY | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def root_leads_to(published: Path) -> str:
    targets: list[str] = re.findall(r'<a href="([^"]+)">', (published / "index.html").read_text())
    assert len(targets) == 1
    return targets[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is published before any release. Strict: no broken link or anchor, no page outside the navigation."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "clone/docs")
    shutil.copy(ROOT / "mkdocs.yml", folder / "clone")
    return publish(folder, "main")


@pytest.mark.timeout(600)
def test_every_page_and_picture_is_published(site: Path) -> None:
    version = site / "main"
    pages = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    assert {page.parent if page.name == "index.md" else page.with_suffix("") for page in pages} == {
        page.relative_to(version).parent for page in version.rglob("index.html")
    }
    index = (version / "llms.txt").read_text()
    assert "concepts/architecture/index.md" in index
    for page in version.rglob("*.html"):
        shown = re.findall(r"<(?:img|source)[^>]* src(?:set)?=\"([^\"#:]+)[\"#]", page.read_text())
        broken = [picture for picture in shown if page.name == "index.html" and not (page.parent / picture).exists()]
        assert broken == [], f"{page.relative_to(version)}: there is no such picture"


@pytest.mark.timeout(600)
def test_every_page_with_a_diagram_shows_it_without_a_network(site: Path) -> None:
    """The browser gets the files of the site; every other request is refused."""
    pages = [page for page in DOCS.rglob("*.md") if "```mermaid" in page.read_text()]
    assert len(pages) > 5
    refused: list[str] = []

    def answer(route: Route) -> None:
        url = route.request.url
        path = site / url.removeprefix(SITE).partition("?")[0].partition("#")[0]
        if not url.startswith(SITE):
            refused.append(f"{route.request.resource_type} {url}")
            route.abort()
        else:
            route.fulfill(path=path / "index.html" if path.is_dir() else path)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**arguments())
        visited = browser.new_page()
        visited.route("**/*", answer)
        for page in pages:
            visited.goto(f"{SITE}main/{page.relative_to(DOCS).with_suffix('')}/")
            visited.wait_for_selector("div.mermaid")  # the theme puts it in the place of a source once it is drawn
            visited.wait_for_function("!document.querySelector('pre.mermaid')")
        browser.close()
    # The theme also asks GitHub for the repository's stars, and shows none without an answer.
    assert [one for one in refused if "https://api.github.com/repos/" not in one] == []


ANSWERS = {
    "How do I size the pool?": "operate/sizing",
    "How do I see the hit rate per model?": "operate/monitoring",
    "How do I use my own router?": "guides/kv-events",
    "What happens when the coordinator dies?": "operate/troubleshooting",
    "How do I upgrade vLLM, and do caches survive?": "operate/upgrades",
    "How do I use it with SGLang?": "guides/sglang",
    "Why did my prompt miss?": "operate/misses",
    "How do I limit the disk?": "reference/limits",
    "How do I separate tenants?": "guides/multi-tenancy",
    "What does it cost when nothing hits (GPU, CPU)?": "operate/sizing",
    "How much CPU does a node need?": "operate/sizing",
    "Can I keep my LMCache configuration?": "guides/migrate-from-lmcache",
    "troubleshooting": "operate/troubleshooting",
    "limits": "reference/limits",
    "promql": "operate/monitoring",
}
"""Questions that users bring, as they type them, and the page that answers each."""


@pytest.mark.timeout(600)
def test_the_first_result_of_the_search_answers_a_question(site: Path) -> None:
    handler = functools.partial(QuietHandler, directory=str(site / "main"))
    found = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(**arguments())
        visited = browser.new_page()
        root = f"http://127.0.0.1:{server.server_port}/"
        for question in ANSWERS:
            visited.goto(f"{root}?q={quote(question)}")
            first = visited.wait_for_selector("a.md-search-result__link", state="attached")
            assert first
            found[question] = str(first.get_attribute("href")).removeprefix(root).partition("/?")[0]
        browser.close()
        server.shutdown()
    assert found == ANSWERS


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in the base class
        """Logs nothing."""


@pytest.mark.timeout(600)
def test_the_root_of_the_site_leads_to_the_main_branch_before_a_release(site: Path) -> None:
    assert root_leads_to(site) == "main/"
    assert (site / "main/index.html").exists()


@pytest.mark.timeout(600)
def test_every_link_to_the_site_is_published(site: Path) -> None:
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = [file for path in listed.split("\0") if path and (file := ROOT / path).is_file()]
    links = {link for file in files for link in LINK.findall(file.read_bytes().decode(errors="replace"))}
    assert {SITE, f"{SITE}main/operate/security/", f"{SITE}main/operate/kubernetes/"} <= links
    for link in links:
        path, _, anchor = link.removeprefix(SITE).partition("#")
        page = site / path / "index.html" if path.endswith("/") or not path else site / path
        assert page.exists(), f"{link}: there is no such page"
        assert not anchor or f'id="{anchor}"' in page.read_text(), f"{link}: there is no such heading"


@pytest.mark.timeout(600)
def test_the_root_of_the_site_leads_to_the_latest_release_once_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "clone/docs").mkdir(parents=True)
    (tmp_path / "clone/docs/index.md").write_text("# A page\n")
    (tmp_path / "clone/mkdocs.yml").write_text("site_name: site\nplugins: []\n")
    assert root_leads_to(publish(tmp_path, "--update-aliases", "0.1.0", "latest")) == "latest/"
    published = publish(tmp_path, "main")
    assert root_leads_to(published) == "latest/"
    assert {folder.name for folder in published.iterdir()} >= {"main", "0.1.0", "latest"}
