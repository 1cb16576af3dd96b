"""`invariant-rag models --check-tokens`, and the warning of a loaded model: tokenizers that cannot keep text out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from click.testing import Result
from tokenizers import AddedToken
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.errors import TokenWarning
from invariant_rag.prompts import unprotected_tokens
from invariant_rag.testing import toy_tokenizer
from invariant_rag.testing.token_check import find_break_outs
from invariant_rag.testing.tokenizer_layouts import LAYOUTS
from tests.cli.conftest import run


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("invariant_rag.cli.models._HOSTILE_TEXTS", 60)


def check(*arguments: object) -> Result:
    return run("models", "--check-tokens", *arguments)


@pytest.fixture(scope="module")
def unprotected_folder(tmp_path_factory: pytest.TempPathFactory, chat_llama: PreTrainedModel) -> Path:
    """A model whose tokenizer has tokens of roles that its template does not write."""
    folder = tmp_path_factory.mktemp("unprotected")
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("<start_of_turn>"), AddedToken("### User:")])
    tokenizer.save_pretrained(folder)
    chat_llama.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["joined bars", "llama2"])
def test_a_protected_tokenizer_passes_the_check(name: str, tmp_path: Path) -> None:
    LAYOUTS[name].build().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    assert "60 hostile texts: 0 broke out" in result.stdout


def test_names_that_only_a_long_conversation_writes_are_control_tokens(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("T38:"), AddedToken("T90:")])
    tokenizer.chat_template = "{% for each in messages %}\nT{{ loop.index0 }}: {{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    names = json.loads(check(tmp_path, "--json").stdout)["control_tokens"]
    assert ("T38:" in names, "T90:" in names) == (True, False)
    assert "up to 40 turns" in check(tmp_path).stdout


def test_a_tokenizer_with_unprotected_roles_fails_the_check(unprotected_folder: Path) -> None:
    result = check(unprotected_folder)
    assert result.exit_code == 1, result.output
    assert "no template writes them: ### User:, <start_of_turn>" in result.stdout
    report = json.loads(check(unprotected_folder, "--json").stdout)
    assert report["unprotected"] == ["### User:", "<start_of_turn>"]
    places = {each["place"] for each in report["break_outs"]}
    assert {"segment", "title", "question", "tool result"} <= places
    assert {name for each in report["break_outs"] for name in each["tokens"].split(" ")} >= {"<start_of_turn>"}


def test_a_model_without_a_tokenizer_is_an_error_with_a_hint(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.exit_code == 2
    assert "expected a tokenizer" in result.stderr


def test_loading_warns_once_of_tokens_that_look_like_roles(unprotected_folder: Path, tiny_folder: Path) -> None:
    with pytest.warns(TokenWarning, match=r"### User:, <start_of_turn>.*--check-tokens") as caught:
        InvariantModel.from_pretrained(unprotected_folder)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InvariantModel.from_pretrained(unprotected_folder)
        InvariantModel.from_pretrained(tiny_folder)


def test_a_token_that_only_looks_like_a_word_is_no_role() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["<table>", "user", "Ostra", "<reuser>"])
    assert not unprotected_tokens(tokenizer)


def test_the_check_sees_what_breaks_out() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["<table>"])
    index = tokenizer.convert_tokens_to_ids("<table>")
    found = {each.place: each.tokens for each in find_break_outs(tokenizer, ["a <table> b"], {index})}
    assert found["segment"] == found["question"] == found["tool result"] == ("<table>",)
