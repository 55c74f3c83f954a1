"""Dotted names in docstrings and docs, such as `network.Network`, point to something."""

import ast
import re
import sys

from tests.harness import launch

SOURCES = [*launch.ROOT.glob("*.py"), *launch.ROOT.glob("powergossip/**/*.py")]
TREES = {path.relative_to(launch.ROOT): ast.parse(path.read_text()) for path in SOURCES}
PAGES = [page for page in launch.ROOT.glob("docs/**/*.md") if page.name != "published.md"]
PACKAGES = "|".join(path.parent.name for path in TREES if path.name == "__init__.py")
ENDINGS = "py|md|json|jsonl|yaml|txt|html|svg|png|c|h|out"
ELSEWHERE = {"torch", "np", "scipy", "package", "ddp", "p", "key", *sys.stdlib_module_names}


def references(first: str, text: str) -> set[str]:
    name = rf"""(?<![\w.@/"'-]){first}(?:\.(?!(?:{ENDINGS})\b)[A-Za-z_]\w*)+(?![\w/]|\.\w)"""
    return {found for found in re.findall(name, text) if found.split(".")[0] not in ELSEWHERE}


def test_every_reference_points_to_something() -> None:
    known, pointed = set[str](), set[str]()
    for path, tree in TREES.items():
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for scope, body in [(module, tree), *((f"{module}.{c.name}", c) for c in classes)]:
            for node in ast.walk(body):  # what it defines and imports, and attributes in its code
                name = [getattr(node, field, None) for field in ("asname", "name", "id")]
                known |= {module, f"{scope}.{next(filter(None, name), '')}"}
                if isinstance(node, ast.Attribute):
                    known.add(ast.unparse(node))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    pointed |= references(r"[a-z_]\w*", str(node.value.value))
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        pointed |= references(f"(?:{PACKAGES})", text)
    suffixes = {name[dot.end() :] for name in known for dot in re.finditer(r"^|\.", name)}
    assert sorted(pointed - suffixes) == []
