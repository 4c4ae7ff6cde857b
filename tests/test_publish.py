"""Pages are published from notebooks executed for real and looked at by a real browser."""

import base64
import functools
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import altair as alt
import nbformat
import pandas as pd
import pytest
from browsing import NARROW, WIDE, Visit, browser as browser
from bs4 import BeautifulSoup
from IPython.core.formatters import DisplayFormatter

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.measurements import recording
from plamo_study.publish import executed as executed_notebook, exporter
from plamo_study.publish.executed import AUTHORS
from plamo_study.publish.pages import publish
from plamo_study.run import runs
from plamo_study.show import charts, evidence, png, theme

NOTEBOOKS = Path(__file__).parent / "notebooks"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executed")
    results = [runs.run(NOTEBOOKS / f"{name}.ipynb", {}, folder) for name in ("article", "plain", "hostile")]
    assert [result.status for result in results] == ["ok"] * 3
    return [result.output for result in results]


@pytest.fixture(scope="module")
def site(executed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "new"
    written = publish(executed, folder).paths
    assert [path.name for path in written] == [
        "index.html",
        "article.html",
        "plain.html",
        "hostile.html",
        "glossary.html",
        "vega.js",
    ]
    assert sorted(folder.iterdir()) == sorted(written)
    return folder


@pytest.mark.long
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
    publish(sorted(folder.glob("*.ipynb")), folder)
    return {path: folder / f"{path.stem}.html" for path in STUDIES}


@pytest.mark.long
@pytest.mark.parametrize("notebook", STUDIES, ids=lambda path: path.stem)
def test_every_study_becomes_a_page_that_is_legible_on_a_telephone_and_on_a_desk(studies, notebook, browser):
    count = sum("image/png" in str(cell.get("outputs")) for cell in nbformat.read(notebook, as_version=4).cells)
    with Visit(browser, studies[notebook], NARROW) as visit:
        for width in (NARROW, WIDE):
            visit.widen(width)
            visit.unfold()
            visit.wait_for_charts(count)
            visit.is_legible()
            visit.is_well()


LONG = "a name of many words that takes most of a telephone's width, "
WORDY = pd.DataFrame({"what": [LONG + end for end in "abcdef"], "at": range(0, 6000, 1000), "value": range(6)})
BARS = alt.Chart(WORDY).encode(x=alt.X("value", title=f"{LONG} (log)"), color=alt.Color("what", legend=None))
CROWDED = {
    "long labels of a vertical axis": BARS.mark_bar().encode(y=alt.Y("what", title=None)),
    "long names in a legend": BARS.mark_point().encode(y="value", color=alt.Color("what", title=None)),
    "two legends": alt.layer(
        BARS.mark_point().encode(y="value", color=alt.Color("what", title="a")),
        BARS.mark_line().encode(y="value", color=alt.Color("what", title="b")),
    ).resolve_scale(color="independent"),
    "many labels of a horizontal axis": BARS.mark_bar().encode(x=alt.X("at:O", axis={"labelAngle": 0}), y="value"),
    "panels side by side": alt.hconcat(*[BARS.mark_bar().encode(y="value").properties(width=200, title=LONG)] * 3),
    "panels of a facet": BARS.mark_bar().encode(y="value").properties(width=150).facet(column="at:N"),
    "panels of a facet in lines": BARS.mark_bar().encode(y="value").properties(width=150).facet("at:N", columns=3),
    "panels below one another": alt.vconcat(*[BARS.mark_bar().encode(y="what").properties(title=LONG * 2)] * 2),
    "a text that leaves the plot": BARS.mark_text(align="left").encode(y="value", text=alt.value("a few words")),
}


@pytest.mark.long
@pytest.mark.parametrize("drawn", CROWDED.values(), ids=CROWDED)
def test_no_text_of_a_crowded_chart_is_cut_on_a_telephone_or_runs_into_another(drawn, tmp_path, browser):
    spec = drawn.properties(title=LONG * 3, description="Crowded.").to_dict() | theme.theme()
    (page,) = publish([written(tmp_path / "a.ipynb", "# A", {VEGALITE: spec})], tmp_path / "site").paths
    with Visit(browser, page, NARROW) as visit:
        visit.wait_for_charts(1)
        visit.is_legible()
        visit.is_well()


@pytest.mark.long
def test_a_log_scale_on_a_plot_as_narrow_as_its_padding_is_drawn_without_complaint(tmp_path, browser):
    rows = {"value": [1.0, 10, 100], "low": [0.9, 9, 90], "high": [1.1, 11, 110], "model": "a"}
    data = pd.DataFrame(rows | {"what": ["i" * n for n in (160, 161, 162)]})
    specs = [
        charts.dots(data, "what", "T", log="x").configure_axisY(labelLimit=limit).properties(description="x").to_dict()
        for limit in range(250, 345)  # one of them leaves the plot its padding's width, whatever the fonts
    ]
    shown = [nbformat.v4.new_output("display_data", {VEGALITE: spec}) for spec in specs]
    cells = [nbformat.v4.new_code_cell("1", outputs=[each], execution_count=1) for each in shown]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A"), *cells]), tmp_path / "a.ipynb")
    (page,) = publish([tmp_path / "a.ipynb"], tmp_path / "site").paths
    with Visit(browser, page, NARROW) as visit:
        visit.page.locator(".drawing[role=img] svg").nth(len(specs) - 1).wait_for(state="attached", timeout=120_000)
        assert not visit.complaints, visit.complaints


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
        headings = {"model": "model", "batch": "sequences", "rate": "decode rate (tokens/s)"}
        headings |= {"low": "decode rate (tokens/s), from", "high": "decode rate (tokens/s), to"}
        shown = pd.DataFrame(drawn)[list(headings)].rename(columns=headings)
        pd.testing.assert_frame_equal(pd.read_csv(taken.value.path()), shown, check_dtype=False)
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


FOLDED = (
    ("# A\n\nSee [the second](#Second) and [the proof](#Proof).", ()),
    ("", ()),
    ("## First\n\nTold.", ()),
    ("## Proof\n\nRows of every cell.", ("detail",)),
    ("", ()),
    ("### Second\n\nComputed a second way.", ("detail",)),
    ("", ()),
    ("### Third\n\nNot told.", ()),
    ("## Answers\n\nTold.", ()),
)


def in_order(path, cells):
    """A notebook as if executed, of (Markdown, tags); an empty text is a chart."""
    drawn = nbformat.v4.new_output("display_data", {VEGALITE: chart(title="Rates").to_dict()})
    made = [
        nbformat.v4.new_markdown_cell(text, metadata={"tags": list(tags)})
        if text
        else nbformat.v4.new_code_cell("1", outputs=[drawn], execution_count=1)
        for text, tags in cells
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folded")
    return publish([in_order(folder / "a.ipynb", FOLDED)], folder).paths[0]


def test_a_section_that_proves_is_folded_and_its_charts_are_drawn_when_it_is_opened(folded, browser):
    opened = "[...document.querySelectorAll('.detail')].map(fold => fold.open)"
    with Visit(browser, folded, NARROW) as visit:
        visit.wait_for_charts(1)
        texts = ("Rows of every cell.", "Computed a second way.", "Not told.")
        assert not any(visit.page.is_visible(f"text={text}") for text in texts)
        assert all(visit.page.is_visible(f"h2:has-text('{name}')") for name in ("First", "Proof", "Answers"))
        visit.is_well()
        visit.page.click(".detail > summary >> nth=0")
        visit.wait_for_charts(2)
        assert visit.page.evaluate(opened) == [True, False]
        visit.page.click(".detail > summary >> nth=1")
        visit.wait_for_charts(3)
        visit.is_legible()
        visit.is_well()


def test_a_link_into_folded_sections_opens_them_and_paper_shows_all_for_as_long_as_it_is_printed(folded, browser):
    opened = "[...document.querySelectorAll('.detail')].map(fold => fold.open)"
    with Visit(browser, folded) as visit:
        visit.wait_for_charts(1)
        visit.page.evaluate(f"addEventListener('beforeprint', () => (window.printed = {opened}))")
        visit.page.pdf()
        assert visit.page.evaluate("window.printed") == [True, True]
        assert visit.page.evaluate(opened) == [False, False]
        visit.page.click(".contents > summary")
        visit.page.click(".contents a >> text=Proof")
        visit.wait_for_charts(2)
        assert visit.page.evaluate(opened) == [True, False]
        visit.page.click("main a >> text=the second")
        visit.wait_for_charts(3)
        visit.page.click(".detail > summary >> nth=1")
        visit.page.click("main a >> text=the second")
        assert visit.page.evaluate(opened) == [True, True], "also where the address stays as it is"
        visit.page.goto("about:blank")
        visit.page.goto(f"{visit.url}#Second")
        visit.wait_for_charts(3)
        assert visit.page.evaluate(opened) == [True, True]
        assert visit.page.is_visible("text=Computed a second way.")


def test_without_javascript_a_folded_section_opens_too_and_without_folds_a_page_is_as_it_was(folded, tmp_path, browser):
    with Visit(browser, folded, script=False) as visit:
        visit.page.click(".detail > summary >> nth=0")
        assert visit.page.is_visible("text=Rows of every cell.")
        assert visit.page.locator(".chart img").nth(1).is_visible()
    plain = publish([in_order(tmp_path / "a.ipynb", [(text, ()) for text, _ in FOLDED])], tmp_path).paths[0].read_text()
    tree = BeautifulSoup(folded.read_text(), "html.parser")
    for part in tree.select(".detail, .detail > summary, .detail > div"):
        part.unwrap()
    assert str(tree.main) == str(BeautifulSoup(plain, "html.parser").main)
    assert plain.count("<script>") == folded.read_text().count("<script>") - 1


def test_pages_of_a_site_share_one_library_and_a_page_alone_shows_its_charts_or_carries_its_own(tmp_path, browser):
    sources = [in_order(tmp_path / f"{name}.ipynb", FOLDED[:3]) for name in "ab"]
    site = tmp_path / "site"
    publish(sources, site)
    (alone,) = publish(sources[:1], tmp_path / "alone").paths
    sizes = {path.name: path.stat().st_size for path in site.iterdir()}
    assert sum(size > 500_000 for size in sizes.values()) == 1, sizes
    for path in (site / "a.html", site / "b.html", alone):
        with Visit(browser, path) as visit:
            visit.wait_for_charts(1)
            visit.is_well()
            assert (visit.shared in visit.requests) == (path != alone)
    (tmp_path / "a.html").write_bytes((site / "a.html").read_bytes())
    with Visit(browser, tmp_path / "a.html") as visit:
        assert visit.page.is_visible(".chart img")


def test_a_hosted_site_takes_the_library_that_it_was_published_with_and_no_other(tmp_path, browser):
    sources = [in_order(tmp_path / f"{name}.ipynb", FOLDED[:3]) for name in "ab"]
    publish(sources, tmp_path)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/a.html")
        page.wait_for_selector(".drawing[role=img] svg")
        with (tmp_path / "vega.js").open("a") as file:
            file.write("window.another = true;")
        page.close()
        page, complaints = browser.new_page(), []  # a new visitor: whoever was here within the second is told 304
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(f"http://127.0.0.1:{server.server_port}/b.html")
        page.wait_for_load_state("load")
        assert page.is_visible(".chart img")
        assert page.evaluate("window.another") is None
        assert any("integrity" in each for each in complaints)
        page.close()
        server.shutdown()


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
    parts = "document.querySelectorAll('main details:not(.code) > :not(summary)')"
    folded = f"[...{parts}].map(part => part.checkVisibility())"
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
    notebook.metadata.papermill.parameters = {"scale": "mini", "files": '["/home/ann/my models/a.gguf", "~/b.gguf"]'}
    tagged = {"tags": ["injected-parameters"]}
    notebook.cells[1:1] = [nbformat.v4.new_code_cell("files = '../c/d.gguf'", metadata=tagged, execution_count=1)]
    nbformat.write(notebook, tmp_path / "plain.ipynb")
    publish([tmp_path / "plain.ipynb"], tmp_path)
    page = (tmp_path / "plain.html").read_text()
    text = BeautifulSoup(page, "html.parser").get_text()
    assert 'Run 2026-11-20 12:34 with files = ["a.gguf", "b.gguf"], scale = mini.' in text
    assert "files = 'd.gguf'" in text, "where a file lies is not published"
    assert len(page) < 20_000, "a page without charts carries no Vega"


REFERENCE = {"source": "recorded", "machine": "AMD EPYC Zen 5, 2 vCPUs", "days": ["2026-11-18", "2026-11-20"]}
OWN = {
    "source": "live",
    "machine": "Apple M4 Pro",
    "device": "GPU",
    "engine": "llama.cpp 0c1e570",
    "days": ["2026-12-01"],
}


def of_rows(path, *said):
    """A notebook, as if executed, that says these things of its rows, as `evidence.verified` does."""
    cells = [nbformat.v4.new_markdown_cell("# Two rates\n\nA finding.")]
    for each in said:
        shown = {"metadata": {"text/markdown": {theme.ROWS_KEY: each}}, "data": {"text/markdown": "All were right."}}
        output = nbformat.v4.new_output("display_data", **shown)
        cells.append(nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("said", "author", "heading", "shown", "cited"),
    [
        ([REFERENCE], "Jane", "AMD EPYC Zen 5, 2 vCPUs", "Reference rows: AMD EPYC Zen 5, 2 vCPUs", f"{AUTHORS}, “"),
        ([OWN], "Jane <J>", "Apple M4 Pro, GPU", "Measured on Apple M4 Pro, GPU · llama.cpp 0c1e570", "Jane <J>, “"),
        ([OWN], "", "Apple M4 Pro, GPU", "2026-12-01", "“Two rates”, measured on Apple M4 Pro, GPU"),
        ([OWN, REFERENCE], "", "Apple M4 Pro, GPU", "Measured on Apple M4 Pro, GPU", "“Two rates”, measured on"),
        ([], "Jane", None, None, "Jane, “Two rates”"),
        ([], "", None, None, None),
    ],
)
def test_a_page_says_whose_rows_it_shows_and_credits_the_study_with_nobody_s_run(
    said, author, heading, shown, cited, tmp_path, browser
):
    (page,) = publish([of_rows(tmp_path / "a.ipynb", *said)], tmp_path / "site", author).paths
    with Visit(browser, page, NARROW) as visit:
        footer, text = visit.page.inner_text("footer"), visit.page.inner_text("body")
        assert visit.page.title() == (f"Two rates · {heading}" if heading else "Two rates")
        assert all(where in said for where in [shown or ""] for said in (footer, visit.page.inner_text("header")))
        assert (f"Cite as: {cited}" in footer) if cited else ("Cite as" not in footer)
        assert (AUTHORS in text) == (said == [REFERENCE])
        visit.is_well()


def test_the_index_puts_your_machine_first_groups_the_stories_and_says_whose_rows_each_page_shows(tmp_path):
    for name in ("14-methods", "00-start-here", "stranger"):
        of_rows(tmp_path / f"{name}.ipynb", REFERENCE)
    mine = of_rows(tmp_path / "your-machine.ipynb", OWN)
    notebook = nbformat.read(mine, as_version=4)
    notebook.cells[0].source = "# Fast?\n\n- **How fast does it read?**\n  - It reads 7 tokens a second."
    nbformat.write(notebook, mine)
    (index, *_) = publish(sorted(tmp_path.glob("*.ipynb")), tmp_path / "site").paths
    tree = BeautifulSoup(index.read_text(), "html.parser")
    assert [each.get_text() for each in tree.select("h2")] == ["Your machine", "Learn", "Trust", "More"]
    assert [each["href"] for each in tree.select("li > a")] == [
        "your-machine.html", "00-start-here.html", "14-methods.html", "stranger.html",
    ]  # fmt: skip
    badges = [each.get_text() for each in tree.select(".badge")]
    assert badges == ["your rows", *["reference: AMD EPYC Zen 5, 2 vCPUs"] * 3]
    assert "It reads 7 tokens a second." in tree.select_one(".index li p").get_text()


def test_a_committed_notebook_becomes_a_page_without_being_executed(tmp_path):
    source = paths.NOTEBOOKS / "14-methods.ipynb"
    before = source.read_bytes()
    (page,) = publish([source], tmp_path).paths
    assert source.read_bytes() == before
    assert "Reference rows" in page.read_text()
    assert list(tmp_path.iterdir()) == [page], "one notebook is one file"


def test_evidence_tells_a_page_whose_rows_these_are(tmp_path):
    shown = DisplayFormatter().format(evidence.verified(recording("01-phase-asymmetry", "recorded", "shape", 0)))
    output = nbformat.v4.new_output("display_data", shown[0], metadata=shown[1])
    cells = [nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1)]
    about = executed_notebook.about(nbformat.v4.new_notebook(cells=cells))
    assert (about.source, about.machine) == ("recorded", "AMD EPYC Zen 5, 2 vCPUs")
    assert about.engine.startswith("llama.cpp ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d( to .*)?", about.days)


def test_a_file_that_publish_did_not_write_is_never_replaced(executed, tmp_path):
    (tmp_path / "plain.html").write_text("<!doctype html>\nmine")
    with pytest.raises(StudyError, match="is not of publish"):
        publish(executed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.html"]
    assert (tmp_path / "plain.html").read_text() == "<!doctype html>\nmine"


def test_a_stranger_s_charts_and_pictures_are_shown_whatever_form_their_notebook_holds(tmp_path, browser):
    drawn = chart(title="Rates of a stranger")
    spec = drawn.to_dict()
    with alt.renderers.enable("default"):
        by_script = drawn._repr_mimebundle_()
    picture = base64.b64encode(theme.vl_convert.vegalite_to_png(spec)).decode()
    cells = [
        {VEGALITE: spec, "text/plain": "<VegaLite 6 object>"},
        {"text/plain": "alt.Chart(...)", **by_script},
        {"image/png": picture, "text/plain": "<Figure size 640x480 with 1 Axes>"},
        {"image/svg+xml": theme.vl_convert.vegalite_to_svg(spec), "text/plain": "<Figure size 640x480 with 1 Axes>"},
    ]
    published = publish([written(tmp_path / "a.ipynb", "# A", "## Rates of all", *cells)], tmp_path / "site")
    assert published.wordless == 2
    with Visit(browser, published.paths[0], NARROW) as visit:
        visit.wait_for_charts(2)
        words = visit.page.evaluate("[...document.images].map(image => image.alt)")
        assert words == ["Rates of a stranger"] * 2 + ["Rates of all"] * 2
        labels = visit.page.evaluate("[...document.querySelectorAll('[role=img]')].map(e => e.ariaLabel)")
        assert labels == ["Rates of a stranger"] * 2
        assert visit.page.evaluate("[...document.images].every(image => image.complete)")
        visit.is_well()


def test_in_the_dark_charts_are_dark_and_links_to_their_data_have_contrast(site, browser):
    color = "element => getComputedStyle(element).color"
    with Visit(browser, site / "article.html", WIDE, "dark") as visit:
        visit.wait_for_charts(2)
        figure = visit.page.locator(".chart").first
        shade = screen(browser, figure.screenshot())
        assert max(shade) < 60, "most of a chart is its card"
        link = luminance(map(int, re.findall(r"\d+", visit.page.eval_on_selector("figcaption a", color))))
        assert (link + 0.05) / (luminance(shade) + 0.05) > 4.5


def screen(browser, picture):
    """The most frequent color of a screenshot."""
    page = browser.new_page()
    found = page.evaluate(
        """async url => {
            const image = new Image(); image.src = url; await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
            context.drawImage(image, 0, 0);
            const {data} = context.getImageData(0, 0, image.width, image.height), counts = {};
            for (let at = 0; at < data.length; at += 4) {
                const color = data.slice(at, at + 3).join(" ");
                counts[color] = (counts[color] || 0) + 1;
            }
            return Object.entries(counts).sort((a, b) => b[1] - a[1])[0][0].split(" ").map(Number);
        }""",
        "data:image/png;base64," + base64.b64encode(picture).decode(),
    )
    page.close()
    return found


def luminance(color):
    """Relative luminance of an sRGB color, as WCAG defines it."""
    red, green, blue = (
        part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in list(color)[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_sections_are_listed_and_links_lead_to_what_is_published_or_are_text(executed, tmp_path, browser):
    sections = [f"## Part {number}\n\nText." for number in range(3)]
    links = "[report](../data/upstream/cuda-scan.md#what) [other](b.ipynb#x) [gone](c.ipynb) [file](../x.patch)"
    sources = [written(tmp_path / f"{name}.ipynb", "# A", f"{links} [top](#Part-1)", *sections) for name in "ab"]
    publish(sources, tmp_path / "apart")
    assert not list((tmp_path / "apart").glob("cuda-scan*")), "no file of another project is published"
    with Visit(browser, tmp_path / "apart" / "a.html") as visit:
        listed = visit.page.evaluate("[...document.querySelectorAll('.contents a')].map(e => e.textContent)")
        assert listed == ["Part 0", "Part 1", "Part 2"]
        hrefs = visit.page.evaluate("[...document.querySelectorAll('main p a')].map(e => e.getAttribute('href'))")
        assert hrefs == ["b.html#x", "#Part-1"]
    written_paths = publish([paths.NOTEBOOKS / "11-serving.ipynb", executed[1]], tmp_path / "with").paths
    assert "server-wakeups.html" in [path.name for path in written_paths]
    for path in written_paths:
        for href in re.findall(r'href="(?!\w+:)([^"#]+)', path.read_text().partition("<body>")[2]):
            assert (path.parent / href).is_file(), f"{path.name} links to {href}"


def test_publishing_again_from_a_folder_with_templates_of_anybody_s_writes_the_same_bytes(
    executed, site, tmp_path, monkeypatch
):
    """nbconvert looks for templates in the current folder, and Jinja templates are code."""
    exporter._exporter.cache_clear()
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


VEGALITE = "application/vnd.vegalite.v6+json"
DISTANT = {"data": {"url": "https://example.org/a.csv"}, "mark": "point"}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["# A\n\nIt holds $T = b / B$."], "a: the TeX formula 'T = b / B'"),
        (["# A\n\n![a picture](https://example.org/a.png)"], "needs https://example.org/a.png"),
        (["# A\n\n<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"], "a picture has no alt text"),
        (["# A", {VEGALITE: DISTANT}], "data lies at https://example.org/a.csv"),
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
    (page,) = publish([path], tmp_path / "site").paths
    assert "shown" in page.read_text()
    assert "raw" not in page.read_text().partition("<main>")[2]


def test_the_first_rows_of_a_frame_are_folded_where_their_cell_says_so(tmp_path):
    path = written(tmp_path / "a.ipynb", "# A", *[{"text/html": "<table><tr><td>7</td></tr></table>"}] * 2)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].metadata["tags"] = ["detail"]
    nbformat.write(notebook, path)
    tree = BeautifulSoup(publish([path], tmp_path / "site").paths[0].read_text(), "html.parser")
    assert [bool(table.find_parent("details")) for table in tree.select("main table")] == [True, False]


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


@pytest.mark.long
@pytest.mark.parametrize("description", ["", "  \n"])
def test_a_chart_without_words_is_refused(description):
    with pytest.raises(StudyError, match="chart without a description"):
        theme.mimebundle(chart(description=description).to_dict())
