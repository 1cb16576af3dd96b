"""What the package brings and leaves out, and the code of its README and tutorial, which runs as it is."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import langchain_invariant_rag

README = Path(__file__).parent.parent / "README.md"
ROOT = README.parents[2]
CODE = """
import sys, warnings
for name in ("xgrammar", "langchain", "langchain_classic", "llama_index", "langgraph"):
    sys.modules[name] = None  # an import of it fails
import langchain_invariant_rag as ours
from invariant_rag.errors import ExtraRequired, ToyModelWarning
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
warnings.simplefilter("ignore", ToyModelWarning)
assert "torch" not in sys.modules

class Listed(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document("Ostra has a red flag."), Document("Ostra lies on the Senn.")]

context = Listed() | (lambda found: " ".join(each.page_content for each in found))
ChatInvariant = ours.ChatInvariant
made_later = lambda asked: ChatInvariant(max_tokens=2).invoke(asked)  # after the retriever has run
chain = {"context": context} | ChatPromptTemplate.from_template("{context} So?") | made_later
assert [chain.invoke("Which flag?").response_metadata["sets"] for _ in range(2)] == [[2], [2]]

missing = {"InvariantRAGMiddleware": "agents"}
for name in ours.__all__:
    if name not in missing:
        getattr(ours, name)
for name, extra in missing.items():
    try:
        getattr(ours, name)
    except ExtraRequired as error:
        assert f'pip install "langchain-invariant-rag[{extra}]"' in str(error), error
    else:
        raise AssertionError(name)
chat = ours.ChatInvariant(max_tokens=2)
try:
    chat.with_structured_output({"title": "A", "type": "object", "properties": {}}).invoke("hello")
except ExtraRequired as error:
    assert 'pip install "invariant-rag[structured]"' in str(error)
else:
    raise AssertionError("structured output without xgrammar")
assert chat.lm.model is ours.InvariantLLM(method="pine").lm.model
"""


def test_extras_are_optional_and_say_what_to_install_and_the_first_call_of_a_process_is_as_good_as_the_second():
    subprocess.run([sys.executable, "-W", "error", "-c", CODE], check=True)


def test_it_requires_langchain_core_and_nothing_of_other_frameworks_and_has_every_public_name():
    always = [line for line in requires("langchain-invariant-rag") or [] if "extra ==" not in line]
    assert sorted(re.split("[<>=]", line)[0] for line in always) == ["invariant-rag", "langchain-core"]
    assert {*langchain_invariant_rag.__all__} == {*dir(langchain_invariant_rag), "__version__"}
    assert all(hasattr(langchain_invariant_rag, name) for name in langchain_invariant_rag.__all__)


def code_of(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_the_readme_and_of_the_tutorial_runs_and_prints_what_it_says(
    capsys,
):
    blocks, tutorial = code_of(README), code_of(ROOT / "docs" / "tutorials" / "langchain.md")
    assert (len(blocks), bool(tutorial)) == (4, True)
    for document in (blocks, tutorial):
        names = {}
        for block in document:  # the embedded model takes the place of a large one
            code = block.replace('\nchat = ChatInvariant(model="Qwen/Qwen2.5-7B-Instruct")', "\nchat = ChatInvariant()")
            exec(code.replace("chat.with", "parsed = chat.with") if document is blocks else code, names)
            said = re.findall(r"^print\(.*\)  # (.*)", block, re.MULTILINE)
            printed = capsys.readouterr().out.splitlines()
            assert printed[: len(said)] == said
            assert document is tutorial or printed == said
        assert document is tutorial or isinstance(names["parsed"], names["Flag"])


def test_the_code_for_langchain_in_the_readme_of_the_project_runs(capsys):
    ours = [code for code in code_of(ROOT / "README.md") if "langchain_invariant_rag" in code]
    assert ours
    for code in ours:
        exec(code.replace('model="Qwen/Qwen2.5-7B-Instruct", ', ""), {})
    assert capsys.readouterr().out.endswith(" True\n")
