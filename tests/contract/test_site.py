"""The site of `make docs`, built whole and opened in a real browser: nothing asked of another host, readable by all.

With HEADRACE_SITE_PAGES=all (`make check-docs`) every page is opened in each way, otherwise six pages in one way each.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from playwright.sync_api import Browser

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.main import _COMMANDS
from headrace.errors import HeadraceError, RetryableError, error_classes
from tests.support.browser import chromium, visit
from tools.reference import pages
from tools.site import ROOT, Entry, about, build, dead_links, entries_of, expanded, outside_of_the_nav

ZENSICAL = ROOT / ".venv-docs/bin/zensical"
EVERY_PAGE = os.environ.get("HEADRACE_SITE_PAGES") == "all"
KINDS = ("index", "start/first_run", "reference/client", "reference/protos/reward", "migrate", "flags")
WAYS: Sequence[Mapping[str, Any]] = ({"width": 1280}, {"width": 1280, "dark": True}, {"width": 360, "height": 740})
PROTOS = {
    "buffer": buffer_pb2,
    "reward": reward_pb2,
    "rollout": rollout_pb2,
    "sample": sample_pb2,
    "trainer": trainer_pb2,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ZENSICAL.is_file():
        pytest.skip("zensical is not installed: make docs")
    folder = tmp_path_factory.mktemp("site") / "site"
    assert build(ZENSICAL, folder) == []
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def url(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pages_ask_no_other_host_and_are_readable_by_all(site: Path, browser: Browser) -> None:
    chosen = [(site / f"{kind}.html", WAYS[number % len(WAYS)]) for number, kind in enumerate(KINDS)]
    if EVERY_PAGE:
        chosen = [(page, way) for page in sorted(site.rglob("*.html")) if page.name != "404.html" for way in WAYS]
    wrong = {}
    for page, way in chosen:
        with visit(browser, page.as_uri(), **way) as seen:
            found = [*seen.errors, *seen.foreign_requests, *seen.axe()]
            if seen.overflow() > 0:
                found.append(f"{seen.overflow()} pixels too wide")
        if found:
            wrong[f"{page.relative_to(site)} {way}"] = found
    assert wrong == {}


@pytest.mark.parametrize("opened", ["served", "as files"])
def test_search_finds_a_flag_without_a_network(site: Path, url: str, browser: Browser, opened: str) -> None:
    begin = f"{url}/start/install.html" if opened == "served" else (site / "start/install.html").as_uri()
    with visit(browser, begin) as seen:
        seen.page.get_by_role("button", name="Search").first.click()
        seen.page.get_by_role("combobox").fill("max_staleness")
        seen.page.get_by_role("option").first.wait_for()
        links = [option.get_attribute("href") for option in seen.page.get_by_role("option").all()]
        assert any("flags.html" in link for link in links)
        assert (seen.errors, seen.foreign_requests) == ([], [])


def test_llms_txt_names_every_page_with_what_it_is_about(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S", (site / "llms.txt").read_text(), re.M)
    assert {site / path for path in listed} == set(site.rglob("*.md"))
    assert {page.stem for page in (ROOT / "docs").rglob("*.md")} <= {Path(path).stem for path in listed}
    assert all((site / path).read_text() in (site / "llms-full.txt").read_text() for path in listed)


def test_the_reference_has_every_command_error_and_message() -> None:
    text = pages()
    assert [name for name in _COMMANDS if f"## headrace {name}\n" not in text["reference/cli.md"]] == []
    told = [cls for cls in error_classes() if cls not in (HeadraceError, RetryableError)]
    assert [cls for cls in told if f"| `{cls.__name__}` |" not in text["reference/errors.md"]] == []
    for name, module in PROTOS.items():
        page = text[f"reference/protos/{name}.md"]
        missing = [each for each in module.DESCRIPTOR.message_types_by_name.values() if not _is_told(each, page)]
        missing += [each for each in module.DESCRIPTOR.enum_types_by_name if f"## {each}\n" not in page]
        missing += [each for each in module.DESCRIPTOR.services_by_name if f"## {each}\n" not in page]
        assert missing == []


def _is_told(message: Descriptor, page: str) -> bool:
    told = page.partition(f"## {message.name}\n")[2].partition("\n## ")[0]
    return bool(told) and all(re.search(rf"^\| `{name}` \| .+ \| \S", told, re.M) for name in message.fields_by_name)


def test_a_pattern_of_the_nav_stands_for_the_pages_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Second: more\n")
    (tmp_path / "a.md").write_text("# First\n")
    nav = [{"Some": ["*.md", "gone.md", {"Own title": "a.md"}]}, {"None": ["x/*.md"]}]
    assert [*entries_of(expanded(nav, tmp_path))] == [
        Entry("Some", "First", "a.md"),
        Entry("Some", "Second", "b.md"),
        Entry("Some", "gone", "gone.md"),
        Entry("Some", "Own title", "a.md"),
    ]


def test_a_page_outside_of_the_nav_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# There\n")
    (tmp_path / "forgotten.md").write_text("# Forgotten\n")
    entries = [Entry("Start", "There", "there.md"), Entry("Start", "Gone", "gone.md"), Entry("How-to", "", "there.md")]
    wrong = outside_of_the_nav(entries, tmp_path)
    assert [next(name for name in ("gone", "there", "forgotten") if f"{name}.md" in each) for each in wrong] == [
        "gone",
        "there",
        "forgotten",
    ]


def test_a_dead_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"><a href="b.html#part">b</a><a href="#top">a</a><img src="no.png">')
    (tmp_path / "b.html").write_text('<h2 id="part"></h2><a href="a.html#gone">a</a><a href="https://x.example">x</a>')
    assert [each.partition(" leads")[0] for each in sorted(dead_links(tmp_path))] == [
        "a.html: no.png",
        "b.html: a.html#gone",
    ]


def test_what_a_page_is_about_is_its_first_sentence() -> None:
    page = "# Title\n\n```bash\nmake it. now\n```\n\n| a | b |\n|---|---|\n\nIt **reads** [a file](x.md). Then more.\n"
    assert about(page) == "It reads a file."
