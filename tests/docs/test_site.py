"""The documentation site builds strictly and asks no other server. `make docs` runs these tests on
the site that it has built; building one takes two minutes of a core, most of them for tutorials."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from powergossip import algorithms
from powergossip.algorithms import aggregation, ddp_hooks
from tests.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]  # with all tutorials, on a busy machine

DOCS = launch.ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of `make docs`, if made after the last change, or built in another folder."""
    made = DOCS / "_build" / "html"
    sources = [
        *(path for path in DOCS.rglob("*") if not path.is_relative_to(DOCS / "_build")),
        *(
            file
            for part in ("powergossip", "examples")
            for file in (launch.ROOT / part).rglob("*.py")
        ),
        *launch.ROOT.glob("*.*"),
    ]
    index = made / "index.html"
    latest = max(path.stat().st_mtime for path in sources if path.is_file())
    if index.exists() and index.stat().st_mtime > latest:
        return made
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    built = launch.python("-m", "sphinx", *options, DOCS, folder / "html", timeout=1800)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return folder / "html"


class Requests(HTMLParser):
    """Addresses that a browser fetches when it shows a page. Links to click are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.equations = 0
        self.title = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.addresses += [given[key] for key in ("src", "data", "poster") if key in given]
        self.addresses += [part.split()[0] for part in given.get("srcset", "").split(",") if part]
        if tag == "link":
            self.addresses.append(given.get("href", ""))
        self.addresses += style_requests(given.get("style", ""))
        self.equations += "math" in given.get("class", "").split()


def style_requests(css: str) -> list[str]:
    imports = re.findall(r"@import\s+[\"']([^\"']+)", css)
    return imports + re.findall(r"url\(\s*[\"']?([^\"')]+)", css)


def is_outside(address: str) -> bool:
    return bool(re.match(r"([a-z]+:)?//", address, re.IGNORECASE))


def test_pages_ask_no_other_server_and_the_site_has_what_they_need(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    written = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.glob("*.md")}
    assert written <= {page.relative_to(site) for page in pages}
    outside, missing = [], []
    for page in pages:
        requests = Requests()
        text = page.read_text()
        requests.feed(text)
        styles = style_requests(" ".join(re.findall(r"<style.*?</style>", text, re.S)))
        outside += [(page.name, a) for a in (*requests.addresses, *styles) if is_outside(a)]
        if not page.is_relative_to(site / "_static"):  # a template of the theme
            paths = {re.split(r"[?#]", a)[0] for a in requests.addresses if a[:5] != "data:"}
            missing += [(page.name, p) for p in paths - {""} if not (page.parent / p).exists()]
    for style in site.rglob("*.css"):
        outside += [(style.name, a) for a in style_requests(style.read_text()) if is_outside(a)]
    assert (outside, missing) == ([], [])
    katex = site / "_static" / "katex"
    for font in style_requests((katex / "katex.min.css").read_text()):
        assert (katex / font).read_bytes()[:4] == b"wOF2"


def test_every_method_has_a_page_with_equations(site: Path) -> None:
    rows = [*algorithms.AVERAGING, *aggregation.AGGREGATIONS, *ddp_hooks.HOOKS]
    options = [f"optimizer={row}" for row in rows]
    options += [f"algorithm={row.replace('-', '_')}" for row in algorithms.CONSENSUS_ONLY]
    pages = [page for page in (DOCS / "methods").glob("*.md") if page.stem != "index"]
    for page in pages:
        opening = page.read_text()[:1500]
        named = re.findall(r"`((?:optimizer|algorithm)=[\w-]+)`", page.read_text())
        assert named, page
        assert opening.startswith("# ")
        requests = Requests()
        requests.feed((site / "methods" / f"{page.stem}.html").read_text())
        assert requests.equations, page
        for option in named:
            if option in options:
                options.remove(option)
    assert options == []


def test_docstrings_are_in_the_api_pages(site: Path) -> None:
    text = (site / "api" / "algorithms.html").read_text()
    assert 'id="powergossip.algorithms.PowerGossip"' in text
    assert "https://arxiv.org/abs/2008.01425" in text
    assert "system-message" not in text


def test_every_tutorial_has_a_page_with_pictures_and_a_notebook(site: Path) -> None:
    listed = (site / "_tutorials" / "index.html").read_text()
    for tutorial in (DOCS / "tutorials").glob("*.py"):
        page = (site / "_tutorials" / f"{tutorial.stem}.html").read_text()
        assert f"{tutorial.stem}.html" in listed
        assert "sphx-glr-single-img" in page
        (file,) = set(re.findall(rf'"\.\./([^"]*/{tutorial.stem}\.ipynb)"', page))
        assert json.loads((site / file).read_text())["cells"]
