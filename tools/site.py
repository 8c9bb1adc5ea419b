"""The site: docs/ with the pages that the code itself makes, built by zensical, and llms.txt.

    python -m tools.site ZENSICAL    builds site/, and refuses pages outside of the nav and links that lead nowhere

A page keeps its path below docs/; a file that it links to outside of docs/, as examples/NAME/job.toml, comes with it.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tomli_w

from tools.reference import pages

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "site"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINK = re.compile(r"(\]\(|(?:href|src)=\")([^)\s\"#]+)")
_FENCE = re.compile(r"(^```.*?^```[^\n]*\n)", re.S | re.M)


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the nav: its section, title and path in the site."""

    section: str
    title: str
    path: str


def build(zensical: Path, site: Path) -> list[str]:
    """Builds the site into the folder `site`; returns what is wrong."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="headrace-site-") as name:
        work = Path(name)
        sources = work / "docs"
        wrong = collect(sources)
        config["project"]["nav"] = expanded(config["project"]["nav"], sources)
        entries = [*entries_of(config["project"]["nav"])]
        wrong += outside_of_the_nav(entries, sources)
        (work / "zensical.toml").write_text(tomli_w.dumps(config))
        done = subprocess.run([zensical, "build", "--strict"], cwd=work, capture_output=True, text=True, check=False)
        if wrong or done.returncode:
            said = _COLOUR.sub("", done.stdout + done.stderr).partition("Traceback (most recent call last)")[0]
            return [*wrong, *([said] if done.returncode else [])]
        for entry in entries:
            shutil.copyfile(sources / entry.path, work / "site" / entry.path)
        for file, text in llms(entries, sources, config["project"]).items():
            (work / "site" / file).write_text(text)
        for page in (work / "site").rglob("*.html"):
            page.write_text(page.read_text().replace("<th></th>", "<td></td>"))  # a cell that heads nothing
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(work / "site", site)
    return dead_links(site)


def collect(sources: Path) -> list[str]:
    """Writes every page, and the files that pages name, below `sources`; returns what they miss."""
    wrong: list[str] = []
    shutil.copytree(ROOT / "docs", sources)
    for path, text in pages().items():
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        (sources / path).write_text(text)
    waiting = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("**/README.md")]
    seen = set(waiting)
    for page in waiting:
        target = _target(page, sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text()
        target.write_text(_moved(text, page, sources))
        for link in _files_of(text, page):
            if not link.is_relative_to(ROOT) or not link.is_file():
                wrong.append(f"{page.relative_to(ROOT)} links to {link}, which is not a file here")
            elif link.suffix == ".md" and link not in seen:
                seen.add(link)
                waiting.append(link)
            elif not link.is_relative_to(ROOT / "docs") and link.suffix != ".md":
                _target(link, sources).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(link, _target(link, sources))
    return wrong


def _target(file: Path, sources: Path) -> Path:
    base = ROOT / "docs" if file.is_relative_to(ROOT / "docs") else ROOT
    return sources / file.relative_to(base)


def _files_of(text: str, page: Path) -> Iterator[Path]:
    links = (link for _, link in _LINK.findall(_FENCE.sub("", text)) if ":" not in link)
    yield from ((page.parent / link).resolve() for link in links)


def _moved(text: str, page: Path, sources: Path) -> str:
    """The text with links as they are from the page's place in the site."""

    def moved(found: re.Match[str]) -> str:
        if ":" in found[2]:
            return found[0]
        target = _target((page.parent / found[2]).resolve(), sources)
        return found[1] + os.path.relpath(target, _target(page, sources).parent)

    parts = _FENCE.split(text)
    return "".join(part if number % 2 else _LINK.sub(moved, part) for number, part in enumerate(parts))


def expanded(nav: Sequence[Any], sources: Path) -> list[dict[str, Any]]:
    """The nav with the pages that its patterns stand for. A section without a page is left out."""
    found: list[dict[str, Any]] = []
    for each in nav:
        if isinstance(each, dict):
            ((title, value),) = each.items()
            inner = expanded(value, sources) if isinstance(value, list) else value
            found += [{title: inner}] if inner else []
        else:
            named = sorted(sources.glob(each)) if "*" in each else [sources / each]
            found += [{_title(page): page.relative_to(sources).as_posix()} for page in named]
    return found


def entries_of(nav: Sequence[Mapping[str, Any]], section: str = "") -> Iterator[Entry]:
    """Every page of the nav in its order."""
    for each in nav:
        ((title, value),) = each.items()
        if isinstance(value, list):
            yield from entries_of(value, section or title)
        else:
            yield Entry(section or title, title, value)


def outside_of_the_nav(entries: Sequence[Entry], sources: Path) -> list[str]:
    """Pages that are in the nav and not there, twice, or there and not in the nav."""
    named = [entry.path for entry in entries]
    there = {page.relative_to(sources).as_posix() for page in sources.rglob("*.md")}
    return [
        *(f"zensical.toml has {path}, which is not there" for path in named if path not in there),
        *(f"zensical.toml has {path} twice" for path in {path for path in named if named.count(path) > 1}),
        *(f"{path} is in no section of zensical.toml's nav" for path in sorted(there - set(named))),
    ]


def llms(entries: Sequence[Entry], sources: Path, project: Mapping[str, Any]) -> Mapping[str, str]:
    """llms.txt (llmstxt.org): the pages with what each is about; llms-full.txt: all their texts."""
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    for section in dict.fromkeys(entry.section for entry in entries):
        lines += ["", f"## {section}", ""]
        for entry in (each for each in entries if each.section == section):
            lines.append(f"- [{entry.title}]({entry.path}): {about((sources / entry.path).read_text())}")
    whole = (f"<!-- {entry.path} -->\n\n{(sources / entry.path).read_text()}" for entry in entries)
    return {"llms.txt": "\n".join(lines) + "\n", "llms-full.txt": "\n".join(whole)}


def about(text: str) -> str:
    """The first sentence of a page, without its marks."""
    paragraphs = re.split(r"\n\s*\n", _FENCE.sub("", text))
    prose = next((each for each in paragraphs if re.match(r"[A-Za-z`*\[]", each)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("**", "")
    return re.split(r"(?<=[.])\s", plain, maxsplit=1)[0]


def _title(page: Path) -> str:
    """The first heading, up to a colon."""
    found = re.search(r"^# ([^:\n]+)", page.read_text(), re.M) if page.is_file() else None
    return found[1].strip() if found else page.stem


def dead_links(site: Path) -> list[str]:
    """Links, pictures and anchors in the pages that lead nowhere. zensical looks at links between pages alone."""
    texts = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    wrong = []
    for page, text in texts.items():
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]+)"', text))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = html.unescape(link).partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            if target.is_dir() or not target.exists():
                wrong.append(f"{page.relative_to(site)}: {link} leads to no file")
            elif anchor and target in anchors and unquote(anchor) not in anchors[target]:
                wrong.append(f"{page.relative_to(site)}: {link} leads to no heading")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    wrong = build(Path(arguments[0]).absolute(), SITE)
    print("\n".join(wrong) if wrong else f"{SITE.relative_to(ROOT)}/index.html: {len([*SITE.rglob('*.html')])} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
