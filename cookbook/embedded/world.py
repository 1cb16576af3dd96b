"""Generate contexts: made-up documents, and questions that they answer.

Everything follows from the seed of the `random.Random` that is passed in. Each context is a small world of its own:
its entities, facts and names are drawn afresh, so that nothing can be answered from memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from names import VALUES, Names

UNKNOWN = "The documents do not say."
WORDINGS = json.loads(Path(__file__).with_name("wordings.json").read_text(encoding="utf-8"))
ABOUT: dict[str, list[str]] = WORDINGS["about"]
ASIDES: list[str] = WORDINGS["asides"]
SENTENCES = (1, 1, 2, 2, 2, 3, 3, 4, 5, 6)
"""How many sentences a document has; each number is as likely as it is frequent here."""
NOUNS = {
    "town": ("town", "town", "city", "place"),
    "realm": ("realm", "kingdom", "country", "land"),
    "island": ("island",),
    "river": ("river",),
    "mountain": ("mountain", "peak"),
    "lake": ("lake",),
    "forest": ("forest", "wood"),
    "guild": ("guild", "company"),
    "festival": ("festival", "feast", "fair"),
    "building": ("building", "house"),
}
FORMS = {
    "island": ("{}", "{}", "{} Island", "Isle of {}"),
    "river": ("{}",),
    "mountain": ("Mount {}", "Mount {}", "{} Peak", "{} Horn"),
    "lake": ("Lake {}", "Lake {}", "{} Water"),
    "forest": ("{} Wood", "{} Forest"),
    "guild": ("{} Guild", "Guild of {}", "{} Company", "{} Brotherhood"),
    "festival": ("{} Fair", "Feast of {}", "{} Lights", "Festival of {}", "{} Night"),
    "building": ("{} Tower", "{} Bridge", "{} Library", "{} Lighthouse", "{} Mill", "{} Gate"),
}
ARTICLED = ("river", "guild", "festival", "forest", "building")


@dataclass(frozen=True)
class Relation:
    """One relation: which kinds of entity have it, which kind of value it takes, how it is said and asked for.

    In the wordings `{s}` is the subject, `{p}` its possessive and `{v}` the value.
    """

    name: str
    kinds: list[str]
    value: str
    facts: list[str]
    questions: list[str]


RELATIONS = [Relation(**relation) for relation in WORDINGS["relations"]]


@dataclass(frozen=True)
class Document:
    """One segment: a title, now and then none, and its text."""

    title: str | None
    text: str

    def render(self) -> str:
        """Return the segment as the prompt shows it."""
        return f"Document (Title: {self.title}): {self.text}\n" if self.title else f"Document: {self.text}\n"


@dataclass(frozen=True)
class Question:
    """One question about a context; `slot` is the document that answers it, None where no document does."""

    text: str
    answer: str
    slot: int | None


@dataclass(frozen=True)
class Context:
    """Documents in slot order (farthest from the question first) and the questions about them."""

    documents: list[Document]
    questions: list[Question]


@dataclass(frozen=True)
class Difficulty:
    """How much of the world is used; training begins with little of it.

    Attributes:
        relations: how many relations, the first ones.
        wordings: how many wordings of each fact and question, the first ones.
        sentences: sentences that a document has at most.
        fillers: share of sentences that state nothing.
        pronouns: share of subjects that are a pronoun or a noun, where the name is known already.
        unknown: share of questions that no document answers.
    """

    relations: int = len(RELATIONS)
    wordings: int = 99
    sentences: int = 6
    fillers: float = 0.25
    pronouns: float = 0.4
    unknown: float = 0.1


FULL = Difficulty()


@dataclass(eq=False)
class Entity:
    """Something that documents are about. `key` is the bare name, `name` the form inside a sentence."""

    kind: str
    key: str
    name: str
    pronoun: str
    facts: dict[str, str] = field(default_factory=dict)


def make_entity(kind: str, names: Names) -> Entity:
    """Invent an entity of a kind."""
    if kind == "person":
        return Entity(kind, key := f"{names.stem()} {names.stem()}", key, names.rng.choice(("he", "she")))
    key = names.rng.choice(FORMS.get(kind, ("{}",))).format(names.stem())
    return Entity(kind, key, f"the {key}" if kind in ARTICLED or key.startswith("Isle of") else key, "it")


def make_value(relation: Relation, names: Names) -> str:
    """Draw the value of a fact."""
    kind = names.rng.choice(("mountain", "lake")) if relation.value == "highland" else relation.value
    return VALUES[kind](names) if kind in VALUES else make_entity(kind, names).key


def sentence(template: str, subject: str, possessive: str, value: str = "") -> str:
    """Fill a wording in, with a capital at its start."""
    text = template.format(s=subject, p=possessive, v=value)
    return text[:1].upper() + text[1:]


def refer(entity: Entity, rng: random.Random) -> tuple[str, str]:
    """Return a subject and its possessive for an entity whose name is known."""
    if entity.kind == "person":
        return entity.pronoun, "his" if entity.pronoun == "he" else "her"
    noun = rng.choice(NOUNS[entity.kind])
    return rng.choice((("it", "its"), (f"the {noun}", f"the {noun}'s")))


def write(entity: Entity, told: Sequence[Relation], level: Difficulty, rng: random.Random) -> Document:
    """Write a document that tells facts of an entity, with sentences between them that state nothing."""
    title = entity.name[:1].upper() + entity.name[1:] if rng.random() < 0.3 else entity.key
    titled = rng.random() < 0.9
    plan: list[Relation | None] = list(told)
    while len(plan) < level.sentences and (not plan or rng.random() < level.fillers):
        plan.insert(rng.randint(0, len(plan)), None)
    named, sentences = titled and rng.random() < 0.3, []
    for relation in plan:
        subject, possessive = entity.name, f"{entity.name}'s"
        if named and rng.random() < level.pronouns:
            subject, possessive = refer(entity, rng)
        if relation is None and rng.random() < 0.5:
            sentences.append(rng.choice(ASIDES))
            continue
        templates = ABOUT[entity.kind] if relation is None else relation.facts[: level.wordings]
        value = "" if relation is None else entity.facts[relation.name]
        template = rng.choice(templates)
        if subject in ("he", "she") and not template.startswith("{s}"):
            subject = entity.name
        sentences.append(sentence(template, subject, possessive, value))
        named = True
    return Document(title if titled else None, " ".join(sentences))


def slot_weight(slot: int, count: int, skew: float) -> float:
    """Return how often a slot holds the gold document, relative to the middle: retrieval favours the two ends."""
    return 1.0 + skew * abs(2 * slot / max(count - 1, 1) - 1) ** 2


def ask(relation: Relation, entity: Entity, level: Difficulty, rng: random.Random) -> str:
    """Return one wording of the question for a relation of an entity."""
    return sentence(rng.choice(relation.questions[: level.wordings]), entity.name, f"{entity.name}'s")


def make_context(names: Names, documents: int, questions: int, skew: float = 2.0, level: Difficulty = FULL) -> Context:
    """Make a context.

    Most documents are about entities of one to three kinds and tell the same two relations of each kind, and one in
    seven is about an entity that has another document already.

    Args:
        names: where names, and all randomness, come from.
        documents: how many documents.
        questions: how many questions at most; each asks for another fact.
        skew: how much the gold document prefers the ends (0: every slot alike).
        level: how much of the world is used.
    """
    rng = names.rng
    known: dict[str, list[Relation]] = {}
    for relation in RELATIONS[: level.relations]:
        for kind in relation.kinds:
            known.setdefault(kind, []).append(relation)
    main = rng.sample(list(known), min(len(known), rng.choice((1, 1, 2, 3))))
    hot = {kind: set(rng.sample([each.name for each in listed], min(len(listed), 2))) for kind, listed in known.items()}
    entities: list[Entity] = []
    told: list[list[Relation]] = []
    for _ in range(documents):
        if entities and rng.random() < 0.15:
            entity = rng.choice(entities)
        else:
            entity = make_entity(rng.choice(main if rng.random() < 0.8 else list(known)), names)
        free = [relation for relation in known[entity.kind] if relation.name not in entity.facts]
        room = min(level.sentences, rng.choice(SENTENCES))
        wanted = sorted(
            free, key=lambda relation: rng.random() - (relation.name in hot[entity.kind]) * rng.random() * 2
        )
        facts = wanted[: max(1, round(room * (1 - level.fillers)))]
        rng.shuffle(facts)
        for relation in facts:
            entity.facts[relation.name] = make_value(relation, names)
        entities.append(entity)
        told.append(facts)
    written = [write(entity, facts, level, rng) for entity, facts in zip(entities, told, strict=True)]
    facts_left = [(slot, relation) for slot, relations in enumerate(told) for relation in relations]
    asked: list[Question] = []
    for _ in range(questions):
        if rng.random() < level.unknown:
            asked.append(_unknown(names, entities, known, level))
        elif facts_left:
            weights = [slot_weight(slot, documents, skew) for slot, _ in facts_left]
            slot, relation = facts_left.pop(rng.choices(range(len(facts_left)), weights)[0])
            entity = entities[slot]
            asked.append(Question(ask(relation, entity, level, rng), entity.facts[relation.name], slot))
    return Context(written, asked)


def lost_in_the_middle(count: int, documents: int, seed: str) -> list[dict[str, Any]]:
    """Return questions over held-out names with the gold document at any slot, in the format of Lost in the Middle."""
    names = Names(random.Random(seed), "test")
    records: list[dict[str, Any]] = []
    while len(records) < count:
        context = make_context(names, documents, 1, skew=0.0, level=Difficulty(unknown=0.0))
        for question in context.questions:
            listed = [
                {"title": each.title or "", "text": each.text, "isgold": slot == question.slot}
                for slot, each in enumerate(context.documents)
            ]
            records.append({"question": question.text, "answers": [question.answer], "ctxs": listed})
    return records[:count]


def _unknown(names: Names, entities: list[Entity], known: dict[str, list[Relation]], level: Difficulty) -> Question:
    """Ask for a fact of a known entity that no document tells, or for one of an entity that has no document."""
    rng = names.rng
    entity = rng.choice(entities)
    missing = [relation for relation in known[entity.kind] if relation.name not in entity.facts]
    if missing and rng.random() < 0.6:
        return Question(ask(rng.choice(missing), entity, level, rng), UNKNOWN, None)
    return Question(ask(rng.choice(known[entity.kind]), make_entity(entity.kind, names), level, rng), UNKNOWN, None)
