"""Notebooks become Markdown that GitHub, Zenn and Qiita render: read back by a parser, and looked at in a browser."""

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from html import escape
from urllib.parse import unquote

import nbformat
import pandas as pd
import papermill
import pytest
from browsing import NARROW, WIDE, Visit, browser as browser
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.publish.articles import publish
from plamo_study.run import runs

NOTEBOOKS = paths.ROOT / "tests/notebooks"
RENDERERS = {
    "zenn": MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"]),
    "github": MarkdownIt("commonmark").enable(["table", "strikethrough"]),
}


def written(path, *cells):
    """A notebook as if executed: text is Markdown, a dictionary the data of an output."""
    made = []
    for cell in cells:
        if isinstance(cell, dict):
            output = nbformat.v4.new_output("display_data", cell)
            made.append(nbformat.v4.new_code_cell("x = '```'", outputs=[output], execution_count=1))
        else:
            made.append(nbformat.v4.new_markdown_cell(cell))
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


@pytest.fixture(scope="module")
def articles(tmp_path_factory):
    """A notebook just executed and a committed one, by name."""
    folder = tmp_path_factory.mktemp("articles")
    result = runs.run(NOTEBOOKS / "article.ipynb", {}, folder / "executed")
    assert result.status == "ok"
    sources = [result.output, paths.NOTEBOOKS / "00-start-here.ipynb"]
    written = publish(sources, folder, author="Jane *Doe*").paths
    assert written == [folder / path.stem / f"{path.stem}.md" for path in sources]
    return {path.stem: path for path in written}


def rendered(path, renderer="zenn"):
    return BeautifulSoup(RENDERERS[renderer].render(path.read_text(encoding="utf-8")), "html.parser")


@pytest.mark.long
@pytest.mark.parametrize("name", ["article", "00-start-here"])
def test_every_figure_and_table_that_an_article_names_is_there_and_nothing_else_is(articles, name):
    path = articles[name]
    tree = rendered(path)
    named = {path.name, ".published.json"}
    for at, tag in [("src", tag) for tag in tree.find_all("img")] + [("href", tag) for tag in tree.find_all("a")]:
        address = unquote(tag[at])
        assert not re.match(r"/|file:|data:", address)
        if not re.match("https?:|#", address):
            assert (path.parent / address).is_file(), address
            named.add(address)
    assert all(tag["alt"].strip() for tag in tree.find_all("img"))
    held = {path.relative_to(articles[name].parent).as_posix() for path in path.parent.rglob("*") if path.is_file()}
    assert held == named
    assert {name.rpartition(".")[2] for name in named} == {"md", "json", "svg", "png", "csv"}
    assert str(paths.ROOT) not in path.read_text()


@pytest.mark.parametrize("name", ["article", "00-start-here"])
def test_an_article_holds_no_html_so_that_every_site_renders_it(articles, name):
    tokens = RENDERERS["github"].parse(articles[name].read_text())
    inline = [child for token in tokens for child in token.children or ()]
    assert not [token.content for token in (*tokens, *inline) if token.type.startswith("html")]
    shown = rendered(articles[name]).get_text()
    assert "Jane *Doe*" in shown
    assert "What do you expect at 16 sequences?" in shown or name != "article"
    assert "hidden cell" not in shown
    assert "alt.Chart(" not in shown, "code is left out"


def test_a_chart_s_svg_is_drawn_and_its_csv_names_columns_with_units(articles):
    folder = articles["article"].parent
    for path in (folder / "figures").glob("*.svg"):
        text = path.read_text()
        assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", text)
        assert text.count("<path") > 5
    frame = pd.read_csv(folder / "data" / "article-1.csv")
    bounds = [f"decode rate (tokens/s){bound}" for bound in ("", ", from", ", to")]
    assert sorted(frame) == sorted(["model", "sequences", *bounds])
    assert len(frame) == 10


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", ["article", "00-start-here"])
def test_an_article_is_readable_in_a_browser_as_a_site_shows_it(articles, name, width, browser):
    """A blog's style: pictures shrink to the column, tables and code scroll."""
    path = articles[name]
    style = "body { max-width: 46rem; margin: 1rem; overflow-wrap: anywhere } img { max-width: 100% } "
    style += "table, pre { display: block; overflow-x: auto; max-width: 100% }"
    head = f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><style>{style}</style>"
    (path.parent / "shown.html").write_text(f"{head}<link rel=icon href='data:,'>{rendered(path)}")
    with Visit(browser, path.parent / "shown.html", width) as visit:
        evaluate = visit.page.evaluate
        assert evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
        assert evaluate("document.documentElement.scrollWidth") == width
        assert evaluate("document.querySelectorAll('h1').length") == 1
        assert evaluate("document.querySelectorAll('table').length") > 0
        assert all(url.startswith("file:") for url in visit.requests)
        assert not visit.complaints
    (path.parent / "shown.html").unlink()


