"""The inputs of tests: tiny models and prompts of their seed, and conversations without documents."""

import random

import torch

from invariant_rag.testing import random_prompt, tiny_model, toy_tokenizer
from invariant_rag.testing.ordinary_prompts import KINDS, ORDINARY


def test_a_seed_gives_its_own_weights_and_prompts_and_leaks_nowhere():
    torch.manual_seed(5)
    before, state = torch.get_rng_state(), random.getstate()
    one, same, other = (tiny_model("llama", seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    prompts = [random_prompt(random.Random(seed), (2, 3)) for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert torch.equal(torch.get_rng_state(), before), "torch's generator is as it was"
    assert random.getstate() == state


def test_there_are_200_different_conversations_of_many_kinds_that_a_chat_template_takes():
    assert len(ORDINARY) == len(set(map(repr, ORDINARY))) == 200
    assert len(KINDS) >= 10
    assert all(KINDS.values())
    tokenizer = toy_tokenizer()
    for conversation in ORDINARY:
        assert conversation[-1]["role"] == "user"
        assert all(message["content"].strip() for message in conversation)
        assert tokenizer.apply_chat_template(list(conversation), tokenize=False)
    text = "\n".join(message["content"] for conversation in ORDINARY for message in conversation)
    for alarm in ("[1] ", "\n2. ", "\n- ", "Source:", "context", "Document(", r"\ue200", "\n---\n", "<item id="):
        assert alarm in text, alarm  # some hold what a careless check takes for documents
