"""README and documentation are true: their code runs, their links lead somewhere, their tables and figures are ours."""

import json
import re
import shutil
import tomllib

import pytest
import yaml

from invariant_rag import audit
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import ORDERINGS
from tests.test_project import ROOT, found, read

DOCS = ROOT / "docs"
ELSEWHERE = {f"docs/tutorials/{name}.md" for name in ("langchain", "llamaindex", "vllm", "server")}  # run there
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


PAGES = {path: read(path) for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
README = PAGES[ROOT / "README.md"]
RUN = [page for page, text in PAGES.items() if CODE.search(text) and name_of(page) not in ELSEWHERE]
OTHERS = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "cookbook/**/*.md", "cookbook/*.ipynb")
LINKED = [*PAGES, *(path for each in (*OTHERS, "integrations/*/README.md") for path in ROOT.glob(each))]


def blocks(page):
    """The blocks of Python of a page, with the embedded model in the place of every other."""
    code = [re.sub(r'from_pretrained\("[^"]*"(, )?', "from_pretrained(", block) for block in CODE.findall(PAGES[page])]
    return [re.sub(r'model="[^"]*", ', f"model={str(EMBEDDED['generator'])!r}, ", block) for block in code]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    assert len(RUN) >= 12
    shutil.copytree(EXAMPLE_DOCUMENTS, tmp_path / "handbook")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for block in blocks(page):
        if "langchain_invariant_rag" in block or "llama_index" in block:
            continue  # README.md: tests of these packages run them
        exec(compile(block, page.name, "exec"), namespace)
        said = found(r"^print\(.*\)  # (.*)", block)
        assert {*said} <= {*capsys.readouterr().out.splitlines()}


def anchors(path):
    """The anchors of a page, as GitHub and the site make them of its headings."""
    headings = found(r"^#+ (.+)$", read(path).lower())
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_all_code_of_a_page_compiles_and_every_link_within_the_repository_leads_somewhere(page):
    text = read(page)
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for block in blocks(page) if page in PAGES else ():
        compile(block, page.name, "exec")
    wrong = []
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", NO_PROSE.sub("", text)):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            wrong.append(target)
    assert not wrong, f"{name_of(page)}: {wrong}"


def test_every_page_is_in_the_navigation_and_the_site_loads_nothing_from_elsewhere():
    def paths(entry):
        if isinstance(entry, str):
            return [entry]
        below = entry.values() if isinstance(entry, dict) else entry
        return [path for each in below for path in paths(each)]

    site = yaml.safe_load(read("mkdocs.yml"))
    assert {*paths(site["nav"])} == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert site["theme"]["font"] is False
    assert "offline" not in site["plugins"]  # every page would load a script from unpkg.com
    (search,) = (each["search"] for each in site["plugins"] if "search" in each)
    for text, word in (("(quantized) weights", "quantized"), ("read `.pdf` files", "pdf")):
        assert word in re.split(search["separator"], text)
    _, front, _ = read("docs/changelog.md").split("---", 2)
    assert yaml.safe_load(front) == {"search": {"exclude": True}}


def test_what_users_search_for_is_said_where_it_belongs():
    for page, words in (
        ("how-to/install.md", ("Windows", "macOS", "Apple Silicon", "MPS", "AMD", "ROCm")),
        ("reference/models.md", ("DeepSeek", "Multimodal", "Images", "GGUF")),
        *(("tutorials/server.md", ["Ollama"]), ("how-to/solve-problems.md", ["Haystack"])),
    ):
        for word in words:
            about = [each for each in re.split(r"\n(?=[-#*] |\n)", PAGES[DOCS / page]) if word in each]
            assert any("ot tried" in each or "refused" in each for each in about), (word, about)
    headings = {"gated-model", "out-of-memory", "prompt-too-long", "package-not-installed"}
    assert headings <= anchors(DOCS / "how-to" / "solve-problems.md")


