"""The workflows of GitHub: what they run exists, actions are pinned, and the site is published."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.launch import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()))


def test_the_oldest_versions_are_tested() -> None:
    matrix = read("ci")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    oldest = matrix["include"][0]["torch"]
    assert f"torch>={oldest}" in PROJECT["dependencies"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_targets_exist_and_actions_are_pinned(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for uses in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"\./\S+|\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", uses), uses
    for job in workflow["jobs"].values():
        for command in [step["run"] for step in job.get("steps", []) if "run" in step]:
            for targets in re.findall(r"^make ([a-z ]+)$", command, re.M):
                for target in targets.split():
                    assert re.search(rf"^{target}:", makefile, re.M), target
            for script in re.findall(r"bash (\S+\.sh)", command):
                assert (ROOT / script).exists(), script


def test_a_site_is_published_beside_other_versions(tmp_path: Path) -> None:
    def git(*arguments: str | Path) -> str:
        return subprocess.check_output(["git", *arguments], cwd=tmp_path / "clone", text=True)

    subprocess.run(["git", "init", "--quiet", "--bare", tmp_path / "remote"], check=True)
    subprocess.run(["git", "clone", "--quiet", "remote", "clone"], cwd=tmp_path, check=True)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "main")
    site = tmp_path / "site"
    site.mkdir()
    for version, text in (
        ("v1.0.0", "first"),
        ("v1.10.0", "a"),
        ("v1.2.0", "b"),
        *2 * (("v1.10.0", "c"),),
    ):
        (site / "index.html").write_text(text)
        script = ROOT / "docs" / "publish.sh"
        subprocess.run(["bash", script, site, version], cwd=tmp_path / "clone", check=True)
    git("fetch", "--quiet", "origin", "gh-pages")
    files = git("ls-tree", "-r", "--name-only", "FETCH_HEAD").splitlines()
    assert files == [
        ".nojekyll",
        "index.html",
        *(f"{version}/index.html" for version in ("v1.0.0", "v1.10.0", "v1.2.0")),
    ]
    listed = re.findall('href="(.*?)/"', git("show", "FETCH_HEAD:index.html"))
    assert listed == ["v1.10.0", "v1.2.0", "v1.0.0"]
    assert git("show", "FETCH_HEAD:v1.0.0/index.html") == "first"
    assert git("show", "FETCH_HEAD:v1.10.0/index.html") == "c"
