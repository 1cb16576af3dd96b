"""Variables of prompt templates, whatever they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.prompts import BasePromptTemplate

from invariant_rag.errors import InvalidPrompt

_PARAMETERS = frozenset({"prompt", "llm", "output_cls", "llm_kwargs", "completion_to_prompt", "messages_to_prompt"})
"""Parameters of LlamaIndex's methods that take the variables of a template as further keywords."""

_UNUSABLE = frozenset({"self", "string_to_format"})
"""Names that LlamaIndex's own formatting cannot be given as keywords at all."""


def bind_variables(
    template: BasePromptTemplate, variables: Mapping[str, Any]
) -> tuple[BasePromptTemplate, dict[str, Any]]:
    """Return a template and the variables to format it with as keywords.

    Variables that are called like a parameter of LlamaIndex's methods are in the template already.

    Raises:
        InvalidPrompt: LlamaIndex cannot format a variable of this name.
    """
    if unusable := sorted(_UNUSABLE & set(variables)):
        raise InvalidPrompt(
            f"expected template variables that LlamaIndex can format, got {', '.join(unusable)}",
            hint="Give the variable of the template another name.",
        )
    bound = {name: value for name, value in variables.items() if name in _PARAMETERS}
    others = {name: value for name, value in variables.items() if name not in _PARAMETERS}
    return (template.partial_format(**bound) if bound else template), others
