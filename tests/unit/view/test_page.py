"""The page of `headrace view` in a real browser, opened as a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import Browser, Page, expect

from headrace.view.data import RunData
from headrace.view.server import write_page
from tests.support.browser import Visit, chromium, visit
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.view_folder import HOSTILE, LANES, LONG, TURNS, Sizes, write_view_folder
from tests.support.viewed_run import viewed_run

SIZES = Sizes(steps=18, groups=6, samples=8)
SAMPLE = "train%2F9-0%2F1%2F1"
VIEWS = {
    "run": "#/run",
    "step": "#/step/9",
    "group": "#/step/9/group/1",
    "turns": "#/step/9/group/2",
    "sample": f"#/step/9/sample/{SAMPLE}",
    "evaluation": "#/evaluation/10",
    "untrained": "#/untrained",
    "untrained group": "#/untrained/group/train%2F3-3",
    "ledger": "#/ledger",
    "prompts": "#/prompts",
    "prompt": "#/prompt/2",
    "search": "#/search?q=what",
    "steps": "#/steps",
}
_WIDER_THAN_ITS_PANE = "document.getElementById('content').scrollWidth - document.getElementById('content').clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_view_folder(tmp_path_factory.mktemp("view"), SIZES)


@contextmanager
def opened(
    browser: Browser, index: Path, route: str = "#/run", *, width: int = 1280, dark: bool = False
) -> Iterator[Visit]:
    """Opens the page at a link, and sees at the end that nothing failed and nothing but files was asked for."""
    with visit(browser, index.as_uri() + route, width=width, dark=dark) as seen:
        expect(seen.page.locator("#top nav [aria-current]")).to_be_visible()
        yield seen
        assert seen.errors == []
        assert [url for url in seen.requests if not url.startswith("file:")] == []


def test_the_page_of_a_recorded_run_shows_its_samples_and_tokens(browser: Browser, tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_page(RunData(viewed_run(tmp_path, tmp_path / "model")), None, tmp_path / "page")
    with opened(browser, tmp_path / "page" / "index.html", "#/step/1/sample/1-0%2F1") as seen:
        tokens = seen.page.locator(".tokens span")
        expect(tokens).to_have_count(5)
        seen.page.keyboard.press("1")
        expect(seen.page.locator("input[value=mask]")).to_be_checked()
        colours = tokens.evaluate_all("all => all.map(each => each.style.backgroundColor)")
        assert colours[3] != "transparent"
        assert colours[4] == "transparent"  # its mask is 0
        tokens.nth(3).hover()
        expect(seen.page.locator(".token-detail")).to_contain_text("gap 0.25")
        for route, title in {
            "evaluation/2": "Evaluation after step 2",
            "prompt/0": "Prompt 0",
            "ledger": "Ledger",
        }.items():
            go(seen.page, f"#/{route}")
            expect(seen.page.locator("h1")).to_have_text(title)
        go(seen.page, "#/untrained")
        expect(seen.page.locator(".rows.groups .row")).to_have_count(2)


def rows(page: Page) -> list[str]:
    return page.locator(".rows.groups .row .prompt").all_inner_texts()


def go(page: Page, route: str) -> None:
    page.evaluate("hash => { location.hash = hash }", route)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_any_view(browser: Browser, index: Path, dark: bool) -> None:
    with visit(browser, index.as_uri(), dark=dark) as seen:
        found = []
        for name, route in VIEWS.items():
            go(seen.page, route)
            expect(seen.page.locator("#content h1")).to_be_attached()
            found += [f"{name}: {each}" for each in seen.axe()]
    assert found == []


def test_no_view_is_wider_than_a_phone(browser: Browser, index: Path) -> None:
    with opened(browser, index, width=360) as seen:
        wide = {}
        for name, route in VIEWS.items():
            go(seen.page, route)
            expect(seen.page.locator("#content h1")).to_be_attached()
            wide[name] = max(seen.overflow(), seen.page.evaluate(_WIDER_THAN_ITS_PANE))
    assert wide == dict.fromkeys(VIEWS, 0)


def test_the_run_has_curves_with_evaluations_marks_and_a_timeline(browser: Browser, index: Path) -> None:
    with opened(browser, index) as seen:
        reward = seen.page.get_by_role("figure").filter(has_text="reward/mean")
        expect(reward).to_contain_text("eval/a")
        expect(reward.locator("text.mark")).to_have_text(["1", "2"])
        expect(seen.page.locator(".marks li")).to_have_count(2)
        expect(seen.page.get_by_label("Timeline", exact=True)).to_contain_text("publish")
        seen.page.get_by_label("Add a curve").select_option("lr")
        expect(seen.page.get_by_role("figure").filter(has_text="lr").first).to_be_visible()
        assert "lr" in seen.page.url


def test_the_crosshair_shows_every_value_of_a_step_and_opens_it(browser: Browser, index: Path) -> None:
    with opened(browser, index) as seen:
        drawing = seen.page.locator(".curve svg").first
        drawing.focus()
        for _ in range(4):
            seen.page.keyboard.press("ArrowRight")
        expect(seen.page.locator(".curve .at").first).to_have_text("step 4")
        expect(seen.page.locator(".curve .at").last).to_have_text("step 4")
        seen.page.keyboard.press("Enter")
        expect(seen.page.locator("h1")).to_have_text("Step 4")


def test_a_step_lists_its_groups_by_their_rewards(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9") as seen:
        expect(seen.page.locator(".rows.groups .row")).to_have_count(SIZES.groups)
        seen.page.get_by_label("lowest", exact=True).check()
        expect(seen.page.locator("input[value=low]")).to_be_checked()
        means = [float(text) for text in seen.page.locator(".rows.groups .row .mean").all_inner_texts()]
        assert means == sorted(means)
        expect(seen.page.get_by_text("1 failed")).to_be_visible()


def test_a_group_shows_its_samples_side_by_side_and_what_differs(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9/group/0") as seen:
        cards = seen.page.locator(".card")
        expect(cards).to_have_count(SIZES.samples)
        tops = cards.evaluate_all("all => all.map(each => each.getBoundingClientRect().top)")
        assert len(set(tops)) == 1
        expect(seen.page.locator(".card ins").first).to_be_visible()
        seen.page.get_by_label("Mark what differs from").select_option("none")
        expect(seen.page.locator(".card ins")).to_have_count(0)


def test_of_many_turns_the_last_is_open_and_tool_results_are_folded(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9/group/2") as seen:
        turns = seen.page.locator(".card").first.locator(".turn")
        expect(turns).to_have_count(TURNS)
        expect(seen.page.locator(".card").first.locator(".turn[open]")).to_have_count(1)
        turns.nth(1).locator("summary").click()
        expect(turns.nth(1).locator(".text")).to_contain_text("stdout")


def test_an_untrained_group_says_what_was_filtered_and_why(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/untrained") as seen:
        assert len(rows(seen.page)) == 4
        seen.page.get_by_label("Reason").select_option("all_right")
        expect(seen.page.locator(".rows.groups .row")).to_have_count(3)
        seen.page.locator(".rows.groups .row").first.click()
        expect(seen.page.locator(".verdict")).to_contain_text("all_right")


def test_tokens_are_coloured_by_what_one_chooses(browser: Browser, index: Path) -> None:
    with opened(browser, index, f"#/step/9/sample/{SAMPLE}") as seen:
        tokens = seen.page.locator(".tokens span")
        expect(tokens).to_have_count(24 + 48)
        colours = {}
        for number, name in enumerate(["mask", "version", "engine", "advantage", "gap"], start=1):
            seen.page.keyboard.press(str(number))
            expect(seen.page.locator(f"input[value={name}]")).to_be_checked()
            colours[name] = tuple(tokens.evaluate_all("all => all.map(each => each.style.backgroundColor)"))
        assert len(set(colours.values())) == 5
        assert all(not any(each[:24]) for each in colours.values())  # the prompt's
        assert len(set(colours["version"][24:])) == 2
        tokens.nth(40).hover()
        expect(seen.page.locator(".token-detail")).to_contain_text("16 of the response")
        seen.page.locator(".tokens").focus()
        seen.page.keyboard.press("ArrowRight")
        expect(seen.page.locator(".token-detail")).to_contain_text("17 of the response")


def test_the_trace_of_a_sample_has_its_lanes_its_lost_lease_and_the_same_as_a_table(
    browser: Browser, index: Path
) -> None:
    with opened(browser, index, VIEWS["sample"]) as seen:
        trace = seen.page.locator("section[aria-label=Trace]")
        bars = trace.locator(".bar")
        expect(bars).to_have_count(13)
        lanes = trace.locator("svg > text:not(.mark)").all_text_contents()
        assert [name for name in lanes if name in LANES] == LANES
        expect(trace.locator(".bar.failed")).to_have_count(2)
        bars.nth(1).hover()
        expect(trace.locator(".trace-detail")).to_contain_text(f"LEASE_EXPIRED: {HOSTILE[:10]}")
        expect(trace.locator(".break")).to_have_count(3)
        trace.locator("summary").click()
        expect(trace.locator("tbody tr")).to_have_count(13)
    with opened(browser, index, VIEWS["sample"].replace("%2F1%2F1", "%2F1%2F2")) as seen:
        expect(seen.page.locator("section[aria-label=Trace]")).to_contain_text("--trace-sample-ratio")


def test_a_sample_without_tokens_says_why_and_where_there_are_some(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/10") as seen:
        without = seen.page.evaluate(
            """async () => { for (const group of document.querySelectorAll('.rows.groups .row')) {
            location.hash = group.getAttribute('href'); await new Promise(done => setTimeout(done, 50));
            const card = [...document.querySelectorAll('.card')].find(each => each.innerText.includes('open ›'));
            if (card) return card.querySelector('a').getAttribute('href'); } }"""
        )
        go(seen.page, without)
        expect(seen.page.locator("h1")).to_contain_text("Sample")
        expect(seen.page.get_by_label("Tokens").get_by_role("link", name="step 9")).to_be_visible()


def test_texts_of_a_model_stay_text(browser: Browser, index: Path) -> None:
    with opened(browser, index) as seen:
        seen.page.on("dialog", lambda _: pytest.fail("a script of a text ran"))
        for route in VIEWS.values():
            go(seen.page, route)
            expect(seen.page.locator("#content h1")).to_be_attached()
            assert seen.page.locator("#content img, #content script").count() == 0
        go(seen.page, "#/step/9/group/1")
        response = seen.page.locator(".card").first.locator(".text")
        expect(response).to_have_text(HOSTILE, use_inner_text=False)


def test_a_long_response_is_shown_in_parts(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9/group/1") as seen:
        text = seen.page.locator(".card").nth(1).locator(".text")
        assert len(text.text_content() or "") < LONG / 2
        text.get_by_role("button").click()
        assert len(text.text_content() or "") >= LONG - 2


def test_the_ledger_shows_states_reasons_and_staleness(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/ledger") as seen:
        expect(seen.page.locator(".state").filter(has_text="committed")).to_contain_text("96")
        expect(seen.page.get_by_label("Staleness")).to_contain_text("62 %")
        seen.page.get_by_role("link", name="all_right").click()
        expect(seen.page.locator(".rows.groups .row")).to_have_count(3)


def test_a_prompt_is_followed_over_the_steps(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9/group/4") as seen:
        seen.page.get_by_role("link", name="This prompt over all steps").click()
        expect(seen.page.locator("h1")).to_contain_text("Prompt")
        expect(seen.page.get_by_role("link", name="Step 9")).to_be_visible()
        assert len(seen.page.locator(".visits section").all()) >= 2


def test_search_finds_prompts_at_once_and_texts_in_all_steps(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/search") as seen:
        field = seen.page.get_by_label("Search", exact=True)
        field.fill("what is 7 +")
        expect(seen.page.locator(".rows.hits .row").first).to_contain_text("prompt")
        field.fill("train/17-2/1/3")
        expect(seen.page.locator(".rows.hits .row")).to_have_count(0)
        seen.page.get_by_role("button", name="Search all steps").click()
        expect(seen.page.locator(".rows.hits .row")).to_have_count(1)
        seen.page.locator(".rows.hits .row").click()
        expect(seen.page.locator("h1")).to_have_text("Sample #3")


def test_keys_lead_through_steps_groups_and_samples(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/9") as seen:
        title = seen.page.locator("h1")
        seen.page.keyboard.press("j")
        expect(title).to_have_text("Step 10")
        seen.page.keyboard.press("k")
        expect(title).to_have_text("Step 9")
        seen.page.locator(".rows.groups .row").first.focus()
        seen.page.keyboard.press("ArrowDown")
        seen.page.keyboard.press("Enter")
        expect(title).to_have_text("Group 1")
        seen.page.keyboard.press("Escape")
        expect(title).to_have_text("Step 9")
        seen.page.keyboard.press("?")
        expect(seen.page.get_by_role("dialog")).to_be_visible()
        seen.page.keyboard.press("Escape")
        seen.page.keyboard.press("/")
        expect(seen.page.get_by_label("Search", exact=True)).to_be_focused()


def test_the_theme_is_the_system_s_until_one_is_chosen(browser: Browser, index: Path) -> None:
    with opened(browser, index, dark=True) as seen:
        back = "getComputedStyle(document.body).backgroundColor"
        dark = seen.page.evaluate(back)
        seen.page.keyboard.press("t")
        assert seen.page.evaluate(back) != dark


def test_a_link_to_nothing_says_what_there_is(browser: Browser, index: Path) -> None:
    with opened(browser, index, "#/step/99") as seen:
        expect(seen.page.locator(".verdict")).to_contain_text("1 to 18")


def test_a_live_page_shows_new_steps_and_keeps_its_place(browser: Browser, tmp_path: Path) -> None:
    few, more = (
        write_view_folder(tmp_path / str(steps), Sizes(steps=steps, groups=40, samples=2), live=True).parent
        for steps in (2, 3)
    )
    with served(few) as url, visit(browser, f"{url}/index.html#/step/2") as seen:
        expect(seen.page.locator(".rows.steps .row")).to_have_count(2)
        seen.page.locator("#content").evaluate("pane => { pane.scrollTop = 300 }")
        shutil.copytree(more, few, dirs_exist_ok=True)
        seen.page.evaluate(
            "document.dispatchEvent(new Event('visibilitychange'))"
        )  # what a tab does that is shown again
        expect(seen.page.locator(".rows.steps .row")).to_have_count(3)
        expect(seen.page.locator("h1")).to_have_text("Step 2")
        assert seen.page.locator("#content").evaluate("pane => pane.scrollTop") == 300
        seen.page.keyboard.press("j")
        expect(seen.page.locator("h1")).to_have_text("Step 3")
        assert (seen.errors, seen.foreign_requests) == ([], [])


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


def test_a_missing_file_is_named(browser: Browser, tmp_path: Path) -> None:
    page = write_view_folder(tmp_path / "view", Sizes(steps=2, groups=2, samples=2))
    (page.parent / "data" / "step-0000002.js").unlink()
    with visit(browser, page.as_uri() + "#/step/2") as seen:
        expect(seen.page.locator(".verdict")).to_contain_text("data/step-0000002.js")