TRICKY = [
    "a < b & c > d, &amp; 5 * 3 * 2, `a|b`, snake_case_name, _x_ and [1.0, 2.0]",
    "1986\\. A year, and ~5 ~6 of them; \\[x\\](y)",
    "1\\. not a list",
    "\\# no heading",
    "\\- no list",
    "**bold *and* `code ``x`` y`** and ***both***",
    "x<sup>2</sup>, x<sub>max</sub>, <var>n</var>",
    "> a quotation\n>\n> - with a list\n> - of two\n>\n> ```python\n> and = 'code'\n> ```",
    "1. one\n2. two\n   - nested `a`\n   - again\n\n   and a paragraph\n3. three",
    "| a | b |\n|---|---:|\n| `x` | 1 |\n| p \\| q | [l](https://e.org/a_(b)) |",
    "a line  \nand its second",
    "日本語の**強調**と`コード`。",
    '<table><tr><th colspan="2">both</th></tr><tr><td><code>1|2</code></td><td>a<br>b</td></tr></table>',
    "````\n```\ninner\n```\n````",
]


@pytest.mark.parametrize("source", TRICKY)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_markdown_says_in_an_article_what_it_says_on_the_page(source, renderer, tmp_path):
    """Text, marks, lists, tables and code come through, whatever letters they hold."""
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", source)], tmp_path).paths
    page = MarkdownIt("commonmark").enable("table").render(source)
    expected, found = BeautifulSoup(page, "html.parser"), rendered(path, renderer)
    for text, form in (("2", "²"), ("max", "_max")):
        for tag in expected.find_all(["sup", "sub"], string=text):
            tag.replace_with(form)
    found.h1.extract()
    assert "".join(found.get_text().split()) == "".join(expected.get_text().split())
    kinds = ["strong", "code", "li", "ol", "ul", "blockquote", "pre", "td", "a"]
    assert [len(found.find_all(kind)) for kind in kinds] == [len(expected.find_all(kind)) for kind in kinds]


def test_formulas_stay_for_the_site_s_typesetter(tmp_path):
    source = written(tmp_path / "a.ipynb", "# A\n\nHere $T_i = b_{i} * c$ costs \\$5.\n\n$$\n\\frac{a}{b_i}\n$$")
    (path,) = publish([source], tmp_path).paths
    assert "$T_i = b_{i} * c$ costs \\$5." in path.read_text()
    assert "$$\n\\frac{a}{b_i}\n$$" in path.read_text()


@pytest.mark.parametrize(("code", "shown"), [("folded", "details"), ("shown", "pre"), ("none", None)])
def test_code_is_folded_shown_or_left_out(code, shown, tmp_path):
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", {"text/plain": "43"})], tmp_path, code=code).paths
    tree = rendered(path, "github")
    assert ("x = '```'" in tree.get_text()) == bool(shown)
    assert bool(tree.find("details")) == (shown == "details")


def test_a_folded_section_is_a_plain_section_of_an_article(tmp_path):
    source = written(tmp_path / "a.ipynb", "# A\n\n[there](#Every-row)", "## Every row\n\nRows.", "## After\n\nMore.")
    notebook = nbformat.read(source, as_version=4)
    notebook.cells[1].metadata["tags"] = ["detail"]
    nbformat.write(notebook, source)
    (path,) = publish([source], tmp_path).paths
    assert path.read_text() == "# A\n\n[there](#every-row)\n\n## Every row\n\nRows.\n\n## After\n\nMore.\n"


def test_attached_pictures_become_files_and_links_between_articles_lead_there(tmp_path):
    pixel = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    first = written(
        tmp_path / "ひとつ め.ipynb", "# A b\n\n![dot](attachment:x.png) [two](b.ipynb#Some-Part) [c](c.ipynb)"
    )
    notebook = nbformat.read(first, as_version=4)
    notebook.cells[0]["attachments"] = {"x.png": {"image/png": pixel}}
    nbformat.write(notebook, first)
    second = written(tmp_path / "b.ipynb", "# B\n\n## Some Part\n\nSee [above](#Some-Part).")
    one, two = publish([first, second], tmp_path / "out").paths
    image = rendered(one).find("img")
    assert (one.parent / unquote(image["src"])).read_bytes() == base64.b64decode(pixel)
    (link,) = rendered(one).find_all("a")
    assert (one.parent / unquote(link["href"].partition("#")[0])).resolve() == two
    assert link["href"].endswith("#some-part")
    assert rendered(two).find("a")["href"] == "#some-part"
    assert "c.ipynb" not in one.read_text()


