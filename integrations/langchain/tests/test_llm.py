"""InvariantLLM: six entry points, each with stop, callbacks, cache and tracing parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.prompts import parse_marked
from langchain_core.callbacks import BaseCallbackHandler

from langchain_invariant_rag import InvariantLLM, Segments

from .shared import DOCUMENTS, QUESTION

PROMPT = f"{Segments(DOCUMENTS)}{QUESTION}"


async def _collected(stream: Any) -> list[str]:
    return [piece async for piece in stream]


Entry = Callable[..., str]
ENTRIES: dict[str, Entry] = {
    "invoke": lambda llm, prompt, config=None, **kw: llm.invoke(prompt, config, **kw),
    "ainvoke": lambda llm, prompt, config=None, **kw: asyncio.run(llm.ainvoke(prompt, config, **kw)),
    "batch": lambda llm, prompt, config=None, **kw: llm.batch([prompt, "x"], config, **kw)[0],
    "abatch": lambda llm, prompt, config=None, **kw: asyncio.run(llm.abatch([prompt, "x"], config, **kw))[0],
    "stream": lambda llm, prompt, config=None, **kw: "".join(llm.stream(prompt, config, **kw)),
    "astream": lambda llm, prompt, config=None, **kw: "".join(
        asyncio.run(_collected(llm.astream(prompt, config, **kw)))
    ),
}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@pytest.fixture(scope="module")
def llm(lm: InvariantModel) -> InvariantLLM:
    return InvariantLLM(model=lm, max_tokens=12)


@pytest.fixture(scope="module")
def expected(lm: InvariantModel) -> str:
    return lm.generate(parse_marked(PROMPT), max_new_tokens=12).text


class Recorded(BaseCallbackHandler):
    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.tokens = ""
        self.results: list[Any] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts += prompts
        self.parameters = kwargs["invocation_params"]

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens += token

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.results.append(response)


@every_entry
def test_every_entry_returns_what_the_lm_generates_and_tells_callbacks(
    llm: InvariantLLM, expected: str, entry: Entry
) -> None:
    handler = Recorded()
    assert entry(llm, PROMPT, {"callbacks": [handler]}) == expected
    assert handler.tokens in ("", expected)
    assert handler.prompts[0].endswith(QUESTION)
    generation = handler.results[0].generations[0][0]
    assert generation.text == expected
    assert len(generation.generation_info["order"]) == 3
    assert generation.generation_info["usage_metadata"]["output_tokens"] == handler.parameters["max_tokens"] == 12


@every_entry
def test_parameters_of_a_call_win_over_those_of_the_object(llm: InvariantLLM, lm: InvariantModel, entry: Entry) -> None:
    prompt = parse_marked(PROMPT)
    whole = entry(llm.bind(max_tokens=3), PROMPT)
    assert whole == lm.generate(prompt, max_new_tokens=3).text
    sampled = lm.generate(prompt, max_new_tokens=12, do_sample=True, temperature=2.0, seed=5).text
    assert entry(llm, PROMPT, temperature=2.0, seed=5) == sampled
    penalized = lm.generate(prompt, max_new_tokens=12, repetition_penalty=3.0).text
    assert entry(llm, PROMPT, repetition_penalty=3.0) == penalized
    for stopped in (llm.bind(stop=[whole[1:3]]), llm.model_copy(update={"stop": [whole[1:3]]})):
        assert entry(stopped, PROMPT) == whole[: whole.index(whole[1:3])]


@pytest.mark.parametrize("name", ["invoke", "ainvoke", "batch", "abatch"])
def test_the_cache_answers_the_same_set_in_another_order(
    llm: InvariantLLM, llm_cache: Any, expected: str, name: str
) -> None:
    reordered = f"{Segments(reversed(DOCUMENTS))}{QUESTION}"
    assert ENTRIES[name](llm, PROMPT) == expected
    for key in llm_cache._cache:
        llm_cache._cache[key][0].text = "from the cache"
    assert ENTRIES[name](llm, reordered) == "from the cache"
    unsorted = llm.model_copy(update={"sort_segments": False})
    assert ENTRIES[name](unsorted, reordered) == expected


def test_every_keyword_that_changes_the_output_is_in_the_cache_key(llm: InvariantLLM, llm_cache: Any) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"max_tokens": 5}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"seed": 3}, {"stop": ["a"]},
        {"repetition_penalty": 2.0}, {"documents": DOCUMENTS[:1]},
    ]  # fmt: skip
    for number, change in enumerate(changes, start=1):
        llm.bind(**change).invoke(PROMPT)
        assert len(llm_cache._cache) == number
    traced = llm._get_ls_params(stop=["a"], max_tokens=3)
    assert (traced["ls_provider"], traced["ls_model_type"], traced["ls_stop"]) == ("invariant-rag", "llm", ["a"])
    assert (traced["ls_model_name"], traced["ls_max_tokens"]) == (llm.lm.name, 3)


def test_many_prompts_are_one_batch_and_the_same_texts(lm: InvariantModel) -> None:
    prompts = [PROMPT, "a", f"{Segments(DOCUMENTS[:2])}Who?", "What is it?", "b"]
    single = [lm.generate(parse_marked(prompt), max_new_tokens=8).text for prompt in prompts]
    for size in (1, 2, 8):
        llm = InvariantLLM(model=lm, max_tokens=8, batch_size=size)
        assert llm.batch(prompts) == single
        assert asyncio.run(llm.abatch(prompts)) == single
    usage = InvariantLLM(model=lm, max_tokens=8).generate(prompts).llm_output["token_usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40


@every_entry
def test_a_text_may_end_with_its_documents_or_be_nothing_else(llm: InvariantLLM, entry: Entry) -> None:
    for before in ("", "Summarise:\n"):
        texts = {entry(llm, f"{before}{Segments(each)}") for each in (DOCUMENTS, DOCUMENTS[::-1])}
        assert len(texts) == 1
        assert texts.pop()
