"""Execute the notebooks of the cookbook; they are kept without outputs, and none of them may take long."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

COOKBOOK = Path(__file__).parent.parent / "cookbook"
LIMIT = 300.0  # each takes less than a minute on two quiet cores
ELSEWHERE = {"09_serve_with_vllm.ipynb"}  # `make test-vllm` executes it, in an environment with vLLM


def run(path: Path) -> str | None:
    """Execute a notebook; return what is wrong with it, if anything is."""
    notebook = nbformat.read(path, as_version=4)
    if any(cell.get("outputs") for cell in notebook.cells):
        return "it holds outputs: clear them before committing"
    began = perf_counter()
    try:
        NotebookClient(notebook, timeout=int(LIMIT), resources={"metadata": {"path": str(COOKBOOK)}}).execute()
    except CellExecutionError as error:
        return str(error)
    seconds = perf_counter() - began
    print(f"{path.name}: {seconds:.0f} s", flush=True)  # noqa: T201 - a script
    return f"it took {seconds:.0f} s, and {LIMIT:.0f} are allowed" if seconds > LIMIT else None


def main() -> None:
    """Run all of them, two at a time, and fail at the end if one did."""
    paths = [path for path in sorted(COOKBOOK.glob("*.ipynb")) if path.name not in ELSEWHERE]
    with ProcessPoolExecutor(2) as pool:
        problems = dict(zip((path.name for path in paths), pool.map(run, paths), strict=True))
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if wrong or not problems:
        sys.exit("\n".join(wrong) or f"no notebook in {COOKBOOK}")


if __name__ == "__main__":
    main()
