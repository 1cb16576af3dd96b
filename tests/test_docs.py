"""The documentation is true: its code runs, its links lead somewhere, its figures have scripts."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from invariant_rag import audit
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS
from invariant_rag.models.embedded import EMBEDDED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {
    "tutorials/langchain.md",
    "tutorials/llamaindex.md",
    "tutorials/vllm.md",
    "tutorials/server.md",
}  # tests of these packages run them
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
RUN = [page for page in PAGES if CODE.search(page.read_text(encoding="utf-8"))]
RUN = [
    page for page in RUN if page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix() not in ELSEWHERE
]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "cookbook").rglob("*.md")),
    *sorted((ROOT / "integrations").glob("*/README.md")),
    *sorted((ROOT / "cookbook").glob("*.ipynb")),
]


def blocks(page: Path) -> list[str]:
    """The blocks of Python of a page, with the embedded model in the place of every other."""
    text = page.read_text(encoding="utf-8")
    code = [re.sub(r'from_pretrained\("[^"]*"(, )?', "from_pretrained(", block) for block in CODE.findall(text)]
    return [re.sub(r'model="[^"]*", ', f"model={str(EMBEDDED['generator'])!r}, ", block) for block in code]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE_DOCUMENTS, tmp_path / "handbook")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if "langchain_invariant_rag" in block or "llama_index" in block:
            continue  # README.md: tests of these packages run them
        exec(compile(block, page.name, "exec"), namespace)
        said = re.findall(r"^print\(.*\)  # (.*)", block, re.MULTILINE)
        assert {*said} <= {*capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_all_code_of_a_page_compiles(page: Path) -> None:
    for block in blocks(page):
        compile(block, page.name, "exec")


def test_there_is_code_to_run() -> None:
    assert len(RUN) >= 12


def anchors(path: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them of its headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            wrong.append(target)
    assert not wrong, f"{page.relative_to(ROOT)}: {wrong}"


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the file of MkDocs, which may hold tags of Python."""

    def paths(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        below = entry.values() if isinstance(entry, dict) else entry
        return [path for each in below for path in paths(each)]

    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    assert {*paths(navigation)} == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_pages_of_the_site_load_nothing_from_elsewhere() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["theme"]["font"] is False
    assert "offline" not in settings["plugins"]  # every page would load a script from unpkg.com


@pytest.mark.parametrize(("text", "word"), [("(quantized) weights", "quantized"), ("read `.pdf` files", "pdf")])
def test_the_search_of_the_site_finds_words_beside_signs(text: str, word: str) -> None:
    (search,) = (
        each["search"]
        for each in yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["plugins"]
        if "search" in each
    )
    assert word in re.split(search["separator"], text)


@pytest.mark.parametrize(
    ("word", "page"),
    [
        *((word, "how-to/install.md") for word in ("Windows", "macOS", "Apple Silicon", "MPS", "AMD", "ROCm")),
        *((word, "reference/models.md") for word in ("DeepSeek", "Multimodal", "Images", "GGUF")),
        ("Ollama", "tutorials/server.md"),
        ("Haystack", "how-to/solve-problems.md"),
    ],
)
def test_what_users_search_for_is_said_where_it_belongs(word: str, page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    about = [each for each in re.split(r"\n(?=[-#*] |\n)", text) if word in each]
    assert any("ot tried" in each or "refused" in each for each in about), about


def test_troubleshooting_has_a_heading_for_each_error_that_a_first_user_meets() -> None:
    page = anchors(DOCS / "how-to" / "solve-problems.md")
    assert {"gated-model", "out-of-memory", "prompt-too-long", "package-not-installed"} <= page


def test_a_figure_that_fits_a_phone_is_not_made_to_scroll() -> None:
    assert "two_orders.svg){ .fits " in (DOCS / "index.md").read_text(encoding="utf-8")
    rules = re.findall(r"img:only-child([^) {]*\)?)", (DOCS / "style.css").read_text(encoding="utf-8"))
    assert rules == [":not(.fits)", ":not(.fits)"]


def test_the_report_that_the_tutorial_shows_is_the_report(tmp_path: Path) -> None:
    text = (DOCS / "tutorials" / "audit.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CODE.findall(text)[0].partition("\n\nfor system in")[0], names)
    audit(names["first"], names["questions"], out=tmp_path / "audit")
    report = re.sub(r"\\|\*\*", "", (tmp_path / "audit" / "report.md").read_text(encoding="utf-8"))
    lines = shown.strip().split("\n\n")
    assert len(lines) >= 5
    assert [line.strip() for line in lines if line.strip() not in report] == []


def test_every_figure_of_the_documentation_is_drawn_by_a_script() -> None:
    scripts = {path.stem for path in (DOCS / "figures").glob("*.py")} - {"style"}
    drawn = {path.stem for path in (DOCS / "figures").glob("*.svg")}
    assert drawn
    assert {name for name in drawn if not any(name.startswith(script) for script in scripts)} == set()
    used = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for name in drawn if f"figures/{name}.svg" not in used} == set()


def test_the_changelog_does_not_stand_before_the_guides_in_the_search() -> None:
    _, front, _ = (DOCS / "changelog.md").read_text(encoding="utf-8").split("---", 2)
    assert yaml.safe_load(front) == {"search": {"exclude": True}}


def described() -> str:
    """The description on the package index, as the build makes it of README.md."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    text = ""
    for each in hook["fancy-pypi-readme"]["fragments"]:
        part = each.get("text") or (ROOT / each["path"]).read_text(encoding="utf-8")
        part = part[part.index(each["start-at"]) :] if "start-at" in each else part
        text += part[: part.index(each["end-before"])] if "end-before" in each else part
    for each in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_the_description_on_the_package_index_has_no_link_within_the_repository() -> None:
    text = described()
    prose = re.sub(r"```.*?```|`[^`\n]*`", "code", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert len(links) >= 4
    assert all(each.startswith("https://arxiv.org/") for each in links)
    assert "<img" not in text
    assert not re.search(r"\(\s*\)|\s[.,;:](\s|$)|\([^)]*$", prose)  # what the removed links would leave behind


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.partition("\n## More")[0].split()) <= 600
    for each in (
        "two_orders.svg",
        "lab.png",
        "whl/cpu",
        "vllm serve",
        "langchain_invariant_rag",
        "@software",
        "reproduce",
    ):
        assert each in text
