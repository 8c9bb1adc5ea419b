"""The page of `headrace view` in a real browser, opened as a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, expect

from headrace.run_folder import RunFolder
from headrace.sample_log import Answer, SampleLog, TokenColumns
from headrace.view.data import RunData
from headrace.view.folder import write_page
from tests.support.browser import Visit, chromium, visit
from tests.support.ledgers.answers import answered
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.viewed_run import HOSTILE, MEGABYTE, viewed_run

SAMPLE = "1-0%2F1"
"""1-0/1, the one with tokens"""
VIEWS = {
    "run": ("#/", "one"),
    "step": ("#/step/1", "Step 1"),
    "group": ("#/step/1/group/0", "Step 1 · group 0"),
    "sample": (f"#/step/1/sample/{SAMPLE}", "Step 1 · group 0 · sample 0"),
    "turns": ("#/step/3/sample/turns", "Step 3 · group 0 · sample 0"),
    "evaluation": ("#/evaluation/2", "Evaluation after step 2"),
    "untrained": ("#/untrained", "Not trained"),
    "ledger": ("#/ledger", "Ledger"),
    "prompts": ("#/prompts", "Prompts"),
    "prompt": ("#/prompt/0", "Prompts · trained 2×"),
    "search": ("#/search/prompt", "Search: prompt"),
    "no such view": ("#/step/99", "This cannot be shown"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a small run's page: hostile texts, tokens, turns with a tool."""
    folder = tmp_path_factory.mktemp("viewed")
    make_tiny_tokenizer().save_pretrained(folder / "model")
    run = viewed_run(folder, folder / "model")
    turns = [("user", "2 + 2?"), ("assistant", '{"add": [2, 2]}'), ("tool", HOSTILE), ("assistant", "4")]
    spoken = Answer.of(answered("turns", group_id="3-0"), 3)
    _write_turns(run, spoken, turns)
    write_page(RunData(run), None, folder / "page")
    return (folder / "page" / "index.html").as_uri()


def _write_turns(run: RunFolder, answer: Answer, turns: list[tuple[str, str]]) -> None:
    log = SampleLog(run.samples)
    spoken = replace(answer, turns=[{"role": role, "content": content} for role, content in turns])
    log.write_step(3, 0, [spoken], MEGABYTE)
    columns = TokenColumns("turns", [72, 105, 10, 11, 12], [1, 0], [-0.5, -1.0], [-0.25, -3.0], [1.0, 1.0])
    log.write_tokens(3, 0, [columns], MEGABYTE)


def headed(found: Visit, title: str) -> None:
    expect(found.page.locator("main h1").first).to_have_text(title)


@pytest.mark.parametrize("name", VIEWS)
def test_each_view_is_for_everybody_in_both_themes_and_on_a_phone(browser: Browser, page: str, name: str) -> None:
    route, title = VIEWS[name]
    for width, dark in ((1280, False), (360, True)):
        with visit(browser, page + route, width=width, dark=dark) as found:
            headed(found, title)
            assert found.axe() == []
            assert found.overflow() == 0
            assert name == "no such view" or found.errors == []
            assert all(url.startswith("file:") for url in found.requests)


def test_a_models_text_stays_text(browser: Browser, page: str) -> None:
    for route in ("#/step/1/group/0", "#/step/3/sample/turns"):
        with visit(browser, page + route) as found:
            found.page.on("dialog", lambda dialog: pytest.fail("a script of a model's text ran"))
            expect(found.page.get_by_text("onerror=alert(1)").first).to_be_attached()
            assert found.page.locator("main img").count() == 0


def test_a_group_has_its_samples_side_by_side(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/step/1/group/0") as found:
        samples = found.page.locator(".sample")
        expect(samples).to_have_count(2)
        tops = [box["y"] for box in (sample.bounding_box() for sample in samples.all()) if box]
        assert tops[0] == tops[1]
        found.page.get_by_label("Order").select_option("best")
        expect(samples.first.locator("strong")).to_have_text("1")


def test_tokens_are_coloured_by_what_is_chosen_and_tell_their_values(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/step/1/sample/{SAMPLE}") as found:
        tokens = found.page.locator(".token")
        expect(tokens).to_have_count(5)
        found.page.keyboard.press("1")
        expect(found.page.locator('.modes button[aria-pressed="true"]')).to_have_text("trained")
        assert tokens.nth(3).evaluate("it => it.style.background") != "transparent"
        assert tokens.nth(4).evaluate("it => it.style.background") == "transparent"  # its mask is 0
        tokens.nth(3).hover()
        expect(found.page.locator(".detail")).to_contain_text("engine -0.5")
        expect(found.page.locator(".detail")).to_contain_text("gap 0.25")
        found.page.locator(".tokens").focus()
        found.page.keyboard.press("ArrowLeft")
        expect(found.page.locator(".detail")).to_contain_text("part prompt")


def test_a_sample_without_tokens_says_why(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/step/2/sample/2-0%2F0") as found:
        expect(found.page.get_by_text("were not recorded")).to_be_visible()


def test_what_was_filtered_or_failed_says_why(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/untrained") as found:
        expect(found.page.locator(".group-row")).to_have_count(2)
        found.page.locator(".badge", has_text="filtered").click()
        expect(found.page.locator("main .why")).to_contain_text("all rewards are 1")


def test_search_finds_prompts_at_once_and_responses_when_asked(browser: Browser, page: str) -> None:
    with visit(browser, page) as found:
        found.page.keyboard.press("/")
        found.page.keyboard.type("onerror")
        found.page.keyboard.press("Enter")
        headed(found, "Search: onerror")
        expect(found.page.locator(".hit")).to_have_count(0)
        found.page.get_by_role("button", name="search the responses").click()
        expect(found.page.locator(".hit")).to_have_count(9)
        found.page.locator(".hit").last.click()
        expect(found.page.locator("main h1")).to_contain_text("sample")


def test_keys_move_through_groups_and_steps(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/step/1/group/0") as found:
        headed(found, "Step 1 · group 0")
        for key, title in (("j", "Step 1 · group 1"), ("k", "Step 1 · group 0"), ("Escape", "Step 1"), ("]", "Step 2")):
            found.page.keyboard.press(key)
            headed(found, title)
        found.page.keyboard.press("?")
        expect(found.page.locator("dialog#help")).to_be_visible()
        found.page.keyboard.press("Escape")
        expect(found.page.locator("dialog#help")).to_have_count(0)
        found.page.keyboard.press("t")
        assert found.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_prompt_has_its_rewards_over_the_steps(browser: Browser, page: str) -> None:
    with visit(browser, f"{page}#/prompt/1") as found:
        expect(found.page.locator(".over-steps .sample")).to_have_count(2)
