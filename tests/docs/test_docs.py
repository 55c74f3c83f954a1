"""Code blocks, links and options of the documentation are right."""

import csv
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import powergossip
import train
from docs import costs, drawings
from powergossip.benchmark import page as benchmark_page
from powergossip.benchmark import results
from powergossip.benchmark.tasks import TIERS
from powergossip.formatting import markdown
from powergossip.tasks.models import ResNet20
from tests.harness import launch

DOCS = launch.ROOT / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not {"_build", "_generated", "_tutorials", "results"} & set(path.relative_to(DOCS).parts)
)
RESULTS = launch.ROOT / "RESULTS.md"
README, PAPER = launch.ROOT / "README.md", launch.ROOT / "paper" / "paper.md"
TEXTS = [*PAGES, RESULTS, README, launch.ROOT / "CONTRIBUTING.md", PAPER]


def name(path: Path) -> str:
    return str(path.relative_to(launch.ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """A page's code blocks in a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, path.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- Code blocks ---------------------------------------------------------------------------------

RUN = [page for page in (README, *PAGES) if blocks(page, "python")]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """One after the other in a process, each with names of its own."""
    lines = ["import runpy"]
    for index, block in enumerate(blocks(page, "python")):
        (tmp_path / f"block{index}.py").write_text(block)
        lines.append(f"runpy.run_path('block{index}.py', run_name='__main__')")
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


def report(name: str) -> str:
    """The page of an experiment, and its tables."""
    folder = DOCS / "results" / name
    return "\n".join(p.read_text() for p in [folder / "report.md", *folder.glob("*.csv")])


PUBLISHED_NAMES = sorted(p.parent.name for p in DOCS.glob("results/*/report.md"))


def test_measured_numbers_are_those_of_a_report() -> None:
    """Every mean with a standard deviation, and the whole table with its bits."""
    reports = "\n".join(map(report, PUBLISHED_NAMES))
    entries = results.read_all([results.OF_LIBRARY])
    reports += "".join(benchmark_page.text(entries, tier, None, None) for tier in TIERS)
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
            if page == PAPER:
                links = re.findall(r"experiments run\s+(\w+)", paragraph)
            reports = "\n".join(map(report, links))
            measured = [float(number) for number in re.findall(r"\d+\.\d+", reports)]
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


def test_mebibytes_beside_the_published_ones_are_those_of_the_costs() -> None:
    """ResNet-20, 49 steps. Published: x once; 12 bytes a value to both neighbors."""
    sizes = [p.numel() for p in ResNet20((3, 32, 32), 10).parameters()]
    kept = sum(max(1, int(0.01 * size)) for size in sizes)
    for name, row, published in (
        ("all-reduce", "all-reduce", 4 * sum(sizes)),
        ("CHOCO, top 1 %", "CHOCO or DeepSqueeze, top 1 %", 2 * 12 * kept),
    ):
        (count,) = re.findall(rf"^\| {row} \| ([\d,]+) \|", costs.table(), re.M)
        both = [49 * sent / 2**20 for sent in (int(count.replace(",", "")), published)]
        assert f"| {name} | {both[0]:.2f} | {both[1]:.2f} |" in PUBLISHED, (name, both)


def test_tables_of_pages_follow_from_the_code() -> None:
    """The last digit of an eigenvalue depends on the processor, and what DGC keeps."""

    def number(word: str) -> float:
        return float(word.replace(",", "").rstrip("×"))

    for page, table in [
        ("choosing", costs.table()),
        *(("topologies", t) for t in drawings.tables()),
    ]:
        text = (DOCS / f"{page}.md").read_text()
        header, *lines = table.strip().splitlines()
        found = text[text.find(header) :].split("\n\n")[0].splitlines()
        assert found[:1] == [header], table
        for line, expected in zip(found[1:], lines, strict=True):
            for word, new in zip(line.split(), expected.split(), strict=True):
                assert word == new or number(word) == pytest.approx(number(new), 1e-3, 2e-4), table
    drawn = "".join(path.read_text() for path in drawings.FIGURES.glob("*.svg"))
    for name in (*drawings.UNDIRECTED, *drawings.DIRECTED, *drawings.TIME_VARYING):
        assert f">{name}" in drawn, "python -m docs.drawings"


def test_tables_of_reports_are_those_of_their_files() -> None:
    for file in DOCS.glob("results/*/*.csv"):
        header, *rows = csv.reader(file.open())
        assert markdown(header, rows) in (file.parent / "report.md").read_text(), file


def test_every_report_is_in_the_results_and_has_its_tables_and_at_most_one_picture() -> None:
    listed = re.findall(r"^- \[.*?\]\(docs/results/(\w+)/report\.md\)", RESULTS.read_text(), re.M)
    assert sorted(listed) == PUBLISHED_NAMES
    for folder in map((DOCS / "results").joinpath, PUBLISHED_NAMES):
        linked = re.findall(r"\]\((\S+\.(?:csv|svg))\)", (folder / "report.md").read_text())
        assert sorted([*linked, "report.md"]) == sorted(p.name for p in folder.iterdir())
        assert sum(file.endswith(".svg") for file in linked) <= 1


def test_files_that_pages_link_exist() -> None:
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            if target.startswith(("_generated/", "_tutorials/")):  # by the build
                continue
            assert (page.parent / target).exists(), (name(page), target)


def test_the_paper_cites_the_works_of_its_bibliography() -> None:
    keys = re.findall(r"^@\w+\{(\w+),", PAPER.with_suffix(".bib").read_text(), re.M)
    assert len(set(keys)) == len(keys)
    assert set(re.findall(r"@(\w+)", PAPER.read_text().split("---\n", 2)[2])) == set(keys)


def test_every_extra_is_in_the_page_on_installation() -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    listed = (DOCS / "install.md").read_text().split("## Extras")[1]
    assert set(re.findall(r"`(\w+)`", listed)) >= project["optional-dependencies"].keys()


def test_citation_and_changelog_have_the_version() -> None:
    """CITATION.cff names the software only: the pages of the methods name their papers."""
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((launch.ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert all(citation[key] for key in ("title", "message", "authors"))
    assert "references" not in citation
    changes = re.findall("^## (.*)", (launch.ROOT / "CHANGELOG.md").read_text(), re.M)
    released = next(name for name in changes if name != "Unreleased")
    assert citation["version"] == released == powergossip.__version__
