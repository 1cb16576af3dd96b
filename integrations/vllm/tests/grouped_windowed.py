"""Another family on vLLM, in a process of its own: grouped heads, and a sliding window shorter than the prompt.

Run as a script by `families.py`; prints lines of JSON. Keys and values go through Redis where there is one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401 - the environment variables of vLLM
from tests.servers import RedisServer

METHODS = ["sequential", "rotor", "isolated", "set-based"]


def tell(**line: Any) -> None:
    sys.stdout.write("ANSWER " + json.dumps(line) + "\n")


def main(folder: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder)) if shutil.which("redis-server") else None
        run(folder, redis)


def run(folder: Path, redis: RedisServer | None) -> None:
    import torch
    from invariant_rag import InvariantModel, Prompt
    from invariant_rag.testing import tiny_model
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from vllm_invariant_rag import VLLMBackend

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny_model("mistral", **sizes, num_hidden_layers=2, vocab_size=261, max_position_embeddings=2048,
                       sliding_window=48, eos_token_id=None)  # fmt: skip
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(3)  # random weights hardly attend; larger ones tell arrangements apart
    model.save_pretrained(folder / "model")
    place: dict[str, Any] = {"folder": str(folder / "entries")}
    if redis is not None:
        os.environ["REDIS_PASSWORD"] = redis.PASSWORD
        place = {"redis_url": f"redis://:$REDIS_PASSWORD@127.0.0.1:{redis.port}", "memory_bytes": 0}
    transfer: dict[str, Any] = {
        "kv_connector": "InvariantRAGConnector",
        "kv_connector_module_path": "vllm_invariant_rag.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": place,
    }
    llm = LLM(
        model=str(folder / "model"), dtype="float32", max_model_len=512, max_num_seqs=4, block_size=32,
        num_gpu_blocks_override=96, skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        distributed_executor_backend="uni", kv_transfer_config=KVTransferConfig(**transfer),
    )  # fmt: skip
    lm, rng = InvariantModel(model), random.Random(1)
    backend = VLLMBackend(llm=llm, redis_url=None if redis is None else redis.url)
    texts = [[rng.randrange(5, 250) for _ in range(length)] for length in (9, 40, 25, 50, 31, 7)]
    prompt = Prompt(prefix=texts[0], segments=texts[1:5], suffix=texts[5])
    for method in METHODS:
        here = lm.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        there = backend.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        distance = max(abs(a - b) for a, b in zip(here.logprobs, there.logprobs, strict=True))
        tell(method=method, same=here.token_ids == there.token_ids, distance=distance)
    tell(refused=failure(lambda: backend.with_method("parallel-windows").generate(prompt, max_new_tokens=2)))
    if redis is None:
        return
    outages(backend, redis, prompt, lm.generate(prompt, max_new_tokens=12).token_ids, llm.reset_prefix_cache)


def outages(backend: Any, redis: RedisServer, prompt: Any, expected: tuple[int, ...], forget: Any) -> None:
    from redis import Redis

    from vllm_invariant_rag import PrefillWorker
    from vllm_invariant_rag.engines import EngineRequest

    def same() -> bool:
        forget()
        return bool(backend.generate(prompt, max_new_tokens=12).token_ids == expected)

    worker = PrefillWorker(backend, redis_url=redis.url)
    ready = worker.prefill(backend, backend.prepare_to_generate(prompt, 12))
    tell(event="another worker", cached=ready.cached_tokens > 0)
    request = EngineRequest(ready.token_ids, ready.cache_salt, ready.kv_transfer_params, {"max_tokens": 2, "n": 1})
    Redis.from_url(redis.url).flushall()
    forget()
    tell(event="flushed", raw=failure(lambda: backend._connection.engine.complete(request)), again=same())
    redis.stop()
    plain = backend.with_method("sequential").generate(prompt, max_new_tokens=12)
    tell(event="down", arranged=failure(same), plain=len(plain.token_ids) == 12)
    redis.start()
    tell(event="back", again=same())


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
