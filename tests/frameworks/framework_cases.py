"""What the tests of the LangChain and the LlamaIndex package share: tiny models and what they write, texts, audits."""

import hashlib
import json
import re
import tomllib
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor

from invariant_rag import InvariantModel
from invariant_rag.audit import Question, audit
from invariant_rag.errors import OrderWarning
from invariant_rag.segments import Segment
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import in_thread, server_of
from invariant_rag.testing import tiny_model, toy_tokenizer

torch.set_num_threads(1)
HERE = Path(__file__).parent
TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")
"""As many models have it: tools, calls, results in a role of their own, reasoning, and a variable."""


@cache
def tiny_weights():
    """Return a tiny random Llama with room for a vocabulary of bytes and long prompts; it never ends by itself."""
    return tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)


@cache
def spoken_model():
    """Return it with that template."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return InvariantModel(tiny_weights(), tokenizer)


@pytest.fixture(scope="session")
def lm():
    """The `InvariantModel` that the models under test wrap."""
    return InvariantModel(tiny_weights(), toy_tokenizer())


@pytest.fixture(scope="session")
def spoken():
    """The same model, with a chat template that knows tools."""
    return spoken_model()


@pytest.fixture(scope="session")
def base_url():
    """The address of a server that runs the embedded model."""
    app = create_app(InProcess(InvariantModel.from_pretrained(), "small"))
    with in_thread(server_of(app, Settings(), "127.0.0.1", 0)) as url:
        yield f"{url}/v1"


class EveryBit(LogitsProcessor):
    """Chooses each letter by a hash of the scores, so that an answer shows every bit in which two prompts differ."""

    def __init__(self, lm):
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        self._letters = lm.tokenizer.encode(letters, add_special_tokens=False)

    def __call__(self, input_ids, scores):
        chosen = scores.clone()  # nothing is banned: a schema may leave no letter
        for row, given in zip(chosen, scores, strict=True):
            digest = hashlib.sha256(given.float().numpy().tobytes()).digest()
            row[self._letters[digest[0] % len(self._letters)]] = given.max() + 100
        return chosen


class Writing(LogitsProcessor):
    """Makes a model write a text, or what a function says of the prompt, as far as it may; then it goes on alone."""

    def __init__(self, lm, text):
        self.tokenizer, self.text = lm.tokenizer, text
        self.tokens = []
        self.seen = None

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        if ids[:-1] != self.seen:  # another generation
            text = self.text if isinstance(self.text, str) else self.text(self.tokenizer.decode(ids))
            self.tokens = self.tokenizer.encode(text, add_special_tokens=False)
        self.seen = ids
        if self.tokens:
            scores = scores.clone()
            scores[0, self.tokens.pop(0)] = scores.max() + 100
        return scores


def ended(lm, text):
    """Return the options of a call in which the model writes a text and ends."""
    end = lm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole = f"{text}<|im_end|>" if isinstance(text, str) else text
    return {"eos_token_id": end, "logits_processor": [Writing(lm, whole)]}


def call_text(name, arguments):
    """Return a call as the template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def caught(ask, *args, **options):
    """Return what a call returns, and its warnings about order, if all warnings are shown."""
    with warnings.catch_warnings(record=True, action="always") as found:
        result = ask(*args, **options)
    return result, [str(each.message) for each in found if issubclass(each.category, OrderWarning)]


def written_texts(part, *documents):
    """Return the texts of a part of `written_text.toml`, with these three documents in them."""
    texts = tomllib.loads((HERE / "written_text.toml").read_text(encoding="utf-8"))[part].strip("\n")
    for name, text in zip(("{F}", "{M}", "{B}", "¶"), (*documents, "\n"), strict=True):
        texts = texts.replace(name, text if name != "¶" else "\0")
    found = [each.replace("\0", "\n") for each in texts.split("\n")]
    assert len(found) >= {"questions": 100, "stated_orders": 12, "answers": 48, "arguments": 28}[part]
    return found


LOOKALIKES = {
    "sentences": [("The ferry leaves at noon.", {}), ("The mill grinds.", {}), ("A bridge crosses the Senn.", {})],
    "equal": [("one two", {}), ("one two", {}), ("three", {})],
    "equal, other fields": [("one two", {"year": 1987}), ("one two", {"year": 2021}), ("three", {"year": 1904})],
    "one in another": [("a b", {}), ("a b\n\nc", {}), ("c", {})],
    "empty": [("", {}), ("one two", {}), ("three", {})],
    "white space": [(" ", {}), ("one two\n", {}), ("\nthree", {})],
    "words": [("one\n", {}), (" two", {}), ("three", {})],
    "commas": [("aa", {}), ("bbb", {}), ("c,d", {})],
    "digits": [("1", {}), ("2", {}), ("3", {})],
    "counted": [(f"Part {n}.", {"chunk_index": n, "source": "a.txt"}) for n in (1, 2, 3)],
    "pages": [(f"It grew by {n}.", {"page": n + 3, "title": f"Report {n}"}) for n in (3, 1, 2)],
    "numbered": [(f"{n}. Open it.", {}) for n in (1, 2, 3)],
    "labelled": [(f"Source {n}:\nOpen it.", {}) for n in (1, 2, 3)],
    "the question": [("When does the ferry leave?", {}), ("The ferry leaves at noon.", {}), ("The mill grinds.", {})],
    "one": [("The ferry leaves at noon.", {"year": 1})],
}
"""Texts and fields of documents that are hard to tell apart, or from the text around them."""
WHO = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


def flips(system):
    """Return the share of questions whose answer another order of their documents changes."""
    names = ("one", "two", "three")
    asked = [{"question": f"Which is number {n}?", "segments": [f"{name} {n}" for name in names]} for n in range(3)]
    found = audit(system, asked, remedies=[])
    return len(found.flips) / len(found.asked)


def examples(page, containing=""):
    """Return the examples of a page, for the embedded model in place of a large one, and what each says it prints."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    model, printed = (
        re.compile('model="Qwen/Qwen2.5-7B-Instruct"(, )?'),
        re.compile(r"^ *print\(.*\)  # (.*)", re.MULTILINE),
    )
    return [(model.sub("", block), printed.findall(block)) for block in blocks if containing in block]
