"""docs/architecture.md names every module, and leads to files that exist."""

import re

from product_tree import ROOT, load_tool, module_name, package_dirs, tracked_files

PAGE = ROOT / "docs/architecture.md"


def test_every_tracked_module_has_its_line() -> None:
    tool, packages = load_tool("module_map"), package_dirs()
    listed = dict(re.findall(r"^- `([\w/.]+)` (.+)$", PAGE.read_text(), re.M))
    wanted = {
        str(path): tool.first_line(ROOT / path)
        for path in tracked_files()
        if path.name != "__init__.py" and (module_name(path, packages) or "specla.v1").split(".")[1] != "v1"
    }
    wrong = [path for path, line in wanted.items() if listed.get(path) != line]
    assert wrong == [], "run `make module-map`"


def test_links_lead_somewhere() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    lost = []
    for page in pages:
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
        lost += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert lost == []
