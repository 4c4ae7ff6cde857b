"""Published pages and articles: what is refused, what stays out, what a browser sees of every committed page."""

import base64
import re
from itertools import product
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import vl_convert
from browsing import NARROW, WIDE, Visit, browser  # noqa: F401  # a fixture
from bs4 import BeautifulSoup

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.publish.pages import publish, whose_rows
from plamo_study.show import theme
from plamo_study.show.tables import Table, folded

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
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


TEXTS = """([all, height]) => {
  const own = e => [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const boxes = [...document.querySelectorAll(all)].filter(e => own(e) && getComputedStyle(e).opacity > .05).map(e => {
    const range = document.createRange();
    range.selectNodeContents(e);
    const frame = (e.closest('svg, .scroll, pre') || document.documentElement).getBoundingClientRect();
    return [e, range.getBoundingClientRect(), frame];
  }).filter(([e, box]) => box.top < height && box.width > 1);
  const wrong = boxes.filter(([e, box, frame]) => !e.closest('.scroll, pre') &&
    (box.left < frame.left - 1 || box.right > frame.right + 1 || (e.closest('svg') && box.top < frame.top - 1)));
  const said = wrong.map(([e]) => 'cut: ' + e.textContent);
  boxes.forEach(([e, a], i) => boxes.slice(0, i).forEach(([other, b]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > .35 * Math.min(a.height, b.height) && !e.contains(other) && !other.contains(e))
      said.push('on one another: ' + e.textContent + ' | ' + other.textContent);
  }));
  return said;
}"""  # of elements with words of their own that begin within `height` pixels: what leaves its frame, what overlaps
WORDS = "main :is(h1, h2, p, li, td, th, strong, a, code)"
FONTS = paths.ROOT / ".venv/fonts"  # not installed: vl-convert would draw with it in place of its own


def drawn(notebook):
    """The charts of a notebook as SVG, as they were drawn for its pictures."""
    outputs = [each for cell in nbformat.read(notebook, as_version=4).cells for each in cell.get("outputs", [])]
    specs = [each.metadata[theme.SPEC_KEY] for each in outputs if theme.SPEC_KEY in each.metadata]
    return "".join(f"<div>{vl_convert.vegalite_to_svg(spec, vl_version=theme.VEGALITE)}</div>" for spec in specs)


@pytest.mark.long
def test_no_word_of_a_page_or_chart_is_cut_or_lies_on_another_and_nothing_is_fetched(site, browser):  # noqa: F811
    for path, width in product(site.glob("*.html"), (NARROW, WIDE)):
        with Visit(browser, path, width) as visit:
            visit.is_well()
            assert not visit.page.query_selector("script"), path.name
            if path.name[0] in "0123456789AB":
                assert visit.page.evaluate("document.images[0].getBoundingClientRect().top") < 700, (path.name, width)
                assert visit.page.evaluate(TEXTS, [WORDS, 900]) == [], (path.name, width)
    faces = {"400": "Regular", "600 700": "Bold"}
    found = {weight: next(FONTS.rglob(f"LiberationSans-{kind}.ttf"), None) for weight, kind in faces.items()}
    if None in found.values():
        pytest.skip("the pages are well; the font of the pictures is not here: .ci/run fetches it")
    style = "".join(
        f"@font-face {{font-family: 'Liberation Sans'; font-weight: {weight}; "
        f"src: url(data:font/ttf;base64,{base64.b64encode(face.read_bytes()).decode()})}}"
        for weight, face in found.items()
    )
    page = browser.new_page()
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        page.set_content(f"<style>{style}</style>{drawn(path)}")
        page.evaluate("document.fonts.ready")
        assert page.evaluate(TEXTS, ["svg text", 1e6]) == [], path.name
    page.close()


@pytest.mark.long
def test_the_index_leads_to_every_page(site):
    index = (site / "index.html").read_text()
    assert set(re.findall(r'href="([^":#]+\.html)"', index)) == {path.name for path in site.iterdir()}
    assert [path.name for path in site.iterdir() if re.search(r'href="[^":]*\.ipynb', path.read_text())] == []


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


def test_only_executed_notebooks_of_different_names_are_published(tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), unexecuted := tmp_path / "unexecuted.ipynb")
    cells[1].execution_count, cells[1].outputs = (
        1,
        [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])],
    )
    nbformat.write(nbformat.v4.new_notebook(cells=cells), failed := tmp_path / "failed.ipynb")
    good, untitled = written(tmp_path / "good.ipynb", "# A"), written(tmp_path / "untitled.ipynb", "No heading here.")
    for sources, message in (
        ([unexecuted], "cell 1 was not executed to its end"),
        ([failed], "cell 1 was not executed to its end"),
        ([tmp_path / "absent.ipynb"], "no such notebook"),
        ([Path(__file__)], "not a readable notebook"),
        ([], "no executed notebook"),
        ([untitled], "has no title"),
        ([good, good], "share a name"),
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
