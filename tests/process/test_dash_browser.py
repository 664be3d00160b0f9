"""The page in a real browser, while a run grows, loses a worker, ends, or disappears."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from tests.browser import browser, console_errors, needs_browser
from tests.dash_server import DashServer, dash
from tests.growing_run import GrowingRun
from tests.recordings import make_run
from tests.waiting import wait_until

for needed in ("starlette", "uvicorn", "plotly", "selenium"):
    pytest.importorskip(needed)
pytestmark = [needs_browser, pytest.mark.exclusive]

POLL_S = 0.05
CHARTS = ("#metric-0", "#throughput", "#breakdown", "#heat", "#timeline")


class Page:
    """A page that is open, and what can be read of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The visible text of the first element; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def fact(self, name: str) -> str:
        script = "return [...document.querySelectorAll('.facts div')].find(e => e.children[0].textContent === arguments[0])"
        return str(self.run(f"{script}?.children[1].textContent ?? ''", name))

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = 15.0) -> None:
        wait_until(condition, what, deadline_s, POLL_S)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: int(self.fact("Step") or -1) >= step, f"step {step} is shown")

    def wait_for_chart(self, selector: str) -> None:
        self.wait(lambda: self.run("return document.querySelector(arguments[0]) !== null", selector), f"there is {selector}")
        self.run("document.querySelector(arguments[0]).scrollIntoView()", selector)
        self.wait(
            lambda: self.run("return document.querySelector(arguments[0] + ' .main-svg') !== null", selector),
            f"{selector} is drawn",
        )

    def last_x(self, selector: str) -> list[float]:
        """The last x of the first line of a chart, and the end of its axis."""
        script = "const e = document.querySelector(arguments[0] + ' .chart'); return [e.data[0].x.at(-1), e.layout.xaxis.range[1]]"
        return [float(each) for each in self.run(script, selector)]

    def press(self, keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def focused(self) -> str:
        return str(self.run("const e = document.activeElement; return e.id || e.className || e.tagName"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., DashServer]]:
    with ExitStack() as servers:
        yield lambda folder, *options: servers.enter_context(dash(folder, "--port", "0", *options, note=tmp_path / "dash.txt"))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a page. Afterwards its console must have said nothing."""
    with ExitStack() as browsers:
        opened: list[Any] = []

        def open_page(url: str, **settings: Any) -> Page:
            driver = browsers.enter_context(browser(tmp_path / f"profile-{len(opened)}", **settings))
            opened.append(driver)
            driver.get(url)
            return Page(driver)

        yield open_page
        said = [line for driver in opened for line in console_errors(driver)]
        assert not [line for line in said if "ERR_CONNECTION_REFUSED" not in line and "ERR_INCOMPLETE_CHUNKED" not in line], said


def growing(folder: Path, **settings: Any) -> Any:
    return closing(GrowingRun(folder, **settings))


def test_the_page_follows_a_run_and_shows_a_dead_worker_within_two_seconds(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    with growing(tmp_path / "run", slow_rank=2) as run:
        run.steps(60)
        shown = page(serve(run.folder).url)
        shown.wait_for_step(60)
        assert shown.text("h1") == "run"
        for selector in CHARTS:
            shown.wait_for_chart(selector)
        assert "1.3" in shown.text(".workers tbody tr:nth-child(3) .slow")
        shown.run("scrollTo(0, 0)")
        with run.going_on():
            shown.wait_for_step(75)
            shown.wait(lambda: min(shown.last_x("#throughput")) >= 75, "the chart has grown with the run")
            run.kill(3)
            killed_at = time.monotonic()
            shown.wait(lambda: "died: SIGKILL" in shown.text(".workers"), "the table shows the dead worker")
            shown.wait(lambda: "worker 3 (pid 4803) died: SIGKILL" in shown.text(".entries"), "the list shows the dead worker")
            assert time.monotonic() - killed_at < 2.0
            assert shown.fact("Workers") == "3"
            run.join()
            shown.wait(lambda: "worker 4 joined; 4 workers train" in shown.text(".entries"), "the replacement is shown")
            shown.wait_for_chart("#heat")
            names = "return document.querySelector('#heat .chart').layout.yaxis.categoryarray"
            shown.wait(lambda: shown.run(names) == ["0", "1", "2", "3", "4"], "the heat map has a row for each worker")
            labels = "return document.querySelector(arguments[0] + ' .chart').layout.yaxis.ticktext.at(-1)"
            shown.wait(lambda: shown.run(labels, "#heat") == "4 (rank 3)", "the heat map names the rank of the replacement")
            shown.wait_for_chart("#timeline")
            assert shown.run(labels, "#timeline") == "4 (rank 3)"
        sentence = "rank 2 is last in 94% of steps, by 30 ms: its loader; the run would be 33% faster without it"
        run.event("verdict", sentence=sentence, rank=2, worker=2, cause="loader")
        shown.wait(lambda: shown.text(".verdict").startswith("Rank 2 is last in 94% of steps"), "the verdict is shown")
        shown.wait(lambda: shown.text("tr.named th") == "2", "the table marks the worker that the verdict means")
        waits = "return [...document.querySelectorAll('.workers td[data-name=waits]')].map(e => e.textContent)"
        shown.wait(lambda: sum("most for worker 2" in each for each in shown.run(waits)) == 3, "the others wait for worker 2")
        assert "most for rank 2" in shown.text("#breakdown .caption")
        run.log(1, "a new line of worker 1\n")
        shown.run("const e = document.querySelector('#log-worker'); e.value = '1'; e.dispatchEvent(new Event('change'))")
        shown.wait(lambda: "a new line of worker 1" in shown.text(".log"), "the log of worker 1 is shown")
        run.log(1, "\r 10%\r 20%")
        shown.wait(lambda: shown.text(".log").endswith("\n 20%"), "the progress bar of worker 1 is shown")
        run.log(1, "\r 30%\x1b[K")
        shown.wait(lambda: shown.text(".log").endswith("worker 1\n 30%"), "its last state replaces the one before")
        step = run.step
        run.end()
        shown.wait(lambda: shown.text(".pill") == "finished", "the end is shown")
        assert shown.fact("Step") == str(step)
        assert "At the end: rank 2 is last" in shown.text(".verdict")


def test_a_run_that_stands_still_or_disappears_is_said(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    with growing(tmp_path / "runs" / "a") as run:
        run.steps(10)
        shown = page(serve(tmp_path / "runs").url + "&run=a")
        shown.wait(lambda: shown.text(".pill").startswith("no step for "), "the page says that there are no steps")
        assert shown.text(".pill [role=status]") == "no step"  # a screen reader says it once
        run.close()
        shown.wait(lambda: shown.text(".pill") == "lost", "the page says that the run has lost its supervisor")
        run.folder.rename(tmp_path / "elsewhere")
        shown.wait(lambda: shown.text(".pill") == "removed", "the page says that the folder is gone")
        assert shown.fact("Step") == "10"


def test_a_new_run_in_the_same_folder_replaces_the_old_one_on_an_open_page(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    with growing(tmp_path / "run", workers=5) as run:
        run.log(0, "a line of the old run\n" * 20)
        run.steps(30)
        shown = page(serve(run.folder).url)
        shown.wait_for_step(30)
        shown.wait(lambda: "a line of the old run" in shown.text(".log"), "the log is shown")
    shutil.rmtree(tmp_path / "run")
    with growing(tmp_path / "run", workers=2) as run:
        run.log(0, "a line of the new run\n" * 40)
        run.steps(5)
        shown.wait(lambda: (shown.fact("Step"), shown.fact("Workers")) == ("5", "2"), "the new run is shown")
        shown.wait(lambda: shown.text(".log").count("a line of the new run") == 40, "its log is shown from the beginning")
        assert "old run" not in shown.text(".log")
        assert shown.run("return document.querySelectorAll('.workers tbody tr').length") == 2
        assert shown.run("return document.querySelectorAll('.entries li').length") == 2


def test_the_page_connects_again_when_the_server_is_back(tmp_path: Path, page: Callable[..., Page]) -> None:
    with growing(tmp_path / "run") as run:
        run.steps(10)
        options = ("--token-file", str(tmp_path / "token"))
        with dash(run.folder, "--port", "0", *options, note=tmp_path / "first.txt") as first:
            shown = page(first.url)
            shown.wait_for_step(10)
        shown.wait(lambda: "does not answer" in shown.text("#connection"), "the page says that the server is gone")
        assert shown.fact("Step") == "10"
        run.steps(5)
        with dash(run.folder, "--port", str(first.port), *options, note=tmp_path / "second.txt"):
            shown.wait_for_step(15)
            shown.wait(lambda: shown.text("#connection") == "", "the page says nothing any more")
            assert shown.run("return document.querySelectorAll('.entries li').length") == 2


FOLLOW_CONNECTION = """
window.said = [];
window.asked = 0;
const place = document.querySelector("#connection");
new MutationObserver(() => window.said.push(place.textContent)).observe(place, { childList: true, characterData: true });
const fetch = window.fetch;
window.fetch = (...given) => { window.asked += String(given[0]).startsWith("api/stream"); return fetch(...given); };
"""


def test_a_server_that_refuses_the_page_is_said_in_one_steady_sentence(tmp_path: Path, page: Callable[..., Page]) -> None:
    make_run(tmp_path / "runs" / "a", steps=10)
    options = ("--token-file", str(tmp_path / "token"))
    with dash(tmp_path / "runs", "--port", "0", *options, note=tmp_path / "first.txt") as first:
        shown = page(first.url + "&run=a")
        shown.wait_for_step(10)
        shown.run(FOLLOW_CONNECTION)
    gone = "The server does not answer. This page connects again when it does."
    shown.wait(lambda: shown.text("#connection") == gone, "the page says that the server is gone")
    (tmp_path / "runs" / "a").rename(tmp_path / "a")
    with dash(tmp_path / "runs", "--port", str(first.port), *options, note=tmp_path / "second.txt"):
        shown.wait(lambda: shown.text("#connection").startswith("This run was removed"), "the page says that the run is removed")
        asked = shown.run("return window.asked")
        shown.wait(lambda: shown.run("return window.asked") >= asked + 2, "the page asks again")
        assert len(shown.run("return window.said")) == 2
    with dash(tmp_path / "runs", "--port", str(first.port), note=tmp_path / "third.txt"):
        shown.wait(lambda: "another token" in shown.text("#connection"), "the page says that the token is another one")
        asked = shown.run("return window.asked")
        shown.wait(lambda: shown.run("return window.asked") >= asked + 2, "the page asks again")
        assert len(shown.run("return window.said")) <= 4
        assert shown.fact("Step") == "10"
    console_errors(shown.driver)  # the browser notes what was refused


def test_the_list_follows_runs_while_a_link_has_the_focus(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    with growing(tmp_path / "runs" / "a") as run:
        run.steps(5)
        shown = page(serve(tmp_path / "runs").url)
        shown.wait(lambda: shown.text(".runs tbody a") == "a", "the run is listed")
        shown.run("document.querySelector('.runs tbody a').focus()")
        run.steps(5)
        shown.wait(lambda: shown.text("td[data-name='step']") == "10", "the new step is shown")
        make_run(tmp_path / "runs" / "b", steps=5)
        shown.wait(lambda: shown.text(".runs tbody a") == "b", "another run is listed above it")
        assert shown.run("return document.activeElement.textContent") == "a"


def test_each_logged_name_has_a_chart_and_its_own_name(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    with growing(tmp_path / "run") as run:
        run.steps(5, {f"value {number}": number for number in range(20)} | {"top1%": 1.0, "<b>%{y}": 2.0})
        shown = page(serve(run.folder).url)
        shown.wait_for_step(5)
        hovers = {}
        for index in range(22):
            shown.wait_for_chart(f"#metric-{index}")
            name = shown.text(f"#metric-{index} h2")
            hovers[name] = shown.run(f"return document.querySelector('#metric-{index} .chart').data.at(-1).hovertemplate")
        assert len(hovers) == 22
        assert hovers["top1%"] == "%{y:.5g}<extra>top1%</extra>"
        assert hovers["<b>%{y}"] == "%{y:.5g}<extra>&lt;b&gt;%\u200b{y}</extra>"


def test_workers_that_are_gone_have_no_row_in_later_steps(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    make_run(tmp_path / "run", steps=200, dies_at=60, replaced_at=80)
    shown = page(serve(tmp_path / "run").url)
    shown.wait_for_step(200)
    shown.wait_for_chart("#heat")
    names = "return document.querySelector(arguments[0] + ' .chart').layout.yaxis.categoryarray"
    assert shown.run(names, "#heat") == ["0", "1", "2", "3", "4"]
    shown.run("Plotly.relayout(document.querySelector('#heat .chart'), {'xaxis.range[0]': 120, 'xaxis.range[1]': 200})")
    shown.wait(lambda: shown.run(names, "#heat") == ["0", "1", "2", "4"], "the worker that is gone has no row")


def test_a_comparison_says_which_run_was_removed(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    names = [f"run-{number}" for number in range(9)]
    for name in names:
        make_run(tmp_path / "runs" / name, steps=20)
    url = serve(tmp_path / "runs").url
    shown = page(url + "".join(f"&run={name}" for name in [*names, "gone"]))
    shown.wait(lambda: "this run was removed" in shown.text("table.runs tbody"), "the removed run is named")
    shown.wait_for_chart("#compare-0")
    styles = "return document.querySelector('#compare-0 .chart').data.map(e => e.line.color + ' ' + e.line.dash)"
    shown.wait(lambda: len(set(shown.run(styles)[: len(names)])) == 9, "each run has a line of its own look")


def test_runs_are_listed_and_compared(tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]) -> None:
    make_run(tmp_path / "runs" / "a", steps=60)
    make_run(tmp_path / "runs" / "b<i>", steps=40, seed=1)
    with growing(tmp_path / "runs" / "c") as run:
        run.steps(20)
        shown = page(serve(tmp_path / "runs").url)
        shown.wait(lambda: shown.run("return document.querySelectorAll('.runs tbody tr').length") == 3, "the runs are listed")
        assert [shown.text(f"tr[data-run='{name}'] .pill") for name in ("a", "b<i>", "c")] == ["finished", "finished", "running"]
        for name in ("a", "b<i>", "c"):
            shown.run("document.querySelector(`tr[data-run='${arguments[0]}'] input`).click()", name)
        assert shown.text("a.button") == "Compare 3 runs"
        shown.run("document.querySelector('a.button').click()")
        shown.wait(lambda: shown.text("h1") == "3 runs", "the comparison is shown")
        shown.wait_for_chart("#compare-1")
        lines = (
            "return document.querySelector('#compare-1 .chart').data.filter(e => e.hovertemplate).map(e => [e.name, e.x.at(-1)])"
        )
        shown.wait(lambda: shown.run(lines) == [["a", 60], ["b<i>", 40], ["c", 20]], "there is a line for each run")
        run.steps(5)
        shown.wait(lambda: shown.run(lines)[2] == ["c", 25], "the line of the run that goes on grows")
        shown.press("x")
        shown.wait(lambda: shown.text("#axis") == "by time", "the charts run over time")
        shown.wait(lambda: shown.run(lines)[0][1] < 10, "the lines run over time")


def test_a_phone_shows_everything_without_scrolling_sideways(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    make_run(tmp_path / "runs" / "20261118-140000-1", steps=150)
    url = serve(tmp_path / "runs").url
    shown = page(url, width=380, height=780, phone=True)
    width = "return [innerWidth, document.documentElement.scrollWidth]"
    shown.wait(lambda: shown.text(".runs tbody"), "the runs are listed")
    assert shown.run(width) == [380, 380]
    shown.driver.get(url + "&run=20261118-140000-1")
    shown.wait_for_step(150)
    for selector in CHARTS:
        shown.wait_for_chart(selector)
        box = shown.run(
            "const b = document.querySelector(arguments[0] + ' .main-svg').getBoundingClientRect(); return [b.left, b.right]",
            selector,
        )
        assert 0 <= box[0] < box[1] <= 380, selector
    assert shown.run(width) == [380, 380]
    assert shown.run("return document.querySelector('#throughput .chart').layout.dragmode") is False  # a finger scrolls


def test_the_page_works_by_keyboard_alone(tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]) -> None:
    make_run(tmp_path / "runs" / "a", steps=150)
    shown = page(serve(tmp_path / "runs").url + "&run=a")
    shown.wait_for_step(150)
    shown.wait_for_chart("#throughput")
    shown.press("?")
    assert shown.run("return document.querySelector('dialog').open")
    shown.press("\ue00c")  # Escape
    shown.wait(lambda: not shown.run("return document.querySelector('dialog').open"), "the help is closed")
    shown.run("document.activeElement.blur(); scrollTo(0, 0)")
    names = []
    for _ in range(8):
        shown.press("\ue004")  # Tab
        names.append(shown.focused())
        outline = shown.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid" or names[-1] == "skip", names
    assert names[0] == "skip"
    assert {"axis", "theme", "help"} <= set(names)
    shown.press("j")
    shown.press("j")
    assert shown.run("return document.activeElement.tagName") == "SECTION"
    ends = "const r = document.querySelector('#throughput .chart').layout.xaxis.range; return r[1] - r[0]"
    before = shown.run(ends)
    shown.press("+")
    shown.run("scrollTo(0, 0)")  # charts that cannot be seen are drawn later
    shown.wait(lambda: shown.run(ends) < 0.6 * before, "the charts are zoomed")
    shown.run("document.querySelector('#throughput .chart').focus()")
    begin = "return document.querySelector('#throughput .chart').layout.xaxis.range[0]"
    was = shown.run(begin)
    shown.press("\ue014")  # the arrow to the right
    shown.wait(lambda: shown.run(begin) > was, "the charts are moved")
    shown.press("0")
    shown.wait(lambda: abs(shown.run(ends) - before) < 0.1 * before, "the whole run is shown")
    shown.press("t")
    assert shown.run("return document.documentElement.dataset.theme") == "dark"
    shown.press("r")
    shown.wait(lambda: shown.text("h1") == "Runs", "the list is shown")


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_contrast_in_light_and_dark(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page], dark: bool
) -> None:
    make_run(tmp_path / "run", steps=150)
    shown = page(serve(tmp_path / "run").url, dark=dark)
    shown.wait_for_step(150)
    assert shown.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
    low = shown.run(CONTRAST)
    assert not low, low


CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
  .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (e) => {
  const c = parse(getComputedStyle(e).backgroundColor);
  return c.length < 4 || c[3] > 0 ? c : behind(e.parentElement);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !e.getClientRects().length || e.closest("svg, .skip")) continue;
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) found.push([e.textContent.slice(0, 30), (a + 0.05) / (b + 0.05)]);
}
return found;
"""


UNNAMED = """
const parts = [...document.querySelectorAll("section, [role], [tabindex='0'], button, select, input")];
const isNamed = (e) => e.hidden || ["status", "log"].includes(e.getAttribute("role")) || e.getAttribute("aria-label")
  || e.textContent.trim() || e.labels?.length || document.getElementById(e.getAttribute("aria-labelledby") ?? "")?.textContent;
return parts.filter((e) => !isNamed(e)).map((e) => e.outerHTML.slice(0, 100));
"""


def test_every_part_of_the_page_has_a_name_for_screen_readers(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    make_run(tmp_path / "run", steps=150)
    shown = page(serve(tmp_path / "run").url)
    shown.wait_for_step(150)
    assert shown.run(UNNAMED) == []
    label = "return document.querySelector('#throughput .chart').getAttribute('aria-label')"
    assert "samples/s at step 150" in shown.run(label)


def test_the_report_shows_the_same_without_a_server(tmp_path: Path, page: Callable[..., Page]) -> None:
    make_run(tmp_path / "run</script>", steps=150)
    assert main(["report", str(tmp_path / "run</script>"), "-o", str(tmp_path / "report.html")]) == 0
    shown = page(f"file://{tmp_path}/report.html")
    shown.wait_for_step(150)
    for selector in CHARTS:
        shown.wait_for_chart(selector)
    assert shown.text(".pill") == "finished"
    assert "1 failure survived" in shown.text("#summary").lower()
    shown.wait(lambda: "worker 0 says hello" in shown.text(".log"), "the log is shown")
    requests = shown.run("return performance.getEntriesByType('resource').map(e => e.name).filter(e => !e.startsWith('data:'))")
    assert requests == []


def test_a_wrong_token_is_answered_with_a_sentence(
    tmp_path: Path, serve: Callable[..., DashServer], page: Callable[..., Page]
) -> None:
    server = serve(make_run(tmp_path / "run", steps=5))
    shown = page(f"http://127.0.0.1:{server.port}/?token=wrong")
    assert shown.text("body").startswith("The token is missing or wrong.")
    console_errors(shown.driver)  # the browser notes the 403
