"""Models of other families, and engines with other options, on vLLM: answers as here, or refusals.

Grouped heads, norms of queries, sliding windows, heads of two workers. `python -m tests.test_families FOLDER` writes
what there is to tell. Importing vLLM takes longer than most cases, so each is a fork of a process that has imported it.
"""

import json
import os
import random
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.testing import tiny_model
from safetensors.torch import save_file

from tests.conftest import Pair, engine
from vllm_invariant_rag import UnsupportedServer, VLLMBackend

METHODS = ["sequential", "rotor", "isolated", "set-based", "pine"]
CASES = {  # family, sizes, and options of the engine
    "chunked prefill": ("llama", {}, {"enable_chunked_prefill": True}),
    "no plug-in": ("llama", {}, {}),
    "plain": ("llama", {}, {}),
    "plain, no plug-in": ("llama", {}, {"kv_transfer_config": None}),
    "qwen2": ("qwen2", {"hidden_size": 256}, {}),  # the size of a head follows from the width
    "qwen3": ("qwen3", {}, {}),
    "mistral": ("mistral", {"sliding_window": 48}, {}),
    "gptq": ("llama", {"intermediate_size": 256}, {"dtype": "float16"}),
    "two workers": ("llama", {}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
}
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 261,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}


def answers(folder, case):
    """Yield what there is to tell of a case."""
    family, settings, options = CASES[case]
    model = tiny_model(family, **{**SIZES, **settings})
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2 if case == "gptq" else 3)  # random weights hardly attend; larger ones tell arrangements apart
    save_quantized(model, folder) if case == "gptq" else model.save_pretrained(folder)
    try:
        llm = engine(folder, 512, max_num_seqs=4, num_gpu_blocks_override=96, skip_tokenizer_init=True, **options)
    except UnsupportedServer as error:
        yield str(error)
        return
    rng = random.Random(1)
    texts = [[rng.randrange(5, 250) for _ in range(length)] for length in (9, 40, 25, 50, 31, 7)]
    if case.startswith("plain"):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        yield from (repr(each.outputs[0].logprobs) for each in outputs)
        return
    lm = InvariantModel(model)
    pair = Pair(lm, VLLMBackend(lm, llm=llm))
    prompts = [Prompt(prefix=texts[0], segments=texts[1:5], suffix=suffix) for suffix in (texts[5], texts[5][::-1])]
    for method in METHODS:
        here, there = pair.using(method).here, pair.using(method).there
        if case == "gptq":
            yield method, *(each.score(prompts[0], [[token] for token in range(20, 60)]) for each in (here, there))
            continue
        expected = [each.token_ids for each in here.generate(prompts, max_new_tokens=12)]
        try:
            rounds = [there.generate(prompts, max_new_tokens=12) for _ in ("cold", "warm")]
        except UnsupportedCombination as error:
            yield method, str(error)
            continue
        told = [(found[0].usage.cached_tokens, [each.token_ids for each in found]) for found in rounds]
        yield method, *(cached if token_ids == expected else "other tokens" for cached, token_ids in told)
    llm.llm_engine.engine_core.shutdown()  # and its workers


def save_quantized(model, folder, group=32):
    """Save a model in the format of GPTQ, with 4 bits, and round its own weights to the same."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            weight = module.weight.data
            groups = weight.unflatten(1, (-1, group))
            scales = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
            levels = (groups / scales).round().clamp(-8, 7)
            weight.copy_((levels * scales).flatten(1))
            digits = (levels.flatten(1).T.int() + 8).unflatten(0, (-1, 8)) << (4 * torch.arange(8))[:, None]
            del state[name + ".weight"]
            state[name + ".qweight"] = digits.sum(1, dtype=torch.int32)
            state[name + ".scales"] = scales[..., 0].T.half().contiguous()
            state[name + ".qzeros"] = torch.full((scales.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32)
            state[name + ".g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // group
    kind = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    model.config.quantization_config = kind
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    save_file(state, folder / "model.safetensors")


def main(folder):
    import vllm.v1.engine.llm_engine  # noqa: F401 - before the forks

    torch.set_num_threads(1)
    for case in CASES:
        child = get_context("fork").Process(target=write, args=(folder, case))
        child.start()
        child.join()


def write(folder, case):
    if case.endswith("no plug-in"):
        os.environ["VLLM_PLUGINS"] = "another"
    (folder / f"{case}.json").write_text(json.dumps([*answers(folder / case, case)]))


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "two workers", "mistral"])
def test_a_family_gives_the_tokens_of_generate_and_what_a_sliding_window_would_cut_is_refused(case, families):
    """Mistral has a window of 48 tokens, and a prompt of 162: none of them is reused, and no method may look back."""
    assert [method for method, *_ in families[case]] == METHODS
    for method, *told in families[case]:
        if case == "mistral" and method in {"set-based", "pine"}:
            assert "sliding window of 48" in told[0]
            continue
        cold, warm = told
        assert {type(cold), type(warm)} == {int}, told  # cached tokens, where the answers are those of `generate`
        if case != "mistral":
            assert (warm > 0) == (method != "pine"), told
        elif method != "sequential":
            assert cold == warm == 0


def test_quantized_weights_are_attended_to_as_any_are(families):
    """GPTQ with 4 bits, computed in float16, against float32 here; rounding moves scores less than other methods do."""

    def distance(scores, others):
        return max(abs(one - other) for one, other in zip(scores, others, strict=True))

    assert [method for method, *_ in families["gptq"]] == METHODS
    for method, here, there in families["gptq"]:
        others = [scores for name, scores, _ in families["gptq"] if name != method]
        assert all(10 * distance(here, there) < distance(here, other) for other in others)


def test_an_engine_that_would_read_causally_says_why_it_does_not_start_and_plain_requests_are_as_without_us(families):
    assert "expected no chunked prefill" in families["chunked prefill"][0]
    assert "with the plug-in invariant_rag in VLLM_PLUGINS" in families["no plug-in"][0]
    assert families["plain"] == families["plain, no plug-in"], "bit by bit"
    assert "logprob=" in families["plain"][0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
