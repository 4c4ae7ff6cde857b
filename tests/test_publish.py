"""Pages are published from notebooks executed for real and looked at by a real browser."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import altair as alt
import nbformat
import pandas as pd
import pytest
from playwright.sync_api import sync_playwright

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.present import png, theme
from plamo_study.publish import runs
from plamo_study.publish.pages import publish

NOTEBOOKS = Path(__file__).parent / "notebooks"
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


def execute(names, out_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "NOTEBOOKS", NOTEBOOKS)
        results = runs.run_notebooks(names, {}, out_dir)
    assert [result.status for result in results] == ["ok"] * len(names)
    return [result.output for result in results]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute(["article", "plain", "hostile"], tmp_path_factory.mktemp("executed"))


@pytest.fixture(scope="module")
def site(executed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "new"
    written = publish(executed, folder)
    assert [path.name for path in written] == [
        "index.html",
        "article.html",
        "plain.html",
        "hostile.html",
        "glossary.html",
    ]
    assert sorted(folder.iterdir()) == sorted(written)
    return folder


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
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=script)
        self.requests, self.complaints = [], []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("console", lambda message: self.complaints.append(message.text))
        self.context.on("weberror", lambda problem: self.complaints.append(str(problem.error)))
        self.url = path.as_uri()
        self.page = self.context.new_page()
        self.page.goto(self.url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def wait_for_charts(self, count):
        if count:
            self.page.locator(".drawing svg").nth(count - 1).wait_for(state="attached")
        assert self.page.locator(".drawing svg").count() == count

    def wait_until(self, expression):
        """Poll from outside: the page's policy forbids the eval that playwright's own waiting needs."""
        for _ in range(100):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_charts_are_drawn_offline_without_complaint_and_fit_the_window(site, browser, width, scheme):
    with Visit(browser, site / "article.html", width, scheme) as visit:
        visit.wait_for_charts(2)
        marks = "svg => svg.querySelectorAll('.mark-line path, .mark-rect path').length"
        assert [visit.page.evaluate(marks, svg) >= 2 for svg in visit.page.query_selector_all(".drawing svg")] == [
            True
        ] * 2
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        assert not visit.page.is_visible(".chart img")
        boxes = [chart.bounding_box() for chart in visit.page.query_selector_all(".chart")]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        assert visit.requests == [visit.url]
        assert visit.complaints == []


STUDIES = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The page of every committed notebook."""
    _, *pages, _ = publish(STUDIES, tmp_path_factory.mktemp("studies"))
    return dict(zip(STUDIES, pages, strict=True))


@pytest.mark.parametrize("notebook", STUDIES, ids=lambda path: path.stem)
def test_every_study_becomes_a_page_that_keeps_these_promises(studies, notebook, browser):
    charts = sum("image/png" in str(cell.get("outputs")) for cell in nbformat.read(notebook, as_version=4).cells)
    with Visit(browser, studies[notebook], NARROW) as visit:
        visit.wait_for_charts(charts)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == NARROW
        assert all(image.get_attribute("alt") for image in visit.page.query_selector_all("img"))
        visit.page.set_viewport_size({"width": WIDE, "height": 900})
        visit.wait_until(f"document.documentElement.scrollWidth == {WIDE}")
        visit.wait_for_charts(charts)
        assert (visit.requests, visit.complaints) == ([visit.url], [])


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_without_javascript_the_pictures_stand(site, browser, width):
    with Visit(browser, site / "article.html", width, script=False) as visit:
        pictures = visit.page.locator(".chart img")
        assert pictures.count() == 2
        for index in range(2):
            assert pictures.nth(index).is_visible()
            assert pictures.nth(index).bounding_box()["width"] >= 300
        assert visit.requests == [visit.url]


def test_a_chart_answers_the_pointer(site, browser):
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        legend = visit.page.locator(".drawing >> nth=0").locator(".role-legend-label text").all_text_contents()
        assert legend == ["PLaMo 2 1B", "PLaMo 3 NICT 2B"]
        visit.page.locator(".mark-symbol path").first.hover(force=True)
        visit.page.wait_for_selector("#vg-tooltip-element.visible")
        assert "rate" in visit.page.inner_text("#vg-tooltip-element")
        assert visit.complaints == []


def test_a_chart_follows_the_window(site, browser):
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        visit.page.set_viewport_size({"width": NARROW, "height": 900})
        words = "[...document.querySelector('.drawing svg').querySelectorAll('text')]"
        visit.wait_until(f"{words}.every(text => text.getBoundingClientRect().right < {NARROW})")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == NARROW
        assert visit.complaints == []


