"""Sphinx configuration of the documentation site: `make docs`.

Pages are Markdown (MyST), API pages come from docstrings and types, drawings of topologies from the
topologies themselves. Nothing is fetched when a page is read: KaTeX and its fonts are in `_static`.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout of this file, not another one

import gossip_run
import powergossip
import train
from powergossip.benchmark import page, results
from powergossip.runs import key_help

project = "Decentralized deep learning"
version = release = powergossip.__version__
author = "The decentralized-deep-learning authors"
copyright = author
exclude_patterns = ["_build", "_generated", "tutorials"]  # tutorials: as pages in _tutorials

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
default_role = "code"  # of `single backticks` in docstrings
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

autoclass_content = "both"
autodoc_inherit_docstrings = False  # an undocumented override of torch's would show torch's markup
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
smartquotes = False  # two dashes begin an option
highlight_language = "none"  # of blocks that name no language: formulas, commands, columns

# Programs in tutorials/ are run and become pages, if they have changed.
sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "_tutorials",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("docs.gallery.pictures",),
    "image_srcset": ["2x"],
    "reset_modules": ("docs.gallery.style",),
    "thumbnail_size": (400, 220),
    "capture_repr": (),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "min_reported_time": 3600,  # seconds: the time of the machine that builds the site is not shown
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {version}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["katex/katex.min.css", "site.css"]
html_js_files = ["katex/katex.min.js", "equations.js"]
html_math_renderer = "katex"
html_sidebars: dict[str, list[str]] = {"topologies": []}  # it has no pages below it
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "PowerGossip"},
    "navbar_center": ["navbar-nav"],
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
}

SOURCE = re.compile(r"(arXiv[: ]\d{4}\.\d{4,5}|doi:10\.[^\s,;)]*[^\s,;:.)])")
ARXIV = "https://arxiv.org/abs/"


def inline_equation(translator: HTML5Translator, node: nodes.math) -> None:
    """An element that equations.js renders."""
    translator.body.append(
        translator.starttag(node, "span", "", CLASS="math") + translator.encode(node.astext())
    )
    translator.body.append("</span>")
    raise nodes.SkipNode


def displayed_equation(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Like `inline_equation`, centered on separate lines."""
    translator.body.append(
        translator.starttag(node, "div", "", CLASS="math display")
        + translator.encode(node.astext())
    )
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def generate(app: Sphinx) -> None:
    """Texts that follow from the code."""
    folder = Path(app.srcdir) / "_generated"
    page.write(results.read_all([results.OF_LIBRARY]), folder / "benchmark")
    for module in (train, gossip_run):
        keys = key_help.describe(module.config)
        (folder / f"{module.__name__}-keys.txt").write_text(f"{keys}\n")


def for_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Use directives in comments, which GitHub hides, and show files in place of links to them on a
    line of their own. Keep ± in its line."""
    text = re.sub(r"(\d) ± (\d)", "\\1\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}\\2", source[0])
    text = re.sub(r"<!--\n(```.*?\n```)\n-->", r"\1", text, flags=re.DOTALL)
    for suffix, block in (
        ("md", "```{include} \\1\n:relative-docs: docs/\n```"),
        ("py", "```{literalinclude} \\1\n:language: python\n:caption: \\2\n```"),
    ):
        text = re.sub(rf"^\[.*\]\((\.\./(\S+\.{suffix}))\)$", block, text, flags=re.MULTILINE)
    source[0] = text


def link_sources(app: Sphinx, document: nodes.document) -> None:
    """Make links of the arXiv and doi numbers in text."""
    for text in list(document.findall(nodes.Text)):
        if isinstance(text.parent, nodes.literal | nodes.FixedTextElement | nodes.reference):
            continue
        linked: list[nodes.Node] = []
        for i, part in enumerate(SOURCE.split(text)):
            address = re.sub("^arXiv[: ]", ARXIV, re.sub("^doi:", "https://doi.org/", part))
            linked.append(nodes.reference("", part, refuri=address) if i % 2 else nodes.Text(part))
        text.parent.replace(text, linked)


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("katex", (inline_equation, None), (displayed_equation, None))
    app.connect("builder-inited", generate)
    app.connect("source-read", for_the_site)
    app.connect("doctree-read", link_sources)
