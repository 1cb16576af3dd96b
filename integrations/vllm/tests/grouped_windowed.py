"""Another family on vLLM, in a process of its own: grouped heads, and a sliding window shorter than the prompt.

Run as a script by `test_families.py`; prints one line of JSON per method.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401 - the environment variables of vLLM

METHODS = ["sequential", "rotor", "isolated", "set-based"]


def main(folder: Path) -> None:
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
    transfer: dict[str, Any] = {
        "kv_connector": "InvariantRAGConnector",
        "kv_connector_module_path": "vllm_invariant_rag.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"folder": str(folder / "entries")},
    }
    llm = LLM(
        model=str(folder / "model"), dtype="float32", max_model_len=512, max_num_seqs=4, block_size=32,
        num_gpu_blocks_override=96, skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        distributed_executor_backend="uni", kv_transfer_config=KVTransferConfig(**transfer),
    )  # fmt: skip
    lm, backend, rng = InvariantModel(model), VLLMBackend(llm=llm), random.Random(1)
    texts = [[rng.randrange(5, 250) for _ in range(length)] for length in (9, 40, 25, 50, 31, 7)]
    prompt = Prompt(prefix=texts[0], segments=texts[1:5], suffix=texts[5])
    for method in METHODS:
        here = lm.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        there = backend.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        distance = max(abs(a - b) for a, b in zip(here.logprobs, there.logprobs, strict=True))
        line = {"method": method, "same": here.token_ids == there.token_ids, "distance": distance}
        sys.stdout.write("ANSWER " + json.dumps(line) + "\n")
    try:
        backend.with_method("parallel-windows").generate(prompt, max_new_tokens=2)
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        sys.stdout.write("ANSWER " + json.dumps({"refused": type(error).__name__}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
