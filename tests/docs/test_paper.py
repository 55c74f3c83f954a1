"""paper/paper.md has the form of the Journal of Open Source Software."""

import re

import yaml

from tests.harness.launch import ROOT

TEXT = (ROOT / "paper" / "paper.md").read_text()
_, HEADER, BODY = TEXT.split("---\n", 2)
REFERENCES = (ROOT / "paper" / "paper.bib").read_text()


def test_required_sections_are_there() -> None:
    assert re.findall("^# (.*)", BODY, re.M) == [
        "Summary",
        "Statement of need",
        "State of the field",
        "Software design",
        "Research impact statement",
        "AI usage disclosure",
        "Acknowledgements",
        "References",
    ]
    header = yaml.safe_load(HEADER)
    assert header["bibliography"] == "paper.bib"
    assert all(header[key] for key in ("title", "tags", "authors", "affiliations", "date"))


def test_length_is_in_range() -> None:
    assert 750 <= len(re.sub(r"`.*?`|\[@.*?\]", "", BODY, flags=re.DOTALL).split()) <= 1750


def test_cited_works_are_those_of_the_bibliography() -> None:
    keys = re.findall(r"^@\w+\{(\w+),", REFERENCES, re.M)
    assert len(set(keys)) == len(keys)
    assert set(re.findall(r"@(\w+)", BODY)) == set(keys)


def test_numbers_are_those_of_the_reports_named_beside_them() -> None:
    checked = 0
    for item in re.split(r"\n(?=- )", BODY):
        for name in re.findall(r"experiments run\s+(\w+)", item):
            folder = ROOT / "docs" / "results" / name
            report = "".join(p.read_text() for p in (folder / "report.md", *folder.glob("*.csv")))
            for number in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", item.split("(`python")[0]):
                assert number in report, (name, number)
                checked += 1
    assert checked >= 6
