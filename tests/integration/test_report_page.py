"""The report in a browser: its content, its tooltips, and no errors."""

import pytest

from megatron_rft.report import page
from megatron_rft.tracking.metrics import Sample, StepFile, shortened
from tests.integration.browser import Browser, install
from tests.integration.tiny import wait_until
from tests.unit.report.made import EVIL, write_run

CHARTS = [
    "Reward",
    "Held-out accuracy",
    "PIPO's improvement",
    "KL to the reference",
    "Entropy",
    "Response length",
    "Gradient norm",
    "Engine against trainer",
    "Tokens per second",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of two seeds with PIPO and two without."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        write_run(folder / f"{kind}-seed{seed}", seed, kind == "pipo") for kind in ("pipo", "grpo") for seed in (0, 1)
    ]
    return page.write(runs, folder)


@pytest.fixture(scope="module")
def opened(report):
    install()
    with Browser() as browser:
        browser.open(report)
        yield browser


@pytest.fixture
def browser(opened):
    """A browser with an empty console before and after the test."""
    assert opened.console() == []
    yield opened
    assert opened.console() == []


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.ask("[...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)


def test_the_top(browser):
    assert browser.ask("document.title") == "GRPO + PIPO / GRPO"
    assert texts(browser, ".card h2") == ["GRPO + PIPO", "GRPO"]
    assert "pipo.window" in texts(browser, ".differing th")


def test_charts_are_drawn(browser):
    assert texts(browser, "#charts figure h3") == CHARTS
    assert texts(browser, "#times figure h3") == ["GRPO + PIPO", "GRPO"]
    paths = browser.ask("[...document.querySelectorAll('#charts svg path')].map((p) => p.getAttribute('d'))")
    assert len(paths) > 2 * len(CHARTS) and not any("NaN" in d or "Infinity" in d for d in paths)
    assert browser.ask("document.querySelectorAll('#chart_reward .band').length") == 2
    assert browser.ask("document.querySelectorAll('#stack_0 .bar').length") == 2 * 30


def test_a_hover_says_the_values_and_shows_in_all_charts(browser):
    browser.hover("#chart_reward .plot svg")
    assert browser.ask("document.getElementById('tip').hidden") is False
    head, *rows = texts(browser, "#tip > div")
    step = int(head.removeprefix("step "))
    assert 10 <= step <= 20
    value = f"{0.41 + 0.01 * step:.3f} ± 0.0100"
    assert rows == [f"GRPO + PIPO{value}", f"GRPO{value}"]
    assert browser.ask("document.querySelectorAll('#charts .cursor').length") == len(CHARTS)
    browser.hover("#stack_0 .plot svg g:nth-of-type(3)")
    assert texts(browser, "#tip > div") == ["step 3: 2 s", "training0.500 s", "generation1.50 s"]


def test_axis_smoothing_and_a_hidden_group(browser):
    path = "document.querySelector('#chart_pipo_s_improvement .mean').getAttribute('d')"
    before = browser.ask(path)
    browser.click("#smooth")
    assert browser.ask(path) != before
    browser.click("#smooth")
    assert browser.ask(path) == before
    browser.click("#axis button:nth-child(2)")
    assert browser.ask("document.querySelector('#axis [aria-pressed=true]').textContent") == "hours"
    browser.hover("#chart_entropy .plot svg")
    assert "hours" in texts(browser, "#tip .head")[0]
    browser.click("#legend button:nth-child(2)")
    assert browser.ask("document.querySelectorAll('#chart_reward .mean').length") == 1
    browser.click("#legend button:nth-child(2)")
    browser.click("#axis button:nth-child(1)")


def test_samples_token_by_token(browser):
    assert texts(browser, "#samples output") == ["30"]
    assert texts(browser, ".sample .badge") == ["reward 1"]
    assert texts(browser, ".sample .response span") == ["4", EVIL]  # text, not a page within the page
    colours = browser.ask("[...document.querySelectorAll('.response span')].map((s) => s.style.background)")
    assert colours == ["rgba(var(--hot), 0.019)", "rgba(var(--hot), 0.563)"]
    browser.hover(".sample .response span")
    rows = texts(browser, "#tip > div")
    assert rows[0] == '"4"' and "log-prob, engine-0.100 (p = 0.90)" in rows and "policy against reference0.100" in rows
    browser.ask("(() => { const s = document.getElementById('sample_step'); s.value = 0; "
                "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert texts(browser, "#samples output") == ["10"]


def test_light_and_dark(browser):
    colour = "getComputedStyle(document.body).backgroundColor"
    first = browser.ask(colour)
    browser.click("#theme")
    assert browser.ask(colour) != first
    browser.click("#theme")
    assert browser.ask(colour) == first


@pytest.mark.parametrize("width", [500, 800, 1600])
def test_it_fits_a_phone_and_a_desk(browser, width):
    browser.size(width, 900)
    chart = "document.querySelector('#chart_reward svg').getBoundingClientRect().width"
    # The browser reports the new size to the page asynchronously.
    assert wait_until(lambda: browser.ask(f"innerWidth == {width} && 250 < {chart} && {chart} < {width}"))
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")


def test_it_loads_nothing(browser, report):
    assert browser.ask("performance.getEntriesByType('resource').length") == 0


def open_sample(browser, folder, sample: Sample) -> None:
    """Open another page."""
    run = write_run(folder / "run", steps=9)
    StepFile(run / "samples.jsonl").write(9, {"samples": [shortened(sample)]})
    browser.open(page.write([run], folder))


def test_an_episode_is_a_tree_of_its_segments(browser, tmp_path):
    """A sub-agent is asked within segment 1, which goes on; segment 3 follows."""
    turns, segments = [(0, 1, 0.0), (2, 3, 0.0), (4, 5, 0.0), (6, 7, 1.0)], [0, -1, 1, 0, 0, -2, 2]
    pieces = [(i, i + 1, number) for i, number in enumerate(segments)]
    values = {"rollout_logprobs": [-3.0] * 7}
    open_sample(browser, tmp_path, Sample("Plan.", list("apbecqd"), 1.0, values, turns=turns, segments=pieces))
    names = ["turn 1", "segment 2", "prompt", "turn 2", "environment", "turn 3", "segment 3", "prompt"]
    assert texts(browser, ".sample summary") == [*names, "turn 4, reward 1"]
    inside = "[...document.querySelectorAll('.sample .segment')].map((s) => [...s.querySelectorAll('span')]"
    assert browser.ask(f"{inside}.map((t) => t.textContent).join(''))") == ["pb", "qd"]


def test_a_conversation_can_be_folded(browser, tmp_path):
    """Last, because it opens another page."""
    values, turns = {"rollout_logprobs": [-3.0] * 4}, [(0, 1, 0.0), (2, 4, 0.5)]
    open_sample(browser, tmp_path, Sample("Guess.", ["3", "<", "1", "!"], 1.5, values, turns=turns))
    assert texts(browser, ".sample summary") == ["turn 1", "environment", "turn 2, reward 0.500"]
    assert texts(browser, ".sample .turn span") == ["3", "1", "!"] and texts(browser, ".sample .said span") == ["<"]
    colours = browser.ask("[...document.querySelectorAll('.response span')].map((s) => s.style.background)")
    assert colours[0] == colours[2] and colours[1] != colours[0], "the environment's tokens have no log-prob"
    browser.click(".sample .turn summary")
    assert browser.ask("[...document.querySelectorAll('.sample details')].map((d) => d.open)") == [False, True, True]
