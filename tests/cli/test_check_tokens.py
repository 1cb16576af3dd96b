"""`invariant-rag models --check-tokens`, and the warning of a loaded model: tokenizers that cannot keep text out."""

import json
import warnings

import pytest
from tokenizers import AddedToken

from invariant_rag import InvariantModel
from invariant_rag.errors import TokenWarning
from invariant_rag.testing import toy_tokenizer
from invariant_rag.testing.tokenizer_layouts import LAYOUTS
from tests.cli.conftest import run


def with_tokens(*tokens):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(each) for each in tokens])
    return tokenizer


def unprotected():
    """Return a tokenizer with tokens of roles that its template does not write."""
    return with_tokens("<start_of_turn>", "### User:")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a tokenizer that is saved with a configuration, with a few texts."""
    monkeypatch.setattr("invariant_rag.cli.models._HOSTILE_TEXTS", 60)

    def checked(tokenizer, *options):
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        return run("models", "--check-tokens", tmp_path, *options)

    return checked


def test_a_protected_tokenizer_passes_the_check_and_a_token_that_only_looks_like_a_word_is_no_role(check):
    words = with_tokens("<table>", "user", "Ostra", "<reuser>")
    for tokenizer in (LAYOUTS["joined bars"].build(), LAYOUTS["llama2"].build(), words):
        result = check(tokenizer)
        assert (result.exit_code, "60 hostile texts: 0 broke out" in result.stdout) == (0, True), result.output


def test_names_that_only_a_long_conversation_writes_are_control_tokens(check):
    tokenizer = with_tokens("T38:", "T90:")
    tokenizer.chat_template = "{% for each in messages %}\nT{{ loop.index0 }}: {{ each.content }}{% endfor %}"
    names = json.loads(check(tokenizer, "--json").stdout)["control_tokens"]
    assert ("T38:" in names, "T90:" in names) == (True, False)
    assert "up to 40 turns" in check(tokenizer).stdout


def test_a_tokenizer_with_unprotected_roles_fails_the_check(check):
    result = check(unprotected())
    assert result.exit_code == 1, result.output
    assert "no template writes them: ### User:, <start_of_turn>" in result.stdout
    report = json.loads(check(unprotected(), "--json").stdout)
    assert report["unprotected"] == ["### User:", "<start_of_turn>"]
    assert {"segment", "title", "question", "tool result"} <= {each["place"] for each in report["break_outs"]}
    assert any("<start_of_turn>" in each["tokens"].split(" ") for each in report["break_outs"])


def test_loading_warns_once_of_tokens_that_look_like_roles(chat_llama, tiny_folder, tmp_path):
    unprotected().save_pretrained(tmp_path)
    chat_llama.save_pretrained(tmp_path)
    with pytest.warns(TokenWarning, match=r"### User:, <start_of_turn>.*--check-tokens") as caught:
        InvariantModel.from_pretrained(tmp_path)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InvariantModel.from_pretrained(tmp_path)
        InvariantModel.from_pretrained(tiny_folder)
