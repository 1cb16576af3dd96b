"""The files around the code: the map, the workflow, the citation, the forms and the bounds of the dependencies."""

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
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
PACKAGES = [ROOT / name / "pyproject.toml" for name in (".", "benchmarks")]
PACKAGES += sorted((ROOT / "integrations").glob("*/pyproject.toml"))
MAPS = {
    ROOT / folder: dict(line.split(maxsplit=1) for line in block.splitlines() if line.strip())
    for folder, block in re.findall(r"<!-- map of ([\w/-]+).*? -->\s+```\n(.*?)```", CONTRIBUTING, re.DOTALL)
}
"""Folder of a package -> each path on its map in CONTRIBUTING.md, which may hold a `*`, and what the map says of it."""


def _modules(package):
    """The modules of a package: an `__init__.py` is one if a function is defined in it."""
    paths = (path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    return {path for path in paths if path.name != "__init__.py" or "\ndef " in path.read_text(encoding="utf-8")}


@pytest.mark.parametrize("package", MAPS, ids=lambda package: package.name)
def test_the_map_names_every_module_and_no_other_in_a_few_words(package):
    assert len(MAPS) == len(PACKAGES)
    rows = MAPS[package]
    mapped = {path for pattern in rows for path in package.glob(pattern)}
    missing = [path.relative_to(package).as_posix() for path in sorted(_modules(package) - mapped)]
    assert not missing, "CONTRIBUTING.md, 'Where things are': add a line for each of\n" + "\n".join(missing)
    wrong = [pattern for pattern in rows if not any(package.glob(pattern))]
    assert not wrong, "CONTRIBUTING.md, 'Where things are': no such module; remove or rename\n" + "\n".join(wrong)
    wordy = [f"{path}  {about}" for path, about in rows.items() if not 1 <= len(about.split()) <= 8]
    assert not wordy, "CONTRIBUTING.md, 'Where things are': up to eight words, please\n" + "\n".join(wordy)


def test_what_the_questions_of_the_map_point_to_exists():
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", CONTRIBUTING, re.MULTILINE)
    assert len(rows) >= 25
    assert len({question for question, _ in rows}) == len(rows), "a question stands twice"
    wrong = []
    for question, answer in rows:
        quoted = re.findall(r"`([^`]+)`", answer)
        paths = [each for each in quoted if "/" in each or each.endswith(".py")]
        files = [path for each in paths for path in (PACKAGE / each, ROOT / each) if path.exists()]
        text = "".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
        wrong += [f"{question} {each}" for each in paths if not ((PACKAGE / each).exists() or (ROOT / each).exists())]
        defined = re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)
        wrong += [f"{question} {each}" for each in quoted if each.isidentifier() and each not in defined]
    assert not wrong, "CONTRIBUTING.md, 'Where is ...?': not found where it says\n" + "\n".join(wrong)


def test_the_workflow_calls_every_check_on_every_python_may_only_read_and_pins_its_actions():
    (path,) = WORKFLOWS
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
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


def test_every_check_of_ci_is_a_target_of_the_makefile():
    calls = re.findall(r"^ *(?:timed )?make (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert calls[:2] == ["demo", "test"], "CI begins as a newcomer does"
    words = shlex.split(" ".join(calls))
    environments = {word for word in words if word.startswith(".venv")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = {folder: name for name, folder in re.findall(r"^(\w+) \?= (\.venv\S*)$", makefile, re.MULTILINE)}
    assert environments
    for each in environments:
        folder, stamp = each.split("/")
        assert f"\n$({names[folder]})/{stamp}:" in makefile, each
    assert {word for word in words if "=" not in word} - environments <= TARGETS


@pytest.mark.parametrize("name", ["AGENTS.md", "CONTRIBUTING.md", "README.md"])
def test_every_command_in_a_document_is_a_target_of_the_makefile(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    called = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert called
    assert called <= TARGETS


def test_the_citation_is_of_this_version_and_names_the_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == invariant_rag.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    for arxiv in ("2502.08662", "2407.01100"):
        assert any(reference["url"].endswith(arxiv) for reference in citation["references"])


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_asks_of_it_and_a_bug_may_be_of_any_package(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"]) > 0
    assert {field["type"] for field in fields.values()} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields.values())
    if path.stem == "bug":
        names = [tomllib.loads(each.read_text(encoding="utf-8"))["project"]["name"] for each in PACKAGES]
        assert fields["package"]["attributes"]["options"] == names


def test_all_packages_have_the_version_of_the_core():
    assert len(PACKAGES) == 5
    major, minor = invariant_rag.__version__.split(".")[:2]
    for path in PACKAGES[1:]:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
        version = path.parent / settings["tool"]["hatch"]["version"]["path"]
        assert version.resolve() == PACKAGE / "__init__.py"
        assert "version" in settings["project"]["dynamic"]
        bounds = f">={major}.{minor},<{major}.{int(minor) + 1}"
        assert any(
            re.fullmatch(rf"invariant-rag(\[\w+\])?{re.escape(bounds)}", each)
            for each in settings["project"]["dependencies"]
        )
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{invariant_rag.__version__}]" in changelog
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{invariant_rag.__version__}]")


def test_the_lowest_version_of_every_dependency_is_known_and_its_tests_exist():
    script = [sys.executable, str(ROOT / ".ci" / "lowest.py")]
    constraints = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    extras = [each for name in ("retrieval", "plots", "evaluation") for each in PROJECT["optional-dependencies"][name]]
    assert [line.split("==")[0] for line in constraints] == [
        re.match(r"[\w.-]+", each)[0]
        for each in [*PROJECT["dependencies"], *extras]
        if not each.startswith("invariant-rag[")
    ]
    (listed,) = re.findall(r"^LOWEST_TESTS \?= ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    paths = listed.replace("\\", " ").split()
    assert paths
    missing = [each for each in paths if not (ROOT / each.partition("::")[0]).is_file()]
    assert not missing, "Makefile, LOWEST_TESTS: no such files"


# --- the table of threats ---

SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED_TESTS = sorted(set(re.findall(r"`((?:tests|integrations)/[\w/-]+\.py)::(\w+)`", SECURITY)))


def test_every_threat_names_a_test():
    rows = SECURITY.partition("## Threats and tests")[2].strip().splitlines()[2:]
    assert len(rows) >= 20
    assert len(NAMED_TESTS) >= 12
    assert not [row for row in rows if not re.fullmatch(r"\| .+ \| `(tests|integrations)/.*`.* \|", row)]


# --- what is guaranteed ---

GUARANTEES = tomllib.loads((ROOT / "tests" / "laws" / "guarantees.toml").read_text(encoding="utf-8"))["guarantee"]
EXCEPTIONS = [exception for each in GUARANTEES for exception in each.get("except", ())]
HOLDING = [*(test for each in GUARANTEES for test in each["tests"]), *(each["test"] for each in EXCEPTIONS)]


@pytest.mark.parametrize(("file", "name"), [*NAMED_TESTS, *(test.split("::") for test in HOLDING)])
def test_a_test_that_a_threat_or_a_guarantee_names_exists(file, name):
    assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
