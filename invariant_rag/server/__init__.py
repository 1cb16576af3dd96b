"""An OpenAI-compatible server that takes documents: their order changes no bit of an answer.

>>> app = create_app(InProcess(InvariantModel.from_pretrained()))  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.server.application import create_app
    from invariant_rag.server.engines.model_engine import InProcess
    from invariant_rag.server.settings import Settings

_HOMES = {"InProcess": "engines.model_engine", "Settings": "settings", "app": "ray_app", "create_app": "application"}

# `app` is for `serve run invariant_rag.server:app`, and needs Ray.
__all__ = ["InProcess", "Settings", "create_app"]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
