"""`lm.explain` on the example of the package: the figure that the library itself draws."""

from __future__ import annotations

from style import save

from invariant_rag import RAG, InvariantModel
from invariant_rag.cli.example import EXAMPLE_DOCUMENTS, EXAMPLE_QUESTION


def main() -> None:
    """Explain the example, read with RoToR and with PINE."""
    rag = RAG.from_documents([EXAMPLE_DOCUMENTS], InvariantModel.from_pretrained(), "bm25")
    prompt = rag.prompt(EXAMPLE_QUESTION)
    for method in ("rotor", "pine"):
        save(rag.model.with_method(method).explain(prompt, max_new_tokens=16).figure(), f"explained_{method}")


if __name__ == "__main__":
    main()
