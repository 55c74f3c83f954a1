"""Tutorials are short programs with text, and run as the notebooks that the site offers."""

import json
import re
from pathlib import Path

import pytest
from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

from tests.harness import launch

DOCS = launch.ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
# Cells share a namespace, which has no __file__, and the outputs are those of one process.
KERNEL = """
import json
names = {"__name__": "__main__"}
for cell in json.load(open("cells.json")):
    exec(cell, names)
"""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_pages_that_a_tutorial_links_exist(path: Path) -> None:
    """Beside the pages of tutorials. In notebooks too, links are addresses and not roles."""
    text = path.read_text()
    assert not re.search(r":(doc|ref|any):", text)
    links = re.findall(r"<([^<>\s]+)>`_", re.sub(r"\n# ", " ", text))
    assert links
    for link in links:
        page, _, heading = link.removeprefix("../").partition("#")
        source = (DOCS / page).with_suffix(".md").read_text()
        headings = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", source, re.M)]
        assert heading in ("", *headings), link


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_a_notebook(path: Path, tmp_path: Path) -> None:
    _, blocks = split_code_and_text_blocks(path)
    notebook = jupyter_notebook(blocks, DEFAULT_GALLERY_CONF, tmp_path)
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert kinds[0] == "markdown"
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) >= 3
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    variables = {"MPLBACKEND": "agg"}
    ended = launch.python("-c", KERNEL, cwd=tmp_path, timeout=500, variables=variables)
    assert ended.returncode == 0, ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["cells.json"]  # runs are elsewhere
