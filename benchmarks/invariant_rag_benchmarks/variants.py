"""What differs between the cases of a question: orders of options, slots of the gold segment, orders of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, TypeVar

from invariant_rag.errors import InvalidChoice, TokenizerRequired

from invariant_rag_benchmarks.base import Case, Scored
from invariant_rag_benchmarks.errors import InvalidDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
LETTERS = "ABCDEFGHIJ"


def parse_option_orders(described: str, count: int) -> list[tuple[int, ...]]:
    """Parse the `orders` setting: return orders of `count` options, as tuples of indices into the original options.

    Args:
        described: `all` (lexicographic: the first is the original order, the last the reversed one), `ends` (these
            two), `rotations`, or comma-separated numbers of orders within `all`.
        count: Number of options.

    Raises:
        InvalidChoice: There is no such order.

    >>> parse_option_orders("ends", 3)
    [(0, 1, 2), (2, 1, 0)]
    """
    if described == "rotations":
        return [tuple((start + index) % count for index in range(count)) for start in range(count)]
    every = list(permutations(range(count)))
    if described == "ends":
        return [every[0], every[-1]]
    return [every[each] for each in _parse_numbers("orders", described, len(every), "all, ends, rotations, or numbers")]


def parse_slots(described: str, count: int, default: Sequence[int]) -> list[int]:
    """Parse the `slots` setting: empty for the default, `all`, or comma-separated slots of the gold segment, from 0 on.

    Raises:
        InvalidChoice: There is no such slot.

    >>> parse_slots("0,4", 5, [])
    [0, 4]
    """
    return _parse_numbers("slots", described, count, "all, or numbers") if described else list(default)


def _parse_numbers(setting: str, described: str, count: int, expected: str) -> list[int]:
    if described == "all":
        return list(range(count))
    words = [word.strip() for word in described.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) < count for word in words):
        raise InvalidChoice(f"{setting}: expected {expected} from 0 to {count - 1}, got {described!r}")
    return [int(word) for word in words]


def insert_gold(slot: int, gold: T, others: Sequence[T]) -> list[T]:
    """Return the other segments in their order, with the gold one inserted at its slot."""
    return [*others[:slot], gold, *others[slot:]]


def choice_case(
    name: str, prefix: str, options: Sequence[str], gold: int, order: Sequence[int], query: str, group: str = ""
) -> Case:
    """Return the case with the options in this order, lettered A, B...; the output is the likeliest of ` A`, ` B`..."""
    return Case(
        question=name,
        variant="".join(map(str, order)),
        prefix=prefix,
        segments=tuple(f"{letter}. {options[index]}\n" for letter, index in zip(LETTERS, order, strict=False)),
        suffix="Answer:",
        gold=(str(gold),),
        query=query,
        chat=False,
        candidates=tuple(f" {letter}" for letter in LETTERS[: len(options)]),
        group=group,
    )


def score_choice(case: Case, output: str) -> Scored:
    """Score 1 if the letter stands for the gold option. The answer is the option's index in the original options."""
    answer = case.variant[case.candidates.index(output)]
    return Scored(answer, {"accuracy": float(answer == case.gold[0])})


def token_starts(text: str, load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None) -> list[int]:
    """Return the character offset at which each token of a text starts.

    Raises:
        TokenizerRequired: There is no tokenizer, or it is not a fast one, which knows the offsets of its tokens.
        InvalidDataset: The text has half of a surrogate pair, which is no character.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidDataset("expected a text to split into chunks, got one with half of a surrogate pair")
    tokenizer = load_tokenizer() if load_tokenizer is not None else None
    if tokenizer is None or not tokenizer.is_fast:
        raise TokenizerRequired("this benchmark counts tokens: it needs a model with a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def split_into_chunks(text: str, starts: list[int], tokens: int, limit: int, *, middle: bool = False) -> list[str]:
    """Split a text into chunks of `tokens` tokens. Of one with more than `limit` tokens, its beginning is kept.

    With `middle`, the middle is cut instead: the first and the last half of the limit are kept, and split apart.

    >>> split_into_chunks("one two three", [0, 3, 7], tokens=2, limit=3)
    ['one two', ' three']
    >>> split_into_chunks("abcdefgh", [*range(8)], tokens=2, limit=4, middle=True)
    ['ab', 'gh']
    """
    ends = [*starts, len(text)]
    count = len(starts)
    spans = [(0, min(limit, count))]
    if middle and count > limit:
        spans = [(0, limit // 2), (count - limit + limit // 2, count)]
    bounds = [pairwise([*range(low, high, tokens), high]) for low, high in spans]
    return [text[ends[low] : ends[high]] for each in bounds for low, high in each]


def chunk_orders(chunks: Sequence[str]) -> dict[str, list[str]]:
    """Return the three orders of RoToR, Appendix J.

    >>> chunk_orders("12345")["centre-flipped"]
    ['3', '2', '1', '5', '4']
    """
    middle = (len(chunks) + 1) // 2
    return {
        "initial": list(chunks),
        "reversed": list(chunks[::-1]),
        "centre-flipped": [*chunks[:middle][::-1], *chunks[middle:][::-1]],
    }
