"""Documents about made-up places, questions about them, and a model whose answers here and on vLLM are compared."""

import random
from dataclasses import dataclass, replace

from invariant_rag import InvariantModel, Segment
from invariant_rag.testing.rounding import rounding
from langchain_core.messages import HumanMessage
from langchain_invariant_rag.documents import to_block

from vllm_invariant_rag import VLLMBackend

LENGTH = {"max_new_tokens": 16, "min_new_tokens": 16}
MOVED = 1e-4
"""How far log-probabilities may lie apart, whatever the answer's length. Rounding moves 160 tokens by up to 3.4e-5."""

_SYLLABLES = "bel tar mor quel ost gan lu ren va dri no sel ka tho mi".split()
_COLOURS = "red green blue orange black white yellow purple".split()
_TRADES = "rope sails bread glass wool paper bells salt".split()
_TEMPLATES = (
    "The flag of {0} is {1} and {2}. It was founded in {4}.",
    "The guild of {0} makes {3}. Its hall stands by the river.",
    "The {0} is {5} miles long. It rises in the hills and flows into the bay.",
)


def documents(count, seed):
    """Return so many different documents, in random order."""
    rng, found = random.Random(seed), []
    names = sorted({"".join(rng.choices(_SYLLABLES, k=3)).title() for _ in range(4 * count + 8)})
    rng.shuffle(names)
    for name in names[:count]:
        template, colours, trade = rng.choice(_TEMPLATES), rng.sample(_COLOURS, 2), rng.choice(_TRADES)
        text = template.format(name, *colours, trade, rng.randint(1200, 1900), rng.randint(20, 300))
        found.append(Segment(text, title=name))
    return found


def question(segments):
    """Return a question about one of the documents."""
    return f"What colour is the flag of {min((each.title for each in segments), default='Ostra')}?"


def ask(lm, segments, asked=None):
    return lm.chat_prompt(asked or question(segments), list(segments))


def body_of(segments, **more):
    """Return a request to /v1/chat/completions."""
    listed = [{"title": each.title, "text": each.text} for each in segments]
    asked = [{"role": "user", "content": question(segments)}]
    return {"messages": asked, "documents": listed, "max_tokens": 16, **more}


def chat_message(segments, asked):
    """Return the same as a message of LangChain."""
    return HumanMessage(content=[*(dict(to_block(each)) for each in segments), {"type": "text", "text": asked}])


def moved(ours, theirs):
    """How far log-probabilities are apart, where all else is the same. Another method moves them by 0.1 and more."""
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert (ours.finish_reason, ours.order) == (theirs.finish_reason, theirs.order)
    return max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))


@dataclass(frozen=True)
class Pair:
    """The embedded model, with documents by `lexical`, here and on vLLM."""

    here: InvariantModel
    there: VLLMBackend

    def using(self, method, ordering="lexical"):
        here, there = (each.with_method(method, ordering=ordering) for each in (self.here, self.there))
        return replace(self, here=here, there=there)

    def prompt(self, seed, count=6):
        return ask(self.here, documents(count, seed))

    def most_moved(self, prompt, **options):
        """`MOVED`, but for APE, whose temperature multiplies rounding: its answers here are 1.4e-4 from float64's."""
        return rounding(self.here.generate, prompt, **options) if self.here.method.name == "ape" else MOVED

    def alike(self, *prompts, **options):
        """All prompts at once on vLLM, and one by one here, give the same; 16 tokens, if nothing else is told."""
        options = {**LENGTH, **options}
        answers = self.there.generate(prompts, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            far = moved(answer, self.here.generate(prompt, **options))
            assert far < MOVED or far < self.most_moved(prompt, **options)
        return answers
