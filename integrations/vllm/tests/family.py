"""Models of other families, and engines with other options, on vLLM: `python -m tests.family FOLDER`.

Importing vLLM takes longer than most cases, so each case is a fork of a process that has imported it.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path

import torch
from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.testing import tiny_model
from safetensors.torch import save_file

from tests import conftest  # noqa: F401 - the environment variables of vLLM
from tests.worlds import Pair, engine
from vllm_invariant_rag import UnsupportedServer, VLLMBackend

METHODS = ("sequential", "rotor", "isolated", "set-based", "pine")
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
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LAYERS = {"num_hidden_layers": 2, "vocab_size": 261, "max_position_embeddings": 2048, "eos_token_id": None}


def answers(folder, case):
    """Yield what there is to tell of a case."""
    family, settings, options = CASES[case]
    model = tiny_model(family, **{**HEADS, **LAYERS, **settings})
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
            scores = [each.score(prompts[0], [[token] for token in range(20, 60)]) for each in (here, there)]
            yield {"method": method, "here": scores[0], "there": scores[1]}
            continue
        expected, told = [each.token_ids for each in here.generate(prompts, max_new_tokens=12)], []
        for _ in ("cold", "warm"):
            try:
                found = there.generate(prompts, max_new_tokens=12)
            except UnsupportedCombination as error:
                told.append(str(error))
            else:
                same = expected == [each.token_ids for each in found]
                told.append(found[0].usage.cached_tokens if same else "other tokens")
        yield method, *told
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
    import vllm.v1.engine.llm_engine  # noqa: F401

    torch.set_num_threads(1)
    for case in CASES:
        if not (child := os.fork()):
            if case.endswith("no plug-in"):
                os.environ["VLLM_PLUGINS"] = "another"
            try:
                (folder / f"{case}.json").write_text(json.dumps([*answers(folder / case, case)]))
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(0)  # what it has written decides
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
