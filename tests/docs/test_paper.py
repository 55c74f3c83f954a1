"""paper/paper.md cites its bibliography, and its numbers are those of reports."""

import re

from tests.harness.launch import ROOT

TEXT = (ROOT / "paper" / "paper.md").read_text()
BODY = TEXT.split("---\n", 2)[2]
REFERENCES = (ROOT / "paper" / "paper.bib").read_text()


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
