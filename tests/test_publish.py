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


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executed")
    results = [runs.run(NOTEBOOKS / f"{name}.ipynb", {}, folder) for name in ("article", "plain", "hostile")]
    assert [result.status for result in results] == ["ok"] * 3
    return [result.output for result in results]


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
        self.width, size = width, {"width": width, "height": 900}
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

    def is_well(self):
        """Nothing is wider than the window, every picture has words, and nothing was asked for or complained about."""
        assert self.page.evaluate("document.documentElement.scrollWidth") == self.width
        assert self.page.evaluate("[...document.images].every(image => image.alt.trim())")
        assert (self.requests, self.complaints) == ([self.url], [])

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


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_charts_are_drawn_offline_without_complaint_and_fit_the_window(site, browser, width, scheme):
    with Visit(browser, site / "article.html", width, scheme) as visit:
        visit.wait_for_charts(2)
        marks = "svg => svg.querySelectorAll('.mark-line path, .mark-rect path').length"
        assert all(visit.page.evaluate(marks, svg) >= 2 for svg in visit.page.query_selector_all(".drawing svg"))
        assert not visit.page.is_visible(".chart img")
        boxes = [chart.bounding_box() for chart in visit.page.query_selector_all(".chart")]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        visit.is_well()


STUDIES = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The page of every committed notebook, without its code, which is folded and most of the work."""
    folder = tmp_path_factory.mktemp("studies")
    for path in STUDIES:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            cell.source = cell.source if cell.cell_type == "markdown" else "1"
        nbformat.write(notebook, folder / path.name)
    _, *pages, _ = publish(sorted(folder.glob("*.ipynb")), folder)
    return dict(zip(STUDIES, pages, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("notebook", STUDIES, ids=lambda path: path.stem)
def test_every_study_becomes_a_page_that_fits_a_telephone(studies, notebook, browser):
    charts = sum("image/png" in str(cell.get("outputs")) for cell in nbformat.read(notebook, as_version=4).cells)
    with Visit(browser, studies[notebook], NARROW) as visit:
        visit.wait_for_charts(charts)
        visit.is_well()


def test_without_javascript_the_pictures_stand(site, browser):
    with Visit(browser, site / "article.html", NARROW, script=False) as visit:
        pictures = visit.page.locator(".chart img")
        assert pictures.count() == 2
        for index in range(2):
            assert pictures.nth(index).is_visible()
            assert pictures.nth(index).bounding_box()["width"] >= 300
        assert visit.requests == [visit.url]


def test_a_chart_answers_the_pointer_gives_its_data_as_csv_and_follows_the_window(site, browser):
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        legend = visit.page.locator(".drawing >> nth=0").locator(".role-legend-label text").all_text_contents()
        assert legend == ["PLaMo 2 1B", "PLaMo 3 NICT 2B"]
        visit.page.locator(".mark-symbol path").first.hover(force=True)
        visit.page.wait_for_selector("#vg-tooltip-element.visible")
        assert "rate" in visit.page.inner_text("#vg-tooltip-element")
        with visit.page.expect_download() as taken:
            visit.page.locator("figcaption a").first.click()
        (drawn,) = json.loads(visit.page.locator("figure.chart script").first.text_content())["datasets"].values()
        assert taken.value.suggested_filename == "article-1.csv"
        pd.testing.assert_frame_equal(pd.read_csv(taken.value.path()), pd.DataFrame(drawn), check_dtype=False)
        visit.page.set_viewport_size({"width": NARROW, "height": 900})
        words = "[...document.querySelector('.drawing svg').querySelectorAll('text')]"
        visit.wait_until(f"{words}.every(text => text.getBoundingClientRect().right < {NARROW})")
        visit.width = NARROW
        visit.is_well()


@pytest.mark.parametrize("name", ["index", "article", "plain", "hostile"])
def test_every_page_is_complete_in_itself_can_be_read_by_a_machine_and_has_no_markup_of_a_text_s(site, browser, name):
    with Visit(browser, site / f"{name}.html", NARROW) as visit:
        evaluate = visit.page.evaluate
        visit.wait_for_charts({"article": 2, "hostile": 1}.get(name, 0))
        assert evaluate("window.pwned") is None
        if name in ("hostile", "index"):
            assert 'Less < more & "quotes"' in visit.page.inner_text("main")
        assert evaluate("document.documentElement.lang") == "en"
        assert evaluate("document.title") == evaluate("document.querySelector('h1').firstChild.textContent.trim()")
        assert evaluate("document.querySelectorAll('h1').length") == 1
        assert evaluate("[...document.querySelectorAll('th')].every(head => head.scope)")
        ids = evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(set(ids)) == len(ids)
        visit.is_well()


def test_the_index_leads_to_every_page_and_back(site, browser):
    with Visit(browser, site / "index.html") as visit:
        assert "9.4 times as fast" in visit.page.inner_text(".index li:first-child")
        visit.page.click("text=How far apart are prefill and decode?")
        visit.page.click("text=the plain notebook")
        assert visit.page.inner_text("h1").startswith("Plain")
        visit.page.click("header a")
        assert visit.page.url == visit.url
        assert all(url.startswith("file:") for url in visit.requests)


def test_code_is_folded_tags_leave_cells_out_numbers_stand_right_and_paper_gets_pictures_and_what_is_folded(
    site, browser
):
    folded = "[...document.querySelectorAll('details:not(.code) > :not(summary)')].map(part => part.checkVisibility())"
    with Visit(browser, site / "article.html") as visit:
        visit.wait_for_charts(2)
        assert not visit.page.is_visible("details.code pre")
        assert visit.page.inner_text("details.code summary >> nth=0") == "Parameters"
        text = visit.page.content()
        assert "hidden cell" not in text
        assert "stream output, 3 of 3" in text
        assert 'print("stream output' not in re.sub("<[^>]+>", "", text)
        heads = "[...document.querySelector('table').querySelectorAll('thead th')]"
        aligned = dict(visit.page.evaluate(f"{heads}.map(e => [e.textContent, getComputedStyle(e).textAlign])"))
        assert set(visit.page.evaluate(folded)) == {False}
        visit.page.emulate_media(media="print")
        assert set(visit.page.evaluate(folded)) == {True}
        assert visit.page.is_visible(".chart img")
        assert not visit.page.is_visible(".chart svg")
    assert (aligned["model"], aligned["rate"], aligned["verdict"]) == ("left", "right", "left")


def test_the_page_says_when_and_with_what_it_was_run(executed, tmp_path):
    notebook = nbformat.read(executed[1], as_version=4)
    notebook.metadata.papermill.end_time = "2026-11-20T12:34:56.789"
    notebook.metadata.papermill.parameters = {"scale": "mini", "source": "live"}
    nbformat.write(notebook, tmp_path / "plain.ipynb")
    publish([tmp_path / "plain.ipynb"], tmp_path)
    page = (tmp_path / "plain.html").read_text()
    assert "Run 2026-11-20 12:34 with scale = mini, source = live." in page
    assert len(page) < 20_000, "a page without charts carries no Vega"


def test_publishing_again_from_a_folder_with_templates_of_anybody_s_writes_the_same_bytes(
    executed, site, tmp_path, monkeypatch
):
    """nbconvert looks for templates in the current folder, and Jinja templates are code."""
    for name in ("base/display_priority.j2", "base/null.j2", "web/notebook.html.j2", "notebook.html.j2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{{ 1 / 0 }}")
    monkeypatch.chdir(tmp_path)
    publish(executed, tmp_path / "again")
    for path in site.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def written(path, *cells):
    """A notebook as if executed: text is Markdown, a dictionary the data of an output."""
    made = [nbformat.v4.new_markdown_cell(cell) for cell in cells if isinstance(cell, str)]
    outputs = [nbformat.v4.new_output("display_data", cell) for cell in cells if isinstance(cell, dict)]
    made += [nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1) for output in outputs]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["# A\n\nIt holds $T = b / B$."], "a: the TeX formula 'T = b / B'"),
        (["# A\n\n![a picture](https://example.org/a.png)"], "needs https://example.org/a.png"),
        (["# A\n\n<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"], "a picture has no alt text"),
        (["# A", {"image/png": "iVBORw0KGgo="}], "a picture has no alt text"),
        (["# A", {"text/html": "<script>window.pwned = 1</script>"}], "holds <script>"),
        (["# A", {"text/html": "<script type='application/json' src='data:,x'></script>"}], "holds <script>"),
        (["# A", {"text/html": "<p onclick='x()'>"}], "holds a script in onclick="),
        (["# A\n\n<a href='java\tscript:x()'>x</a>"], "holds a link"),
        (["# A\n\n<a href='data:text/html;base64,x'>x</a>"], "holds a link"),
        (["No heading here."], "has no title"),
    ],
)
def test_what_cannot_be_a_page_is_refused_by_name(cells, message, tmp_path):
    with pytest.raises(StudyError, match=re.escape(message)):
        publish([written(tmp_path / "a.ipynb", *cells)], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_raw_cell_and_an_output_without_a_known_form_are_left_out(tmp_path):
    path = written(tmp_path / "a.ipynb", "# A", {"text/plain": "shown"})
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_raw_cell("<script>raw</script>"))
    nbformat.write(notebook, path)
    _, page, _ = publish([path], tmp_path / "site")
    assert "shown" in page.read_text()
    assert "raw" not in page.read_text().partition("<main>")[2]


def test_only_executed_notebooks_of_different_names_are_published(executed, tmp_path):
    unexecuted = tmp_path / "unexecuted.ipynb"
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), unexecuted)
    for sources, message in (
        ([unexecuted], "cell 1 was not executed to its end"),
        ([tmp_path / "absent.ipynb"], "no such notebook"),
        ([Path(__file__)], "not a readable notebook"),
        ([], "no executed notebook"),
        ([executed[0], executed[0]], "share this name"),
    ):
        with pytest.raises(StudyError, match=message):
            publish(sources, tmp_path / "site")
    assert not (tmp_path / "site").exists()


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
        assert output.data["text/plain"] == picture["alt"] == output.metadata[theme.SPEC_KEY]["description"]
        width, height = png.size(base64.b64decode(output.data["image/png"]))
        assert (picture["width"], picture["height"]) == (width // 2, height // 2)


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


@pytest.mark.parametrize("description", ["", "  \n"])
def test_a_chart_without_words_is_refused(description):
    with pytest.raises(StudyError, match="chart without a description"):
        theme.mimebundle(chart(description=description).to_dict())
