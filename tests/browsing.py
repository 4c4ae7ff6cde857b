"""A real browser for what is published: one page in one window, with all it asked for and complained about."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

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

    def __init__(self, browser, path, width=WIDE):
        self.width, size = width, {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size)
        self.requests, self.complaints = [], []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("console", lambda message: self.complaints.append(message.text))
        self.context.on("weberror", lambda problem: self.complaints.append(str(problem.error)))
        self.url = path.as_uri()
        self.page = self.context.new_page()
        self.page.goto(self.url)

    def __enter__(self):
        return self

    def is_well(self):
        """Nothing is wider than the window, every picture is whole and has words, nothing is asked for."""
        assert self.page.evaluate("document.documentElement.scrollWidth") == self.width, self.url
        assert self.page.evaluate("[...document.images].every(image => image.naturalWidth && image.alt.trim())")
        assert not self.complaints, self.complaints
        assert self.requests == [self.url]

    def __exit__(self, *_):
        self.context.close()