def test_the_report_that_the_tutorial_shows_is_the_report(tmp_path):
    text = read("docs/tutorials/audit.md")
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    names = {"__name__": "__main__"}
    exec(CODE.findall(text)[0].partition("\n\nfor system in")[0], names)
    audit(names["first"], names["questions"], out=tmp_path / "audit")
    report = re.sub(r"\\|\*\*", "", (tmp_path / "audit" / "report.md").read_text(encoding="utf-8"))
    lines = shown.strip().split("\n\n")
    assert len(lines) >= 5
    assert not [line for line in lines if line.strip() not in report]


def test_every_figure_is_drawn_by_a_script_and_fits_a_phone_or_scrolls():
    scripts, drawn = ({path.stem for path in (DOCS / "figures").glob(suffix)} for suffix in ("*.py", "*.svg"))
    assert drawn
    assert {name for name in drawn if not name.startswith((*(scripts - {"style"}),))} == set()
    assert {name for name in drawn if f"figures/{name}.svg" not in "".join(PAGES.values())} == set()
    assert "two_orders.svg){ .fits " in read("docs/index.md")
    assert re.findall(r"img:only-child([^) {]*\)?)", read("docs/style.css")) == [":not(.fits)", ":not(.fits)"]


# --- the README, and the description on the package index that the build makes of it ---


def test_the_description_on_the_package_index_has_no_link_within_the_repository():
    hook = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = ""
    for each in hook["fragments"]:
        part = each.get("text") or read(each["path"])
        part = part[part.index(each["start-at"]) :] if "start-at" in each else part
        text += part[: part.index(each["end-before"])] if "end-before" in each else part
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    prose = NO_PROSE.sub("code", text)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert len(links) >= 4
    assert all(each.startswith("https://arxiv.org/") for each in links)
    assert "<img" not in text
    assert "(Llama, Qwen, Mistral, Gemma, more)" in text  # the words of a link stay
    assert not re.search(r"\(\s*\)|\s[.,;:](\s|$)|\([^)]*$", prose)  # what the removed links would leave behind


def test_the_readme_is_one_screen_and_its_figures_have_their_conditions():
    assert len(README.partition("\n## More")[0].split()) <= 600
    prose = re.sub(r"```.*?```|<img[^>]*>", "", README, flags=re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 600
    for each in ("two_orders.svg", "lab.png", "vllm serve", "langchain_invariant_rag", "@software", "reproduce"):
        assert each in README
    before = README.split("```python")[0]
    assert "pip install invariant-rag" in before
    assert "whl/cpu" in before
    rows = found(r"^\| (.+) \| (.+) \|$", README.split("## Four figures")[1].split("\n## ")[0])[1:]
    assert len(rows) == 4
    assert all(re.search(r"\d\.\d", figure) and re.search(r"\]\(.+\)", conditions) for figure, conditions in rows), rows


def test_every_method_intervention_and_ordering_has_its_row_and_every_recommended_one_exists():
    tables = read("docs/reference/methods.md")
    assert not [name for name in (*METHODS, *INTERVENTIONS, *ORDERINGS) if f"| `{name}` |" not in tables]
    rows = found(r"^\|.*\|$", read("docs/how-to/choose-a-method.md"))
    chosen = " ".join(row.split(" | ")[1] for row in rows)
    named = set(re.findall(r"`([a-z-]+)`", chosen)) - {"canonical", "vote", "lexical"}
    assert {"rotor", "pine", "sequential"} <= named <= set(METHODS)


def test_the_gpu_memory_that_is_named_is_the_arithmetic_that_is_named():
    rows = found(r"^\| (\S+?-Instruct \| [\d.]+ \| .*) \|$", read("docs/how-to/install.md"))
    assert rows
    for row in rows:
        _, billions, shape, width, *named = row.replace(",", "").split(" | ")
        layers, heads, size = map(int, shape.split(" × "))
        token = 2 * layers * heads * size * 2
        prompt, work = (round(5000 * each / 1e9, 2) for each in (token, 3 * int(width) * 2))
        assert named == [f"{float(billions) * 2:.1f} GB", f"{token} bytes", f"{prompt:.2f} GB", f"{work:.2f} GB"]
