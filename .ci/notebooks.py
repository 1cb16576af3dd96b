"""Execute the notebooks of the cookbook, none of which may take long; `--write` keeps what they print in their files.

A notebook is shown with its outputs by whoever hosts the repository, so one without any is refused.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

COOKBOOK = Path(__file__).parent.parent / "cookbook"
LIMIT = 300.0  # each takes less than a minute on two quiet cores
ELSEWHERE = {"09_serve_with_vllm.ipynb"}  # executed by `make test-vllm`; here if it is named, at $VLLM_URL
PATHS = re.compile(rf"{re.escape(str(COOKBOOK.parent))}/|/tmp/\w+/")


def run(path: Path, write: bool) -> str | None:
    """Execute a notebook; return what is wrong with it, if anything is."""
    notebook = nbformat.read(path, as_version=4)
    if not write and not any(cell.get("outputs") for cell in notebook.cells):
        return "it has no outputs: run `make notebook-outputs`"
    began = perf_counter()
    try:
        where = {"metadata": {"path": str(COOKBOOK)}}
        NotebookClient(notebook, timeout=int(LIMIT), coalesce_streams=True, resources=where).execute()
    except CellExecutionError as error:
        return str(error)
    seconds = perf_counter() - began
    print(f"{path.name}: {seconds:.0f} s", flush=True)  # noqa: T201 - a script
    if write:
        _keep_outputs(notebook, path)
    return f"it took {seconds:.0f} s, and {LIMIT:.0f} are allowed" if seconds > LIMIT else None


def _keep_outputs(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook with what its cells printed and drew; times and places of this machine are left out."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
        for output in cell["outputs"]:
            if "text" in output:
                output["text"] = PATHS.sub("", output["text"])
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = PATHS.sub("", data)
        if cell.cell_type != "code":
            del cell["outputs"]
    nbformat.write(notebook, path)


def main() -> None:
    """Run all of them, two at a time, and fail at the end if one did."""
    write, wanted = "--write" in sys.argv, [each for each in sys.argv[1:] if each != "--write"]
    found_here = sorted(COOKBOOK.glob("*.ipynb"))
    paths = [path for path in found_here if path.name in wanted or not (wanted or path.name in ELSEWHERE)]
    with ProcessPoolExecutor(2) as pool:
        found = pool.map(run, paths, [write] * len(paths))
        problems = dict(zip((path.name for path in paths), found, strict=True))
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if wrong or not problems:
        sys.exit("\n".join(wrong) or f"no notebook in {COOKBOOK}")


if __name__ == "__main__":
    main()
