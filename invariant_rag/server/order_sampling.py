"""What order would have done: requests asked again in another order, by the plain model and as they were served."""

from __future__ import annotations

import logging
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Lock
from typing import Any

from invariant_rag.api_models import answer_key
from invariant_rag.errors import InvariantRAGError
from invariant_rag.prompts import Turn
from invariant_rag.segments import SegmentSet
from invariant_rag.server.engines.base import Call, Engine, EngineReply
from invariant_rag.server.metrics import Metrics

_logger = logging.getLogger("invariant_rag.server")


class OrderSampling:
    """Asks a share of the requests again, one at a time, in a thread of its own; the answers only go into metrics.

    Args:
        engine: What answers.
        share: Of the greedy requests that have a set of at least two documents. Those that come while another one is
            checked are left out.
        metrics: Counts how often the plain model's answer, and the served one, come out differently.
    """

    def __init__(self, engine: Engine, share: float, metrics: Metrics) -> None:
        self._engine, self._share, self._metrics = engine, share, metrics
        self._random = random.Random()
        self._executor = ThreadPoolExecutor(1, "invariant-rag-check-order")
        self._busy, self._closed = Lock(), Event()

    def consider(self, call: Call, reply: EngineReply) -> None:
        """Check a request that was answered, if it is drawn."""
        drawn = self._random.random() < self._share and not call.request.temperature and not self._closed.is_set()
        if drawn and any(len(each) > 1 for each in call.sets) and self._busy.acquire(blocking=False):
            self._executor.submit(self._check, call, reply)

    def close(self) -> None:
        """End, also in the middle of a check."""
        self._closed.set()
        self._executor.shutdown(wait=True)

    def _check(self, call: Call, reply: EngineReply) -> None:
        try:
            other = _shuffled(call, self._random)
            plain = [_asked_plain(self._engine, each, self._closed) for each in (call, other)]
            again = _asked(self._engine, other, self._closed)
            self._metrics.count_order_check("plain", flipped=plain[0] != plain[1])
            self._metrics.count_order_check("served", flipped=again != _text_of(reply))
        except InvariantRAGError as error:  # the plain model may refuse what the served one takes
            _logger.warning("order check failed", extra={"fields": {"error": type(error).__name__}})
        finally:
            self._busy.release()


def compare_orders(engine: Engine, call: Call, orders: int, abandoned: Event) -> dict[str, Any]:
    """Ask the plain model in the order given and in others.

    Returns:
        `orders`: how many others there were; `plain`: its texts, each with how often it came, the most frequent first;
        `flipped`: whether they differ.
    """
    source = random.Random(0)
    calls = [call, *(_shuffled(call, source) for _ in range(orders))]
    counts = Counter(_asked_plain(engine, each, abandoned) for each in calls).most_common()
    flipped = len({answer_key(text) for (text, _), _ in counts}) > 1
    return {"orders": orders, "plain": [{"text": text, "count": n} for (text, _), n in counts], "flipped": flipped}


def _shuffled(call: Call, source: random.Random) -> Call:
    """Return a call whose documents are listed in another order."""

    def other(part: Any) -> Any:
        return part.permuted(source.sample(range(len(part)), len(part))) if isinstance(part, SegmentSet) else part

    return replace(call, turns=tuple(Turn(turn.role, tuple(map(other, turn.parts))) for turn in call.turns))


def _asked_plain(engine: Engine, call: Call, abandoned: Event) -> tuple[str, str]:
    return _asked(engine, replace(call, choices=call.choices.plain()), abandoned)


def _asked(engine: Engine, call: Call, abandoned: Event) -> tuple[str, str]:
    alone = replace(call, request=replace(call.request, n=1, logprobs=False, top_logprobs=0), stream=False)
    return _text_of(engine.answer(alone, lambda _index, _delta: None, abandoned))


def _text_of(reply: EngineReply) -> tuple[str, str]:
    """Return what two replies share if they agree: text and calls of the first answer."""
    answer = reply.choices[0].answer
    return answer.content, repr([(each.name, dict(each.arguments)) for each in answer.tool_calls])
