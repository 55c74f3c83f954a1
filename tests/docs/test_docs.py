"""The documentation site builds strictly, asks no other server, and its examples work."""

import ast
import importlib
import importlib.util
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import train
from docs import costs
from powergossip import algorithms
from powergossip.algorithms import aggregation, torch_powersgd
from powergossip.tasks.models import ResNet20
from tests.harness import launch

DOCS = launch.ROOT / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not {"_build", "_generated", "results"} & set(path.relative_to(DOCS).parts)
)
TEXTS = [*PAGES, launch.ROOT / "README.md", launch.ROOT / "CONTRIBUTING.md"]


def name(path: Path) -> str:
    return str(path.relative_to(launch.ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """A page's code blocks in a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, path.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- The site ------------------------------------------------------------------------------------


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
    built = launch.python("-m", "sphinx", *options, DOCS, folder / "html", timeout=400)
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


def test_no_page_asks_another_server(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    found = []
    for page in pages:
        requests = Requests()
        text = page.read_text()
        requests.feed(text)
        requests.addresses += style_requests(" ".join(re.findall(r"<style.*?</style>", text, re.S)))
        found += [(page.name, a) for a in requests.addresses if is_outside(a)]
    for style in site.rglob("*.css"):
        found += [(style.name, a) for a in style_requests(style.read_text()) if is_outside(a)]
    assert found == []


# Names of formats, and pages that are named in a message or comment.
NAMES_IN_SCRIPTS = (
    "http://www.w3.org/",
    "https://snowballstem.org",
    "https://developer.mozilla.org",
)
VERSION_WARNING = "https://pydata-sphinx-theme.readthedocs.io/"  # a message of the theme


def test_no_script_asks_another_server(site: Path) -> None:
    scripts = sorted(site.rglob("*.js"))
    assert "katex.min.js" in {script.name for script in scripts}
    for script in scripts:
        for address in re.findall(r"(?:https?|wss?)://[^\s\"'`)]+", script.read_text()):
            assert address.startswith((*NAMES_IN_SCRIPTS, VERSION_WARNING)), (script.name, address)


def test_files_that_a_page_needs_are_in_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.is_relative_to(site / "_static"):  # a template of the theme
            continue
        requests = Requests()
        requests.feed(page.read_text())
        for address in requests.addresses:
            path = re.split(r"[?#]", address)[0]
            if path and not address.startswith("data:"):
                assert (page.parent / path).exists(), (page.name, address)


def test_fonts_of_equations_are_in_the_site(site: Path) -> None:
    katex = site / "_static" / "katex"
    fonts = style_requests((katex / "katex.min.css").read_text())
    assert len(fonts) == 20
    for font in fonts:
        assert (katex / font).read_bytes()[:4] == b"wOF2"
    assert "MIT" in (katex / "LICENSE").read_text()


def test_every_method_has_a_page_with_equations(site: Path) -> None:
    rows = [*algorithms.AVERAGING, *aggregation.AGGREGATIONS, *torch_powersgd.HOOKS]
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


def test_names_in_docstrings_are_in_sections() -> None:
    """Not in columns `name  # text`, which only comments have."""
    files = [*(launch.ROOT / "powergossip").rglob("*.py"), launch.ROOT / "gossip_run.py"]
    files += [*(launch.ROOT / "experiments").glob("*.py"), *(launch.ROOT / "examples").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                columns = re.search(r"^ *\w[\w, ]* +# .*", ast.get_docstring(node) or "", re.M)
                assert not columns, (name(file), columns)


# --- Code blocks ---------------------------------------------------------------------------------

RUN = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """One after the other in a process, each with names of its own."""
    lines = ["import runpy"]
    for index, block in enumerate(blocks(page, "python")):
        (tmp_path / f"block{index}.py").write_text(block)
        lines.append(f"runpy.run_path('block{index}.py')")
    (tmp_path / "program.py").write_text("\n".join(lines))
    ended = launch.python("program.py", cwd=tmp_path, variables={"PYTHONPATH": ""})
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_keys_in_the_text_exist() -> None:
    for page in TEXTS:
        for key in re.findall(
            r"`((?:optimizer|distributed|decentralized_data)_\w+)", page.read_text()
        ):
            if key != "optimizer_X" and key != "optimizer_step":
                assert key in train.config, (name(page), key)


# --- Facts ---------------------------------------------------------------------------------------


def test_measured_numbers_are_those_of_a_report() -> None:
    """Every mean with a standard deviation, and the whole table with its bits."""
    reports = "\n".join(p.read_text() for p in (DOCS / "results").glob("*/report.md"))
    for page in TEXTS:
        for number in re.findall(r"[\d.]+ ± [\d.]*\d", page.read_text()):
            assert number in reports, (name(page), number)


def test_numbers_of_a_paragraph_are_those_of_the_reports_that_it_links() -> None:
    """Numbers of two digits and more before the point, also of the table that follows."""
    checked = 0
    for page in TEXTS:
        text = re.sub(r":\n\n\|", ":\n|", page.read_text())
        for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. )", text):
            links = re.findall(r"results/(\w+)/report\.md", paragraph)
            reports = [(DOCS / "results" / link / "report.md").read_text() for link in links]
            measured = [float(x) for report in reports for x in re.findall(r"\d+\.\d+", report)]
            for number in re.findall(r"(?<![\w.])\d\d+\.\d+", paragraph if links else ""):
                decimals = len(number.split(".")[1])
                rounded = {f"{x:.{decimals}f}" for x in measured}
                assert number in rounded, (name(page), links, number)
                checked += 1
    assert checked >= 50


PUBLISHED = (DOCS / "published.md").read_text()


def test_old_names_have_new_ones_that_exist() -> None:
    """Classes of the published programs that are missing here are in the table, with others."""
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", PUBLISHED.split("## Defaults")[0], re.MULTILINE)
    old = [name for names, _ in rows for name in re.findall(r"`([\w.]+)`", names)]
    for module, missing in {
        "algorithms": "SimpleGossip OnlyOnLargeParameters DeepSqueezeGossip MoniquaGossip",
        "topologies": "Ring Torus FullyConnected SocialNetwork UnidirectionalRing "
        "ConnectedWattsStrogatz",
        "dgc": "DGCCompressor DGCSGDMemory",
    }.items():
        assert {f"{module}.{name}" for name in missing.split()} <= set(old)
    for _, new in rows:
        (place, *_) = re.findall(r"`([\w.]+\.\w+)", new)
        module, name = place.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name), place


def test_mebibytes_beside_the_published_ones_are_those_of_the_costs(tmp_path: Path) -> None:
    """ResNet-20, 49 steps. Published: x once; 12 bytes a value to both neighbors."""
    costs.write(tmp_path)
    sizes = [p.numel() for p in ResNet20((3, 32, 32), 10).parameters()]
    kept = sum(max(1, int(0.01 * size)) for size in sizes)
    for name, row, published in (
        ("all-reduce", "all-reduce", 4 * sum(sizes)),
        ("CHOCO, top 1 %", "CHOCO or DeepSqueeze, top 1 %", 2 * 12 * kept),
    ):
        (count,) = re.findall(
            rf"^\| {row} \| ([\d,]+) \|", (tmp_path / "costs.md").read_text(), re.M
        )
        both = [49 * sent / 2**20 for sent in (int(count.replace(",", "")), published)]
        assert f"| {name} | {both[0]:.2f} | {both[1]:.2f} |" in PUBLISHED, (name, both)


def test_every_report_is_on_the_page_of_results() -> None:
    listed = re.findall(r"<results/(\w+)/report>$", (DOCS / "results.md").read_text(), re.M)
    assert sorted(listed) == sorted(p.parent.name for p in (DOCS / "results").glob("*/report.md"))


def test_files_that_pages_link_exist() -> None:
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (name(page), target)


def test_citation_and_ci_fit_the_project() -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((launch.ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert all(citation[key] for key in ("title", "message", "authors"))
    ci = yaml.safe_load((launch.ROOT / ".github/workflows/ci.yml").read_text())
    job = ci["jobs"]["test"]
    versions = job["strategy"]["matrix"]["python"]
    assert versions[0] == project["requires-python"].removeprefix(">=")
    makefile = (launch.ROOT / "Makefile").read_text()
    ran = [step["run"] for step in job["steps"] if "run" in step]
    for target in (command.split()[1] for command in ran if command.startswith("make ")):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_authors_are_those_of_the_citation() -> None:
    citation = yaml.safe_load((launch.ROOT / "CITATION.cff").read_text())
    assert f'author = "{citation["authors"][0]["name"]}"' in (DOCS / "conf.py").read_text()


def test_make_lists_its_targets() -> None:
    shown = subprocess.check_output(["make", "help"], cwd=launch.ROOT, text=True)
    assert re.search(r"^make docs +\w", shown, re.M)
    assert re.search(r"^make docs-serve +\w", shown, re.M)
