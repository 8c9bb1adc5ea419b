"""A real browser for tests of pages: Chromium of npm's @sparticuz/chromium (web/package.json), driven by Playwright."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.processes.buffer_server import ROOT

WEB = ROOT / "web"
_UNPACKED = WEB / "node_modules" / ".chromium"
_PATH = 'import("@sparticuz/chromium").then(async it => console.log(await it.default.executablePath()))'
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
_PATIENCE_MS = 60_000
"""On a busy machine a page may take its time."""
expect.set_options(timeout=_PATIENCE_MS)
_PHONE = 600
"""Widths below it are a phone's."""


def chromium_path() -> str:
    """Unpacks the browser once. Skips the test where there is no Node.js."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed, which the browser of these tests needs: apt-get install nodejs npm")
    lock = os.open(WEB, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest would unpack over each other
        if not (WEB / "node_modules" / "@sparticuz").is_dir():
            _run("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error")
        _UNPACKED.mkdir(exist_ok=True)
        return _run("node", "-e", _PATH).strip()
    finally:
        os.close(lock)


def _run(*words: str) -> str:
    environment = {**os.environ, "TMPDIR": str(_UNPACKED)}
    done = subprocess.run(words, cwd=WEB, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser and ends it. A fixture of module scope wraps this: a start takes half a second."""
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*_FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page, with what it complained about and what it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Errors of scripts, of the console, and of requests that failed"""
    requests: list[str] = field(default_factory=list)
    """URLs, that of the page included"""

    @property
    def foreign_requests(self) -> list[str]:
        """URLs that are neither files nor on this machine."""
        ours = ("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")
        return [url for url in self.requests if not url.startswith(ours)]

    def axe(self) -> list[str]:
        """What axe finds, as `rule: element`; empty for a page that everybody can use. It loads no file for that."""
        self.page.evaluate((WEB / "node_modules" / "axe-core" / "axe.min.js").read_text())
        found = json.loads(
            self.page.evaluate("axe.run({preload: false}).then(result => JSON.stringify(result.violations))")
        )
        return [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]]

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(wide))


@contextmanager
def visit(browser: Browser, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Visit]:
    """Opens the URL in a window of its own and waits until its scripts and pictures are loaded."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        has_touch=width < _PHONE,
    )
    context.set_default_timeout(_PATIENCE_MS)
    page = context.new_page()
    found = Visit(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("requestfailed", lambda request: found.errors.append(f"{request.url}: {request.failure}"))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("console", lambda said: found.errors.append(said.text) if said.type == "error" else None)
    try:
        page.goto(url, wait_until="load")
        yield found
    finally:
        context.close()
