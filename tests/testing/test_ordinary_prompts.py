"""The prompts without documents: as many as promised, different, of every kind, and in the shape of chat messages."""

from __future__ import annotations

from invariant_rag.testing import toy_tokenizer
from invariant_rag.testing.ordinary_prompts import KINDS, ORDINARY


def test_there_are_200_different_conversations_of_many_kinds():
    assert len(ORDINARY) == 200
    assert len(set(map(repr, ORDINARY))) == 200
    assert len(KINDS) >= 10
    assert all(KINDS.values())


def test_each_is_a_conversation_that_a_chat_template_takes():
    tokenizer = toy_tokenizer()
    for conversation in ORDINARY:
        assert conversation[-1]["role"] == "user"
        assert all(message["content"].strip() for message in conversation)
        assert tokenizer.apply_chat_template(list(conversation), tokenize=False)


def test_some_hold_what_a_careless_check_takes_for_documents():
    text = "\n".join(message["content"] for conversation in ORDINARY for message in conversation)
    for alarm in ("[1] ", "\n2. ", "\n- ", "Source:", "context", "Document(", r"\ue200", "\n---\n", "<item id="):
        assert alarm in text, alarm
