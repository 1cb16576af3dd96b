"""Install the wheels of `dist` into an empty environment, as a user would, and run the examples of the documentation.

`--torch-index URL` says where torch comes from, if not from the package index.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
LARGEST = {
    "invariant_rag": 16,
    "invariant_rag_benchmarks": 1,
    "langchain_invariant_rag": 1,
    "llama_index_llms_invariant_rag": 1,
    "vllm_invariant_rag": 1,
}
"""Megabytes that a wheel may have; those of the core hold the embedded models, of which each has five."""
NEVER = re.compile(r"(^|/)(tests?|docs|cookbook|\.ci|\.github)/|\.ipynb$|__pycache__|\.pyc$|\.npz$")
COMMANDS = (["--version"], [], ["methods"], ["ask", "--check-order", "3"])
EXTRAS = ("faiss", "matplotlib", "scipy", "sentence_transformers")


def check_contents(wheel: Path) -> None:
    """Exit if a wheel is large, or holds what nobody needs who installs it."""
    size = wheel.stat().st_size / 2**20
    names = ZipFile(wheel).namelist()
    # The test kit for authors of methods is part of the package, as `invariant_rag/testing/`.
    wrong = [name for name in names if NEVER.search(name)]
    largest = LARGEST[wheel.name.split("-")[0]]
    sys.stdout.write(f"{wheel.name}: {size:.1f} MB, {len(names)} files\n")
    description = next(ZipFile(wheel).read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    if nowhere := re.findall(r"\]\((?!https?:|#)[^)]*\)|<img[^>]*>", description):
        sys.exit(f"{wheel.name}: expected links that lead somewhere on the package index, got {nowhere[:5]}")
    if size > largest or wrong or not any(name.endswith("py.typed") for name in names):
        sys.exit(f"{wheel.name}: expected at most {largest} MB, py.typed and none of {wrong[:5]}")


def run(*command: object, folder: Path, env: dict[str, str]) -> str:
    """Run a command in a folder and return what it prints; exit with its errors if it fails."""
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def examples(page: Path, *, skip: Sequence[str] = ()) -> str:
    """Return the code of a page, with the embedded model in the place of others, without blocks that hold a word."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(block for block in blocks if not any(word in block for word in skip))
    return re.sub(r'model="[^"]*", ', "", re.sub(r'from_pretrained\("[^"]*"(, )?', "from_pretrained(", code))


def main() -> None:
    """Check every wheel, install them, run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-index", default="")
    index = parser.parse_args().torch_index
    wheels = {wheel.name.split("-")[0]: wheel for wheel in sorted(DIST.glob("*.whl"))}
    if set(wheels) != set(LARGEST):
        sys.exit(f"{DIST}: expected wheels of {sorted(LARGEST)}, got {sorted(wheels)}; run `make wheel`")
    for wheel in wheels.values():
        check_contents(wheel)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        run(sys.executable, "-m", "venv", "venv", folder=folder, env=env)
        python, pip = folder / "venv/bin/python", [folder / "venv/bin/python", "-m", "pip", "install", "--quiet"]
        constraints = ["--constraint", ROOT / "constraints.txt"]
        if index:
            run(*pip, *constraints, "--index-url", index, "torch", folder=folder, env=env)
        run(*pip, *constraints, wheels["invariant_rag"], folder=folder, env=env)
        missing = f"import importlib.util as u; print([n for n in {EXTRAS!r} if u.find_spec(n)])"
        if (found := run(python, "-c", missing, folder=folder, env=env).strip()) != "[]":
            sys.exit(f"the core installs what belongs to extras: {found}")
        for command in COMMANDS:
            run(folder / "venv/bin/invariant-rag", *command, folder=folder, env=env)
            sys.stdout.write(f"invariant-rag {' '.join(command)}: works\n")
        run(*pip, *constraints, *wheels.values(), "langchain-classic", "llama-index-core", folder=folder, env=env)
        shutil.copytree(ROOT / "invariant_rag/cli/example_documents", folder / "handbook")
        pages = {ROOT / "README.md": (), ROOT / "docs/index.md": ()}
        pages |= dict.fromkeys([ROOT / "docs/tutorials/langchain.md", ROOT / "docs/tutorials/llamaindex.md"], ())
        for page, skip in pages.items():
            (folder / "example.py").write_text(examples(page, skip=skip), encoding="utf-8")
            run(python, "example.py", folder=folder, env=env)
            sys.stdout.write(f"{page.relative_to(ROOT)}: its code runs\n")
        imported = run(python, "-c", "import vllm_invariant_rag as v; print(v.__version__)", folder=folder, env=env)
        sys.stdout.write(f"vllm-invariant-rag {imported.strip()}: imported\n")


if __name__ == "__main__":
    main()