def test_the_data_behind_a_figure_can_be_taken_from_the_page_as_a_csv(site, browser):
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        with visit.page.expect_download() as taken:
            visit.page.locator("figcaption a").first.click()
        found = pd.read_csv(taken.value.path())
        spec = json.loads(visit.page.locator("figure.chart script").first.text_content())
        (drawn,) = spec["datasets"].values()
        assert taken.value.suggested_filename == "article-1.csv"
        pd.testing.assert_frame_equal(found, pd.DataFrame(drawn), check_dtype=False)


def test_paper_gets_the_pictures_and_what_is_folded(site, browser):
    folded = "[...document.querySelectorAll('details:not(.code) > :not(summary)')].map(part => part.checkVisibility())"
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        assert set(visit.page.evaluate(folded)) == {False}
        visit.page.emulate_media(media="print")
        assert set(visit.page.evaluate(folded)) == {True}
        assert visit.page.is_visible(".chart img")
        assert not visit.page.is_visible(".chart svg")


@pytest.mark.parametrize("name", ["index", "article", "plain", "hostile"])
def test_every_page_is_complete_in_itself_and_can_be_read_by_a_machine(site, browser, name):
    with Visit(browser, site / f"{name}.html", NARROW) as visit:
        evaluate = visit.page.evaluate
        assert evaluate("document.documentElement.lang") == "en"
        assert evaluate("document.title") == evaluate("document.querySelector('h1').firstChild.textContent.trim()")
        assert evaluate("document.querySelectorAll('h1').length") == 1
        assert evaluate("[...document.images].every(image => image.alt.trim())")
        assert evaluate("[...document.querySelectorAll('th')].every(head => head.scope)")
        assert evaluate("document.documentElement.scrollWidth") == NARROW
        assert evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == evaluate(
            "document.querySelectorAll('[id]').length"
        )
        assert visit.requests == [visit.url]
        assert visit.complaints == []


def test_text_from_a_notebook_is_never_markup(site, browser):
    for name in ("hostile", "index"):
        with Visit(browser, site / f"{name}.html") as visit:
            visit.wait_for_charts(1 if name == "hostile" else 0)
            assert visit.page.evaluate("window.pwned") is None
            assert 'Less < more & "quotes"' in visit.page.inner_text("main")
            assert visit.complaints == []


def test_the_index_leads_to_every_page_and_back(site, browser):
    with Visit(browser, site / "index.html") as visit:
        assert "9.4 times as fast" in visit.page.inner_text(".index li:first-child")
        visit.page.click("text=How far apart are prefill and decode?")
        visit.page.click("text=the plain notebook")
        assert visit.page.inner_text("h1").startswith("Plain")
        visit.page.click("header a")
        assert visit.page.url == visit.url
        assert all(url.startswith("file:") for url in visit.requests)


def test_code_is_folded_and_tags_leave_cells_out(site, browser):
    with Visit(browser, site / "article.html") as visit:
        assert not visit.page.is_visible("details.code pre")
        assert visit.page.inner_text("details.code summary >> nth=0") == "Parameters"
        text = visit.page.content()
        assert "hidden cell" not in text
        assert "stream output, 3 of 3" in text
        assert 'print("stream output' not in re.sub("<[^>]+>", "", text)


def test_columns_of_numbers_stand_right_and_words_left(site, browser):
    with Visit(browser, site / "article.html") as visit:
        heads = "[...document.querySelector('table').querySelectorAll('thead th')]"
        aligned = visit.page.evaluate(f"{heads}.map(e => [e.textContent, getComputedStyle(e).textAlign])")
    assert aligned[1:] == [
        ["model", "left"],
        *[[name, "right"] for name in ("batch", "rate", "low", "high")],
        ["verdict", "left"],
    ]


def test_the_page_says_when_and_with_what_it_was_run(executed, tmp_path):
    notebook = nbformat.read(executed[1], as_version=4)
    notebook.metadata.papermill.end_time = "2026-11-20T12:34:56.789"
    notebook.metadata.papermill.parameters = {"scale": "mini", "source": "live"}
    nbformat.write(notebook, tmp_path / "plain.ipynb")
    publish([tmp_path / "plain.ipynb"], tmp_path)
    page = (tmp_path / "plain.html").read_text()
    assert "Run 2026-11-20 12:34 with scale = mini, source = live." in page
    assert len(page) < 20_000, "a page without charts carries no Vega"


