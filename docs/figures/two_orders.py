"""What goes wrong: the same ten chunks in two orders, and one model's answers, plain and with RoToR.

A real run of the embedded model over the example of `invariant-rag ask`. The second order is the first random one in
which the plain model answers otherwise.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch
from style import COLOURS, DARK, GREY, PALE, figure, save

from invariant_rag import RAG, InvariantModel, Prompt
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS, EXAMPLE_QUESTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOLD = "orange and black"


def two_orders(rag: RAG) -> tuple[Prompt, Prompt]:
    """Return the prompt as retrieved, and the first of a hundred random orders with another plain answer."""
    plain, source = rag.model.with_method("sequential", ordering="given"), random.Random(0)
    given = rag.prompt(EXAMPLE_QUESTION)
    answer = plain.generate(given, max_new_tokens=16).text
    orders = (given.shuffled(source) for _ in range(100))
    return given, next(each for each in orders if plain.generate(each, max_new_tokens=16).text != answer)


def column(axis: Axes, prompt: Prompt, left: float, answers: dict[str, str]) -> None:
    """Draw one order of the chunks, the one with the answer in colour, and below it what was answered."""
    for place, segment in enumerate(prompt.segments):
        has_answer = GOLD in segment.text
        box = FancyBboxPatch(
            (left, 10.2 - place), 3.2, 0.62, boxstyle="round,pad=0.08", ec="none", fc=COLOURS[1] if has_answer else PALE
        )
        axis.add_patch(box)
        axis.text(
            left + 0.05, 10.51 - place, segment.title, va="center", color=DARK, weight="bold" if has_answer else None
        )
    for line, (reader, said) in enumerate(answers.items()):
        right = said == GOLD
        axis.text(left - 0.05, 0.35 - 1.25 * line, f"{reader}:", color=GREY, size=8.5)
        axis.text(
            left - 0.05, -0.2 - 1.25 * line, f"“{said}”", color=COLOURS[2] if right else COLOURS[5], weight="bold"
        )


def main() -> None:
    """Run the model, and draw."""
    rag = RAG.from_documents([EXAMPLE_DOCUMENTS], InvariantModel.from_pretrained(), "bm25")
    readers = {
        "the plain model answers": rag.model.with_method("sequential", ordering="given"),
        "with RoToR": rag.model,
    }
    drawn = figure(6.4, 5.6)
    axis = drawn.subplots()
    for number, prompt in enumerate(two_orders(rag)):
        said = {name: lm.generate(prompt, max_new_tokens=16).text for name, lm in readers.items()}
        column(axis, prompt, 4.4 * number, said)
        axis.text(4.4 * number - 0.05, 11.2, ("as retrieved", "in another order")[number], weight="bold", size=10)
    axis.set_title(EXAMPLE_QUESTION, size=11)
    axis.set_xlim(-0.4, 8.4)
    axis.set_ylim(-2.2, 11.8)
    axis.axis("off")
    save(drawn, "two_orders")


if __name__ == "__main__":
    main()
