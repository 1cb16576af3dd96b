"""Models of `invariant-rag serve`: the answers of a model in memory, without torch in the application."""

import subprocess
import sys

import pytest
from invariant_rag import KeyValueCache
from invariant_rag.errors import InvalidTool, RemoteError, UnsupportedCombination
from pydantic import BaseModel, Field, ValidationError

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.parameters import InvariantContextOverflowError

from .shared import said

QUESTION = "What colour is the flag of Ostra?"
FLAGS = ["The flag of Ostra is white.", "The flag of Brenn is green.", "The mill of Ostra grinds barley."]


class Colour(BaseModel):
    """A colour."""

    name: str = Field(pattern="white|green")


ASKED = {
    "text": lambda chat: chat,
    "citations": lambda chat: chat.bind(citations=True),
    "a method": lambda chat: chat.model_copy(update={"method": "set-based"}),
    "an object": lambda chat: chat.with_structured_output(Colour, max_tokens=96),
    "a call": lambda chat: chat.bind_tools([Colour], tool_choice="any", max_tokens=96, parallel_tool_calls=False),
    "a completion": lambda chat: InvariantLLM(base_url=chat.base_url, max_tokens=8),
}


@pytest.mark.parametrize("asked", ASKED)
def test_it_answers_as_a_model_in_memory_in_every_order(base_url, asked):
    far, local = (ASKED[asked](ChatInvariant(base_url=url, max_tokens=16)) for url in (base_url, None))
    expected = said(local.invoke(QUESTION, documents=FLAGS))
    assert [said(far.invoke(QUESTION, documents=order)) for order in (FLAGS, FLAGS[::-1])] == [expected] * 2
    if asked == "a method":
        assert (expected["content"], expected["response_metadata"]["method"]) == ("white", "set-based")


def test_what_a_server_cannot_do_is_refused(base_url, embedded):
    remote = ChatInvariant(base_url=base_url, max_tokens=16)
    for error, told, call in (
        (InvariantContextOverflowError, "4096", lambda: remote.invoke("word " * 5000)),
        (UnsupportedCombination, "num_beams", lambda: remote.invoke(QUESTION, num_beams=2)),
        (UnsupportedCombination, "base_url", lambda: remote.lm),
        (RemoteError, "small", lambda: ChatInvariant(base_url=base_url, model="large").invoke(QUESTION)),
        (InvalidTool, "search", lambda: remote.invoke(QUESTION, tool_choice="search", tools=[Colour])),
    ):
        with pytest.raises(error, match=told):
            call()
    for wrong in ({"model": embedded}, {"dtype": "float32"}, {"key_value_cache": KeyValueCache()}, {"method": "no"}):
        with pytest.raises((UnsupportedCombination, ValidationError)):
            ChatInvariant(base_url=base_url, **wrong)
    assert remote.context_window is None


@pytest.mark.parametrize("installed", [True, False])
def test_the_application_needs_no_torch(installed, base_url):
    code = (
        f"import sys; sys.modules.update({{}} if {installed} else dict.fromkeys(['torch', 'transformers']))\n"
        "from langchain_invariant_rag import ChatInvariant, InvariantLLM\n"
        f"chat, llm = (kind(base_url={base_url!r}, max_tokens=8) for kind in (ChatInvariant, InvariantLLM))\n"
        f"print(chat.invoke({QUESTION!r}, documents={FLAGS!r}).content)\n"
        f"llm.invoke({QUESTION!r}, documents=['a', 'b'])\n"
        "assert not (sys.modules.get('torch') or sys.modules.get('transformers'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "white"
