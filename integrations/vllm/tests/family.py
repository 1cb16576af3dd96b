"""A model of a family on vLLM, in a process of its own: `python -m tests.family FOLDER FAMILY SETTINGS`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401 - the environment variables of vLLM
from tests.servers import TRANSFER

METHODS = ("sequential", "rotor", "isolated", "set-based", "pine")


def main(folder: Path, family: str, settings: dict[str, Any]) -> None:
    import torch
    from invariant_rag import InvariantModel, Prompt
    from invariant_rag.errors import UnsupportedCombination
    from invariant_rag.testing import tiny_model
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from vllm_invariant_rag import VLLMBackend

    torch.set_num_threads(1)
    engine = {"distributed_executor_backend": "uni", **settings.pop("engine", {})}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny_model(family, num_hidden_layers=2, vocab_size=261, max_position_embeddings=2048, eos_token_id=None,
                       **{**sizes, **settings})  # fmt: skip
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(3)  # random weights hardly attend; larger ones tell arrangements apart
    model.save_pretrained(folder)
    llm = LLM(
        model=str(folder), dtype="float32", max_model_len=512, max_num_batched_tokens=512, max_num_seqs=4,
        enable_chunked_prefill=False, block_size=32, num_gpu_blocks_override=96, skip_tokenizer_init=True,
        enforce_eager=True, disable_log_stats=True, kv_transfer_config=KVTransferConfig(**TRANSFER), **engine,
    )  # fmt: skip
    lm, rng = InvariantModel(model), random.Random(1)
    backend = VLLMBackend(lm, llm=llm)
    texts = [[rng.randrange(5, 250) for _ in range(length)] for length in (9, 40, 25, 50, 31, 7)]
    prompts = [Prompt(prefix=texts[0], segments=texts[1:5], suffix=suffix) for suffix in (texts[5], texts[5][::-1])]
    for method in METHODS:
        here = lm.with_method(method, ordering="lexical").generate(prompts, max_new_tokens=12)
        for state in ("cold", "warm"):
            line: dict[str, Any] = {"method": method, "state": state}
            try:
                there = backend.with_method(method, ordering="lexical").generate(prompts, max_new_tokens=12)
            except UnsupportedCombination as error:
                line["refused"] = str(error)
            else:
                line["same"] = [each.token_ids for each in here] == [each.token_ids for each in there]
                line["cached"] = there[0].usage.cached_tokens
            sys.stdout.write("ANSWER " + json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