def test_publishing_twice_writes_the_same_bytes(executed, site, tmp_path):
    publish(executed, tmp_path)
    for path in site.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "math: the TeX formula 'T = b / B'"),
        ("remote-image", "needs https://example.org/a.png"),
        ("html-image-without-words", "a picture has no alt text"),
        ("png-without-words", "a picture has no alt text"),
        ("script-output", "holds <script>"),
        ("untitled", "has no title"),
    ],
)
def test_what_cannot_be_a_page_is_refused_by_name(name, message, tmp_path):
    (source,) = execute([name], tmp_path)
    with pytest.raises(StudyError, match=re.escape(message)):
        publish([source], tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NOTEBOOKS / "unexecuted.ipynb", "cell 1 was not executed to its end"),
        (NOTEBOOKS / "absent.ipynb", "no such notebook"),
        (NOTEBOOKS / ".." / "test_publish.py", "not a readable notebook"),
    ],
)
def test_only_executed_notebooks_are_published(source, message, tmp_path):
    with pytest.raises(StudyError, match=message) as problem:
        publish([source], tmp_path / "site")
    assert problem.value.mend == f"plamo-study run {source.stem}"


def test_nothing_to_publish_is_said(tmp_path):
    with pytest.raises(StudyError, match="no executed notebook"):
        publish([], tmp_path)


def test_two_notebooks_of_one_name_are_refused(executed, tmp_path):
    with pytest.raises(StudyError, match="share this name"):
        publish([executed[0], executed[0]], tmp_path)


def chart(**properties):
    rows = pd.DataFrame({"batch": [1, 2, 4], "rate": [10.0, 18.0, 30.0]})
    return alt.Chart(rows).mark_line(point=True).encode(x="batch", y="rate").properties(**properties)


def test_an_output_holds_one_picture_its_words_and_the_spec_and_is_valid(executed):
    notebook = nbformat.read(executed[0], as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    charts = [output for output in outputs if theme.SPEC_KEY in output.get("metadata", {})]
    assert len(charts) == 2
    for output in charts:
        picture = output.metadata["image/png"]
        assert sorted(output.data) == ["image/png", "text/plain"]
        assert output.data["text/plain"] == picture["alt"] == output.metadata[theme.SPEC_KEY]["description"]
        width, height = png.size(base64.b64decode(output.data["image/png"]))
        assert (picture["width"], picture["height"]) == (width // 2, height // 2)
        assert len(json.dumps(output)) < 100_000


def test_the_same_chart_is_the_same_bytes_and_the_picture_survives_compaction(browser):
    spec = chart(description="Rates.").to_dict()
    assert theme.mimebundle(spec) == theme.mimebundle(spec)
    raw = theme.vl_convert.vegalite_to_png(spec, vl_version=theme.VEGALITE, ppi=theme.PPI)
    small = png.compact(raw)
    assert len(small) < len(raw) / 2
    assert png.compact(small) == small
    assert pixels(browser, small) == pixels(browser, raw)


def pixels(browser, picture):
    """Return a hash of all pixels, as a browser decodes them."""
    page = browser.new_page()
    digest = page.evaluate(
        """async url => {
            const image = new Image(); image.src = url; await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
            context.drawImage(image, 0, 0);
            const {data} = context.getImageData(0, 0, image.width, image.height);
            return data.reduce((hash, byte) => (hash * 31 + byte) % 1000000007, 7);
        }""",
        "data:image/png;base64," + base64.b64encode(picture).decode(),
    )
    page.close()
    return digest


@pytest.mark.parametrize("description", [None, "", "  \n"])
def test_a_chart_without_words_is_refused(description):
    spec = chart().to_dict() if description is None else chart(description=description).to_dict()
    with pytest.raises(StudyError, match="chart without a description"):
        theme.mimebundle(spec)


def test_enable_sets_theme_and_renderer(monkeypatch):
    before = alt.theme.active, alt.renderers.active
    theme.enable()
    try:
        assert chart().to_dict()["config"]["range"]["category"] == theme.CATEGORIES
        data, metadata = chart(description="Rates  over\n batch.")._repr_mimebundle_()
        assert data["text/plain"] == metadata["image/png"]["alt"] == "Rates over batch."
    finally:
        alt.theme.enable(before[0])
        alt.renderers.enable(before[1])
