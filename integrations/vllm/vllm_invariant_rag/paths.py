"""Paths that only a vLLM with this package answers, so that no other vLLM reads documents causally for us."""

FACTS_PATH = "/v1/invariant_rag"
"""Answers what the server serves, to whom it also answers /v1/models."""

COMPLETIONS_PATH = "/v1/invariant_rag/completions"
"""Takes what /v1/completions takes."""