def test_an_article_is_written_anew_but_what_somebody_edited_or_put_there_is_left(tmp_path):
    long, short = ["# A", *[{"image/png": "iVBORw0KGgo="}] * 2], ["# A", {"image/png": "iVBORw0KGgo="}]
    (path,) = publish([written(tmp_path / "a.ipynb", *long)], tmp_path).paths
    assert len(list((tmp_path / "a/figures").iterdir())) == 2
    (tmp_path / "a/figures/own.png").write_bytes(b"mine")
    publish([written(tmp_path / "a.ipynb", *short)], tmp_path)
    assert sorted(each.name for each in (tmp_path / "a/figures").iterdir()) == ["a-1.png", "own.png"]
    path.write_text(path.read_text() + "\nA sentence of mine.\n")
    with pytest.raises(StudyError, match="was edited after publish wrote it"):
        publish([written(tmp_path / "a.ipynb", *long)], tmp_path)
    assert path.read_text().endswith("mine.\n")
    assert not (tmp_path / "a/figures/a-2.png").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/b.md").write_text("mine")
    with pytest.raises(StudyError, match="is not of publish"):
        publish([written(tmp_path / "b.ipynb", *long)], tmp_path)


def test_a_memory_of_anybody_s_removes_nothing_outside(tmp_path):
    (tmp_path / "victim.png").write_bytes(b"x")
    (tmp_path / "a").mkdir()
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    memory = {name: digest for name in ("../victim.png", str(tmp_path / "victim.png"), "figures/../../victim.png")}
    (tmp_path / "a/.published.json").write_text(json.dumps(memory))
    publish([written(tmp_path / "a.ipynb", "# A")], tmp_path)
    assert (tmp_path / "victim.png").exists()


def test_a_notebook_whose_kernel_died_is_refused_however_complete_papermill_calls_it(tmp_path):
    with contextlib.suppress(Exception):
        papermill.execute_notebook(
            NOTEBOOKS / "kernel-killed.ipynb", tmp_path / "killed.ipynb", kernel_name="python3", progress_bar=False
        )
    with pytest.raises(StudyError, match=r"cell 2 was not executed to its end \(2 of 3 cells") as caught:
        publish([tmp_path / "killed.ipynb"], tmp_path)
    assert "jupyter nbconvert" in str(caught.value)


def test_a_kernel_that_died_in_the_last_cell_after_numbering_it_has_not_finished(tmp_path):
    path = written(tmp_path / "a.ipynb", "# A", {"text/plain": "1"}, {"text/plain": "2"})
    notebook = nbformat.read(path, as_version=4)
    begun = {"iopub.execute_input": "2026-11-26T16:42:08.04Z", "iopub.status.busy": "2026-11-26T16:42:08.04Z"}
    notebook.cells[1].metadata["execution"] = begun | {"shell.execute_reply": "2026-11-26T16:42:08.05Z"}
    notebook.cells[2].metadata["execution"] = begun
    nbformat.write(notebook, path)
    with pytest.raises(StudyError, match="cell 2 was not executed to its end"):
        publish([path], tmp_path)


@pytest.mark.whole
def test_the_command_writes_what_it_names_where_it_is_asked_and_keeps_to_the_study_s_reports_else(tmp_path):
    source = written(tmp_path / "mine.ipynb", "# A", {"image/png": "iVBORw0KGgo="})
    command = [sys.executable, "-m", "plamo_study.cli.main", "publish"]
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(tmp_path / "root"), "COLUMNS": "200"}

    def said(*arguments):
        run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
        done = subprocess.run([*command, *arguments], **run)
        return done.returncode, done.stdout + done.stderr

    code, text = said("mine.ipynb", "--format", "markdown", "--author", " Jane\n Doe ", "--code", "shown")
    assert (code, "published mine/mine.md" in text, "1 pictures have no words" in text) == (0, True, True), text
    assert "Jane Doe" in (tmp_path / "mine/mine.md").read_text()
    assert said("mine.ipynb")[0] == 0
    assert [path.name for path in (tmp_path / "root/reports").glob("*.html")] == ["mine.html"]
    assert said("absent.ipynb")[0] == said()[0] == 2
    assert source.exists()


@pytest.mark.long
def test_what_a_page_refuses_an_article_refuses_too(tmp_path):
    for cells, message in (
        (["# A", {"text/html": "<script>1</script>"}], "holds <script>"),
        (["# A\n\n![x](https://example.org/a.png)"], "needs https://example.org/a.png"),
        (["no title"], "has no title"),
    ):
        with pytest.raises(StudyError, match=re.escape(message)):
            publish([written(tmp_path / "a.ipynb", *cells)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    text = escape("<script>1</script>")
    (path,) = publish([written(tmp_path / "a.ipynb", "# A", text)], tmp_path / "out").paths
    assert not rendered(path, "github").find("script")
