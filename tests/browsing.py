"""A real browser for what is published: one page in one window, with all it asked for and complained about."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from plamo_study.publish.pages import LIBRARY

CHROMIUM = [
    os.environ.get("CHROMIUM", ""),
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
WIDE, NARROW = 1280, 390
CUT = 1  # CSS pixels that a text may lie outside of its drawing
CROSSED = 3, 4  # CSS pixels, across and down, that two labels of axes, legends and titles may share
UNREADABLE = """([cut, [across, down]]) => [...document.querySelectorAll("figure.chart")].flatMap((figure, at) => {
    const svg = figure.querySelector(".drawing svg"), whole = svg.getBoundingClientRect();
    const seen = {opacityProperty: true, visibilityProperty: true}; // Vega hides labels for which there is no room
    const shown = [...svg.querySelectorAll("text")].filter(
        text => text.textContent.trim() && text.checkVisibility(seen));
    const said = text => `figure ${at + 1}: ${text.textContent}`;
    const outside = box => Math.max(
        whole.left - box.left, box.right - whole.right, whole.top - box.top, box.bottom - whole.bottom);
    const cut_off = shown.filter(text => text.textContent.endsWith("…") || outside(text.getBoundingClientRect()) > cut);
    const guides = shown.filter(text => text.closest(".role-axis, .role-legend, .role-title"));
    const level = guides.filter(text => !/rotate[(](?!-?90|0)/.test(text.getAttribute("transform") || ""));
    const boxes = level.map(text => text.getBoundingClientRect());
    const crossed = level.flatMap((text, one) => level.slice(one + 1).filter((_, more) => {
        const a = boxes[one], b = boxes[one + 1 + more];
        return Math.min(a.right, b.right) - Math.max(a.left, b.left) > across
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > down;
    }).map(other => `${said(text)} over ${other.textContent}`));
    const scrolls = figure.scrollWidth > figure.clientWidth + cut ? [`figure ${at + 1} scrolls`] : [];
    return [...cut_off.map(text => said(text) + " is cut"), ...crossed, ...scrolls];
})"""


@pytest.fixture(scope="module")
def browser():
    found = next((path for name in CHROMIUM if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome here; install one or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """One page in one window, with everything it asked for and complained about."""

    def __init__(self, browser, path, width=WIDE, scheme="light", script=True):
        self.width, size = width, {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=script)
        self.requests, self.complaints = [], []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("console", lambda message: self.complaints.append(message.text))
        self.context.on("weberror", lambda problem: self.complaints.append(str(problem.error)))
        self.url = path.as_uri()
        self.shared = (path.parent / LIBRARY).as_uri()
        self.page = self.context.new_page()
        self.page.goto(self.url)

    def __enter__(self):
        return self

    def is_well(self):
        """Nothing is wider than the window, every picture has words, nothing is complained about or asked for.

        The file that the pages of a site share may be.
        """
        assert self.page.evaluate("document.documentElement.scrollWidth") == self.width
        assert self.page.evaluate("[...document.images].every(image => image.alt.trim())")
        assert not self.complaints, self.complaints
        assert [request for request in self.requests if request != self.shared] == [self.url]

    def __exit__(self, *_):
        self.context.close()

    def wait_for_charts(self, count):
        if count:
            self.page.locator(".drawing[role=img] svg").nth(count - 1).wait_for(state="attached")
            self.wait_until(f"document.querySelectorAll('.drawing[role=img] svg').length === {count}")
        assert self.page.locator(".drawing svg").count() == count

    def widen(self, width):
        """Give the window another width, and wait until every chart is drawn for it."""
        if width == self.width:
            return
        self.page.evaluate("document.querySelectorAll('.drawing svg').forEach(svg => svg.dataset.before = true)")
        self.width = width
        self.page.set_viewport_size({"width": width, "height": 900})
        self.wait_until("!document.querySelector('.drawing svg[data-before]')")

    def unfold(self):
        """Open every folded section."""
        self.page.evaluate("for (const fold of document.querySelectorAll('.detail')) fold.open = true")

    def is_legible(self):
        """No text of a chart is cut, runs into another one of an axis, a legend or a title, or waits for a scroll."""
        found = self.page.evaluate(UNREADABLE, [CUT, CROSSED])
        assert not found, found

    def wait_until(self, expression):
        """Poll from outside: the page's policy forbids the eval that playwright's own waiting needs."""
        for _ in range(100):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")
