"""Published pages and articles: what is refused, what stays out, what a browser sees of every committed page."""

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from browsing import NARROW, WIDE, Visit, browser  # noqa: F401  # a fixture
from bs4 import BeautifulSoup

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.publish.pages import publish, whose_rows
from plamo_study.show.tables import Table, folded

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
VEGALITE = "application/vnd.vegalite.v6+json"
HOME = "/home/anna/models/a.gguf"


def written(path, *cells):
    """A notebook as if executed: text is Markdown, a dictionary the data of an output."""
    made = [nbformat.v4.new_markdown_cell(cell) for cell in cells if isinstance(cell, str)]
    outputs = [nbformat.v4.new_output("display_data", cell) for cell in cells if isinstance(cell, dict)]
    made += [nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1) for output in outputs]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    made = publish(sorted(paths.NOTEBOOKS.glob("*.ipynb")), folder)
    assert sorted(folder.iterdir()) == sorted(made)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_every_committed_page_fits_the_window_and_asks_for_nothing(site, browser, width):  # noqa: F811
    for path in site.glob("*.html"):
        with Visit(browser, path, width) as visit:
            visit.is_well()
            assert not visit.page.query_selector("script"), path.name


@pytest.mark.long
def test_the_index_leads_to_every_page(site):
    index = (site / "index.html").read_text()
    assert set(re.findall(r'href="([^":#]+\.html)"', index)) == {path.name for path in site.iterdir()}


def test_a_folded_table_stays_in_its_fold(tmp_path):
    table = {"text/markdown": folded("more", Table(pd.DataFrame({"a": [1]}))).data}
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", table)], tmp_path)
    assert BeautifulSoup(path.read_text(), "html.parser").select("details table")


@pytest.mark.parametrize("text", ["<img src=x onerror=a()>", "<a href='javascript:a()'>x</a>", "<svg onload=a()>"])
def test_markup_that_reaches_a_page_runs_nothing(text, tmp_path, browser):  # noqa: F811
    text = text.replace("a()", "document.title=7").replace("src=x", "src='data:,'")
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", {"text/html": text})], tmp_path)
    with Visit(browser, path) as visit:
        if link := visit.page.query_selector("main a[href^=javascript]"):
            link.click()
        assert visit.page.title() == "A"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["# A\n\n![a picture](https://example.org/a.png)"], "a.ipynb, cell 0: needs https://example.org/a.png"),
        (["# A", {VEGALITE: {}}], "cell 1: shows application/vnd.vegalite"),
        (["# A", {"image/png": "not base64"}], "cannot be shown on a page"),
        (["# A\n\n![x](attachment:absent.png)"], "cannot be shown on a page"),
        (["# A", {"text/html": "<script>draw()</script>"}], "cell 1: holds <script>"),
        (
            ["# A", {"application/vnd.plotly.v1+json": {}, "text/plain": "Figure"}],
            "cell 1: shows application/vnd.plotly",
        ),
        (["No heading here."], "has no title"),
    ],
)
@pytest.mark.parametrize("form", ["html", "markdown"])
def test_what_cannot_be_a_page_is_refused_by_its_cell(cells, message, form, tmp_path):
    with pytest.raises(StudyError, match=re.escape(message)):
        publish([written(tmp_path / "a.ipynb", *cells)], tmp_path / "site", form)
    assert not (tmp_path / "site").exists()


def test_only_executed_notebooks_of_different_names_are_published(tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), unexecuted := tmp_path / "unexecuted.ipynb")
    cells[1].execution_count, cells[1].outputs = (
        1,
        [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])],
    )
    nbformat.write(nbformat.v4.new_notebook(cells=cells), failed := tmp_path / "failed.ipynb")
    good = written(tmp_path / "good.ipynb", "# A")
    for sources, message in (
        ([unexecuted], "cell 1 was not executed to its end"),
        ([failed], "cell 1 was not executed to its end"),
        ([tmp_path / "absent.ipynb"], "no such notebook"),
        ([Path(__file__)], "not a readable notebook"),
        ([], "no executed notebook"),
        ([good, good], "share this name"),
    ):
        with pytest.raises(StudyError, match=message):
            publish(sources, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_an_article_has_its_figures_as_files_with_their_words(tmp_path):
    output = {"image/png": PNG, "text/plain": "a [dot]"}
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", output)], tmp_path / "out", "markdown")
    found = re.findall(r"!\[(.*)\]\((.*)\)", path.read_text())
    assert [words for words, _ in found] == [r"a \[dot\]"]
    assert {path.parent / name for _, name in found} == set((path.parent / "figures").iterdir())


@pytest.mark.parametrize("form", ["html", "markdown"])
def test_no_home_folder_is_published_and_links_lead_to_what_is(form, tmp_path):
    cells = (f"# A\n\n{HOME} and [b](../b.ipynb#c), [d](d.md).", {"text/plain": f"{HOME} {Path.home()}/x"})
    sources = [written(tmp_path / "a.ipynb", *cells), written(tmp_path / "b.ipynb", "# B\n\n## c")]
    path = next(path for path in publish(sources, tmp_path / "out", form) if path.stem == "a")
    text = path.read_text()
    assert text.count("~/models/a.gguf") == 2
    assert not re.search(f"/home/|{Path.home()}/|ipynb|d.md", text)
    assert ("b.html#c" if form == "html" else "../b/b.md#c") in text


def test_a_page_says_whose_rows_it_shows():
    said = whose_rows(nbformat.read(paths.NOTEBOOKS / "01-phase-asymmetry.ipynb", as_version=4))
    assert said.startswith("Reference rows · ")
