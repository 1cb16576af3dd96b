"""Claims about what can be audited: our models, LangChain, LlamaIndex. And importing the audit imports none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from invariant_rag.evaluation.audit.call_plan import Call
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from invariant_rag import RAG, InvariantModel, Judge
from invariant_rag.cli import app
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.evaluation.audit import audit
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.remedies import CallSpec, SaltedOrdering, build_remedies
from invariant_rag.evaluation.audit.systems import as_system, describe_lm
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment
from tests.evaluation.audit.known import records

AS_IS = "as it is"
PAIRS = [{"question": f"q{n}", "segments": [f"good {n}", f"bad {n}"], "gold": 0, "pairwise": True} for n in range(4)]


@pytest.fixture(scope="module")
def plain(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="sequential")


def flips(result: Any, name: str = AS_IS) -> float:
    return float(result[name].measures["flip_rate"].value)


def test_importing_the_audit_loads_no_framework() -> None:
    code = "import invariant_rag.evaluation.audit, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.evaluation.audit" in loaded
    assert not {"torch", "transformers", "matplotlib", "langchain_core", "llama_index"} & set(loaded)


def test_a_model_of_ours_is_tried_with_methods(plain: InvariantModel) -> None:
    asked = [{name: each[name] for name in ("question", "segments")} for each in records(2, size=3)]
    result = audit(plain, asked, remedies=["sort", "rotor", "set-based"], repeats=1, max_new_tokens=3)
    # Random weights: the plain model feels the order, and methods that promise invariance keep it.
    assert flips(result) > 0
    for name in ("sort", "rotor", "set-based"):
        assert flips(result, name) == 0.0
    # A symmetric method does not feel a salted order either; one that reads segments in a row does.
    salted = {name: result[name].measures["salted_sensitivity"].value for name in ("sort", "set-based")}
    assert salted["set-based"] == 0.0 < salted["sort"]


def test_default_remedies_of_an_invariant_model_start_from_the_plain_one(plain: InvariantModel) -> None:
    result = audit(plain.with_method("rotor"), records(1, size=2), repeats=1, max_new_tokens=2)
    assert [each.name for each in result.measured] == [AS_IS, "plain", "sort", "vote", "pine"]
    assert flips(result) == 0.0


def test_default_remedies_leave_out_methods_that_a_model_refuses(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    class WithoutPINE(InvariantModel):
        def with_method(self, method: Any = None, **more: Any) -> Any:
            if getattr(method, "name", method) == "pine":
                raise UnsupportedCombination("this engine decodes with plain attention")
            return super().with_method(method, **more)

    result = audit(WithoutPINE(chat_llama, tokenizer), records(1, size=2), repeats=1, max_new_tokens=2)
    assert [each.name for each in result.measured] == [AS_IS, "plain", "sort", "vote"]


@pytest.mark.usefixtures("undrawn")
def test_a_model_that_was_loaded_anew_is_the_same_system(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for budget in (None, 0):  # the second time everything is answered already
        model = InvariantModel(chat_llama, tokenizer, method="pine")
        options = {"remedies": ["rotor"], "repeats": 1, "max_new_tokens": 2, "budget": budget, "out": tmp_path}
        assert audit(model, records(1, size=2), **options).unasked == 0


def test_a_rag_is_audited_with_what_its_retriever_finds(plain: InvariantModel) -> None:
    texts = ["a mill", "a ferry", "a bridge"]
    rag = RAG(plain, BM25Retriever([Segment(text) for text in texts]), k=2)
    result = audit(rag, [{"question": "ferry", "answer": "ferry"}], remedies=["rerank"], max_new_tokens=2)
    assert result.complete == 1
    assert flips(result, "rerank") == 0.0


@pytest.mark.usefixtures("undrawn")
def test_a_folder_keeps_answers_of_other_options_and_methods_apart(plain: InvariantModel, tmp_path: Path) -> None:
    asked = records(2, size=2)
    for tokens in (1, 3):
        found = audit(plain, asked, remedies=["rotor"], repeats=1, out=tmp_path, max_new_tokens=tokens)
        alone = audit(plain, asked, remedies=["rotor"], repeats=1, max_new_tokens=tokens)
        assert found["rotor"].measures["tokens"] == alone["rotor"].measures["tokens"]


def test_salts_leave_an_intervention_at_work() -> None:
    plain = InvariantModel.from_pretrained(method="sequential", ordering="lexical")
    steadied = plain.with_method(intervention="ms-poe")
    system = as_system(steadied, generation={"max_new_tokens": 4})
    _, askers = build_remedies(system, [], [])
    question = Question("Which?", tuple(map(Segment, ("one", "two", "three"))))
    for salt in ("", "salt"):
        chosen = steadied.with_method(ordering=SaltedOrdering(salt)) if salt else steadied
        said = askers[system.key](question, question.segments, salt).text
        assert said == chosen.generate(chosen.chat_prompt("Which?", question.segments), max_new_tokens=4).text
        assert chosen.intervention is not None
    assert describe_lm(steadied, None, {}) != describe_lm(plain, None, {})


def test_methods_are_tried_on_the_branch_of_a_routed_model_that_reads_by_a_method(plain: InvariantModel) -> None:
    routed = plain.with_method("rotor").with_routing(-2.0)
    found = audit(routed, records(2, size=3), remedies=["plain", "pine"], repeats=1, max_new_tokens=2)
    alone = audit(plain, records(2, size=3), remedies=["pine"], repeats=1, max_new_tokens=2)
    assert found["pine"].measures["tokens"] == alone["pine"].measures["tokens"]
    assert found["plain"].measures["flip_rate"] == alone[AS_IS].measures["flip_rate"]


def test_an_answer_that_is_no_unicode_spoils_no_report(tmp_path: Path) -> None:
    audit(lambda question, segments: segments[0].text + "\ud83d", records(2), out=tmp_path)
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "audit.json").exists()


def test_pairs_are_judged_by_letters_and_a_judge_is_a_system(plain: InvariantModel) -> None:
    result = audit(plain, PAIRS, remedies=["rotor"], repeats=1)
    assert result["rotor"].measures["position_consistency"].value == 1.0
    assert {"position_consistency", "preference_fairness", "accuracy"} <= set(result[AS_IS].measures)
    judged = audit(Judge(plain), PAIRS, remedies=[], repeats=1)
    assert judged[AS_IS].measures["position_consistency"].value == 1.0


def test_langchain_runnables_and_language_models_are_recognised() -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import RunnableLambda

    chain = RunnableLambda(lambda given: {"answer": given["context"][0].page_content, "seen": given["question"]})
    result = audit(chain, records(4))
    assert result[AS_IS].measures["slot_spread"].value == 1.0

    counted = RunnableLambda(
        lambda text: AIMessage(
            [{"type": "text", "text": "right0"}],
            usage_metadata={"input_tokens": len(text), "output_tokens": 1, "total_tokens": len(text) + 1},
        )
    )
    result = audit(counted, records(1), to_input=lambda question, segments: question)
    assert result[AS_IS].measures["accuracy"].value == 1.0
    assert result[AS_IS].measures["tokens"].value == len("What is number 0?") + 1

    assert flips(audit(FakeListChatModel(responses=["always"]), records(2))) == 0.0
    picks_a = audit(FakeListChatModel(responses=["[[A]]"]), PAIRS, remedies=[])
    assert picks_a[AS_IS].measures["preference_fairness"].value == -1.0


def test_a_chain_that_never_sees_the_documents_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.runnables import RunnableLambda

    calls = []

    def answer(given: dict[str, Any]) -> dict[str, str]:
        calls.append(given)
        return {"answer": given["question"]}

    blind = RunnableLambda(answer)
    for _ in range(2):
        with pytest.raises(AuditFailed, match="does not read the segments it is given") as refused:
            audit(blind, records(6), out=tmp_path)
        assert "combine chain" in refused.value.hint
    assert len(calls) == 6  # that of an audit goes on from its folder, too
    assert flips(audit(blind, records(6), to_input=lambda question, segments: {"question": question})) == 0.0
    calls.clear()
    with pytest.raises(AuditFailed, match="no question was asked in full"):
        audit(blind, records(6), budget=4)
    assert len(calls) == 4


def test_a_probe_refuses_no_chain_that_reads_its_documents() -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.runnables import RunnableLambda

    def right(given: dict[str, Any]) -> str:
        return next(each.page_content for each in given["context"] if "right" in each.page_content)

    assert flips(audit(RunnableLambda(right), records(4))) == 0.0  # it fails where no document is right
    assert flips(audit(RunnableLambda(lambda given: "I don't know."), records(4))) == 0.0


def test_names_and_keys_hold_all_that_an_answer_depends_on(plain: InvariantModel) -> None:
    short = plain.with_method(max_segment_tokens=50)
    assert describe_lm(short, None, {}) != describe_lm(plain, None, {})

    def asked(score: float | None) -> str:
        question = Question("q", (Segment("a", score=score), Segment("b")))
        return Call(question, CallSpec("system", (0, 1))).key

    assert len({asked(None), asked(0.5), asked(0.6)}) == 3
    assert asked(1) == asked(1.0)


def test_answers_end_before_a_stop_string(plain: InvariantModel) -> None:
    question = Question("Which?", (Segment("one"), Segment("two")))
    whole = as_system(plain, generation={"max_new_tokens": 6}).ask(question, question.segments).text
    stop = whole[2:4]
    cut = as_system(plain, generation={"max_new_tokens": 6, "stop_strings": stop}).ask(question, question.segments)
    assert cut.text == whole[: whole.index(stop)]


def test_llamaindex_llms_and_query_engines_are_recognised() -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.llms.mock import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    # The mock says its prompt again, so whatever is listed first changes its answer.
    echo = audit(MockLLM(), records(2))
    assert echo[AS_IS].measures["wording_rate"].value == 1.0
    assert echo[AS_IS].measures["accuracy"].value == 1.0
    assert flips(echo) == 0.0  # it is right in every order, in other words

    class Found(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            found = [f"{query_bundle.query_str} {number}" for number in range(3)]
            return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in found]

    class First(BaseSynthesizer):
        def _get_prompts(self) -> dict[str, Any]:
            return {}

        def _update_prompts(self, prompts: Any) -> None:
            pass

        def get_response(self, query_str: str, text_chunks: Any, **kwargs: Any) -> str:
            return str(text_chunks[0])

        async def aget_response(self, query_str: str, text_chunks: Any, **kwargs: Any) -> str:
            return str(text_chunks[0])

    engine = RetrieverQueryEngine(Found(), First(llm=MockLLM()))
    result = audit(engine, [{"question": "q", "answer": "q 1"}])
    assert result[AS_IS].measures["slot_spread"].value == 1.0
    assert {each.name for each in result.measured} == {
        AS_IS,
        "sort",
        "rerank",
        "top-3",
        "long-context-reorder",
        "vote",
    }
    with pytest.raises(UnsupportedCombination, match="to_input"):
        audit(engine, records(1), to_input=lambda question, segments: question)


def test_the_command_writes_a_folder_and_goes_on_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out"
    questions.write_text("\n".join(json.dumps(each) for each in records(3)))
    (tmp_path / "mine_to_audit.py").write_text("def first(question, segments):\n    return segments[0].text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["audit", str(questions), "--out", str(out), "--system", "mine_to_audit:first"]
    part = CliRunner().invoke(app, [*command, "--budget", "60", "--json"])
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["complete"] == 1
    whole = CliRunner().invoke(app, command)
    assert whole.exit_code == 0, whole.output
    assert "3 questions asked" in whole.stdout
    assert json.loads((out / "audit.json").read_text())["advice"]["headline"] in whole.stdout
    assert {path.name for path in out.iterdir()} == {
        "answers.jsonl",
        "answers.jsonl.lock",
        "audit.json",
        "plots",
        "report.html",
        "report.md",
    }
    wrong = CliRunner().invoke(app, [*command[:-1], "mine_to_audit:last"])
    assert wrong.exit_code == 2
    assert "no attribute 'last'" in wrong.stderr


def test_the_command_audits_a_model_of_ours(tmp_path: Path) -> None:
    questions = tmp_path / "questions.csv"
    questions.write_text("question,segment,answer\nWho?,Ann did.,Ann\nWho?,Bo did not.,\n")
    options = ["--method", "rotor", "--remedy", "sort", "--repeats", "1", "--max-new-tokens", "2", "--json"]
    run = CliRunner().invoke(app, ["audit", str(questions), "--out", str(tmp_path / "out"), *options])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert "(rotor, Lexical()" in found["system"]
    assert found["measured"][0]["measures"]["flip_rate"]["value"] == 0.0
