"""The budget of every room, in lines of Python: what grows past it gives something back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = "invariant_rag"
BUDGETS = {  # and what the paths of a room begin with
    "files of the core itself": (2_600, rf"{CORE}/[^/]+$"),
    "methods and what is around them": (3_000, f"{CORE}/(methods|interventions|ensembles|orderings)/"),
    "attention": (2_800, f"{CORE}/attention/"),
    "prompts": (1_900, f"{CORE}/prompts/"),
    "generation": (4_000, f"{CORE}/generation/"),
    "models and RAG": (1_400, f"{CORE}/(models|rag)/"),
    "audit": (3_000, f"{CORE}/audit/"),
    "server": (4_200, f"{CORE}/server/"),
    "command line": (1_100, f"{CORE}/cli/"),
    "testing": (1_200, f"{CORE}/testing/"),
    "benchmarks": (3_000, "benchmarks/invariant_rag_benchmarks/"),
    "LangChain": (2_200, "integrations/langchain/langchain_invariant_rag/"),
    "LlamaIndex": (2_100, "integrations/llama-index/llama_index/"),
    "vLLM": (1_600, "integrations/vllm/vllm_invariant_rag/"),
    "all tests": (22_000, "((benchmarks|integrations/[^/]+)/)?tests/"),
    "everything": (62_000, ""),
}


@pytest.fixture(scope="module")
def used():
    """Lines of Python of every room, of the files that git tracks, and the table of all rooms, printed."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no working tree of git")
    lines = {each: (ROOT / each).read_bytes().count(b"\n") for each in listed.stdout.split() if (ROOT / each).is_file()}
    found = {
        room: sum(count for name, count in lines.items() if re.match(place, name))
        for room, (_, place) in BUDGETS.items()
    }
    print("\n".join(f"{room:<30}{found[room]:>8,} of {budget:>7,}" for room, (budget, _) in BUDGETS.items()))  # noqa: T201
    return found


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_is_within_its_budget(used, room):
    assert 0 < used[room] <= BUDGETS[room][0]
