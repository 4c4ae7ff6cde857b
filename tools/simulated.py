"""Record the simulations of page 10, so that opening it makes none: python tools/simulated.py.

To be run after its rows, the step model or the policies have changed; a test says when. The page's own cells ask for
them, so whatever a cell asks for in addition is recorded too.
"""

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from llama_meter import paths
from plamo_study.laws import simulations


def main() -> None:
    """Execute the page's cells in this process, with nothing at hand, and write what they simulated."""
    simulations.FILE.unlink(missing_ok=True)
    page = nbformat.read(paths.NOTEBOOKS / "10-scheduling.ipynb", as_version=4)
    shell = InteractiveShell.instance()
    for cell in page.cells:
        if cell.cell_type == "code":
            with capture_output():
                shell.run_cell(cell.source).raise_error()
    print(f"{simulations.write()} simulations in {simulations.FILE.relative_to(paths.ROOT)}")


if __name__ == "__main__":
    main()
