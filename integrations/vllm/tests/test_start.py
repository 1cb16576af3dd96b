"""What the README, the examples and the notebook of the cookbook tell people can be started, and happens.

What would be computed causally, or was not compared, is refused: configurations at the start, requests as they come.
Models that are served answer as here: grouped heads, norms of queries, sliding windows, heads of two workers. What
there is to tell of them is written by `python -m tests.test_start FOLDER`: importing vLLM takes longer than most
cases, so each is a fork of a process that has imported it.
"""

import importlib
import json
import os
import random
import re
import sys
from copy import copy
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import yaml
from invariant_rag import InvariantModel, Prompt
from invariant_rag.arrangement import Layout
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.testing import tiny_model
from nbclient import NotebookClient
from safetensors.torch import save_file

from tests.conftest import TRANSFER, Pair, engine
from vllm_invariant_rag import InvariantRAGConnector, UnsupportedServer, VLLMBackend, requirements
from vllm_invariant_rag.arranged_prompt import ArrangedPrompt, check_method
from vllm_invariant_rag.attention import STEP, ArrangedAttentionImpl
from vllm_invariant_rag.engines import ServerFacts

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT.parents[1] / "cookbook" / "09_serve_with_vllm.ipynb"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
README = (ROOT / "README.md").read_text(encoding="utf-8")
STACK = yaml.safe_load((ROOT / "examples/production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"][0]
TEXTS = {
    "README.md": README,
    "service": (ROOT / "examples/vllm-invariant-rag.service").read_text(encoding="utf-8"),
    "compose.yaml": yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]["vllm"]["command"][0],
    "production-stack.yaml": "--no-enable-chunked-prefill "
    + " ".join(f"'{each}'" if each.startswith("{") else each for each in STACK["vllmConfig"]["extraArgs"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_launch_line_names_what_exists(name):
    text = TEXTS[name]
    (transfer,) = re.findall(r"--kv-transfer-config\s+'(.*?)'", text, re.DOTALL)
    assert json.loads(transfer) == TRANSFER
    (middleware,) = re.findall(r"--middleware (\S+)", text)
    for named in (middleware, f"{TRANSFER['kv_connector_module_path']}.{TRANSFER['kv_connector']}"):
        path, _, attribute = named.rpartition(".")
        assert hasattr(importlib.import_module(path), attribute)
    assert "--no-enable-chunked-prefill" in text
    assert STACK["vllmConfig"]["enableChunkedPrefill"] is False


def test_the_table_of_methods_tells_what_the_code_does():
    rows = re.findall(r"^\| (`.+?) \| (yes).*?\|", README, re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(.+?)`", names)} == set(METHODS)
    for name in METHODS:
        check_method(resolve_method(name))


def outputs(notebook):
    """What each output is and says, with a mark for each number of many digits; and these numbers."""
    found = [each for cell in notebook.cells for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
    kinds = [f"{each.output_type} {sorted(each.get('data', ()))}" for each in found]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in found]
    texts = [each.replace(f"{ROOT.parents[1]}/", "") for each in texts]
    marked = [NUMBER.sub("#", each) for each in texts]
    return [*zip(kinds, marked, strict=True)], [float(each) for text in texts for each in NUMBER.findall(text)]


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_the_notebook_has_outputs_and_running_it_gives_them_again(server, monkeypatch):
    monkeypatch.setenv("VLLM_URL", server.url)
    monkeypatch.setenv("VLLM_API_KEY", server.KEY)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (kept, numbers), code = outputs(notebook), [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(kept) == len(code) + 1  # with a figure
    private = r"(/tmp|/home|/root|/work|/Users)/|127\.0\.0\.1:(?!8000)"
    assert not re.search(private, str([each.outputs for each in code]))
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    again, numbers_again = outputs(notebook)
    assert again == kept
    assert numbers_again == pytest.approx(numbers, abs=2e-3)  # log-probabilities, by the kernels of this machine
    printed = " ".join(said for _, said in kept)
    assert "green and black" in printed
    assert "own parameters" in printed


def with_change(config, path, value):
    """A copy of vLLM's configuration in which one field differs."""
    changed, (first, _, rest) = copy(config), path.partition(".")
    vars(changed)[first] = with_change(getattr(config, first), rest, value) if rest else value
    return changed


SILENT = [
    ("vllm.scheduler_config.enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ("vllm.scheduler_config.long_prefill_token_threshold", 64, "--no-enable-chunked-prefill"),
    ("vllm.kv_transfer_config.kv_role", "kv_consumer", "kv_role"),
    ("vllm.kv_transfer_config.kv_load_failure_policy", "recompute", "computes refused requests causally"),
    ("vllm.model_config.hf_text_config.model_type", "gpt_oss", "expected a model of llama, mistral, qwen2, qwen3"),
    ("vllm.model_config.model_arch_config.is_deepseek_mla", True, "latent attention"),
    ("vllm.cache_config.cache_dtype", "fp8", "--kv-cache-dtype"),
    ("vllm.speculative_config", {"method": "ngram"}, "speculative decoding"),
    ("vllm.parallel_config.enable_dbo", True, "dual batch overlap"),
    ("vllm.parallel_config.decode_context_parallel_size", 2, "context parallelism"),
    ("caches.kv_cache_groups", [None, None], "--disable-hybrid-kv-cache-manager"),
]


@pytest.mark.parametrize(("field", "value", "words"), SILENT)
def test_a_configuration_that_is_not_exact_is_refused(field, value, words, core):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    changed = with_change(SimpleNamespace(vllm=core.vllm_config, caches=core.scheduler.kv_cache_config), field, value)
    with pytest.raises(UnsupportedServer, match=words):
        InvariantRAGConnector(changed.vllm, KVConnectorRole.SCHEDULER, changed.caches)


def test_layers_that_share_keys_or_have_other_positions_than_one_rotation_are_refused(core, monkeypatch):
    layers, connector = core.vllm_config.compilation_config.static_forward_context, core.scheduler.connector
    connector.register_kv_caches(layers)
    with pytest.raises(UnsupportedServer, match="share keys and values"):
        connector.register_kv_caches([*layers][1:])
    with monkeypatch.context() as patch:
        patch.setitem(requirements._ROPE_DICT, "of other layers", None)
        with pytest.raises(UnsupportedServer, match="one rotary embedding for all"):
            connector.register_kv_caches(layers)
    monkeypatch.setattr([*layers.values()][-1].impl, "alibi_slopes", [0.5])
    with pytest.raises(UnsupportedServer, match="ALiBi"):
        connector.register_kv_caches(layers)


LAYOUT = Layout((4, 9), ((20, 20),))


def failing(connector, method="rotor", **more):
    """Return how many tokens of a request of 53 count as loaded, and fail."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": ArrangedPrompt(method, LAYOUT).as_params()})
    request = Request("name", list(range(53)), params, None, **more)
    connector.on_new_request(request)
    tokens, later = connector.get_num_new_matched_tokens(request, 0)
    connector.request_finished(request, [])
    assert later is False
    return tokens


def test_a_request_that_was_not_compared_fails_with_all_of_its_tokens(core):
    special = {"lora_request": "adapter", "mm_features": ["image"], "prompt_embeds": [[0.0]] * 53, "resumable": True}
    assert failing(core.scheduler.connector) == 0
    assert [failing(core.scheduler.connector, **{field: value}) for field, value in special.items()] == [52] * 4


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("arranges_decoding", False, "CUDA graphs replay"), ("sliding_window", 48, "sliding window of 48 tokens")],
)
def test_an_answer_that_would_be_decoded_otherwise_is_refused(field, value, words, core, pair, monkeypatch):
    connector = core.scheduler.connector
    for holder, name in ((connector, "_facts"), (pair.there._engine, "facts")):
        monkeypatch.setattr(holder, name, replace(connector._facts, **{field: value}))
    assert (failing(connector), failing(connector, "set-based")) == (0, 52)
    prompt = Prompt(prefix=[5], segments=[[6] * 30, [7] * 30], suffix=[8])
    pair.there.with_method("rotor").generate(prompt, max_new_tokens=1)
    with pytest.raises(UnsupportedCombination, match=words):
        pair.there.with_method("set-based").generate(prompt, max_new_tokens=1)


def test_graphs_of_whole_batches_replay_what_vllm_would_attend_to(core):
    from vllm.config import CUDAGraphMode

    for mode, arranges in (("NONE", True), ("PIECEWISE", True), ("FULL_DECODE_ONLY", False), ("FULL", False)):
        changed = with_change(core.vllm_config, "compilation_config.cudagraph_mode", CUDAGraphMode[mode])
        assert ServerFacts.of(changed).arranges_decoding is arranges


def test_a_batch_that_lacks_an_arranged_request_is_an_error(monkeypatch):
    tokens, batch = torch.zeros(53, 1, 8), {"query_start_loc": [0, 53], "seq_lens": [53], "block_table": [[4, 5]]}
    metadata = SimpleNamespace(**{name: torch.tensor(each) for name, each in batch.items()})
    monkeypatch.setattr(STEP, "block_size", 32)
    monkeypatch.setattr(STEP, "prompts", {3: ArrangedPrompt("rotor", LAYOUT)})
    with pytest.raises(UnsupportedServer, match="expected 1 more requests"):
        ArrangedAttentionImpl().forward(None, tokens, tokens, tokens, torch.zeros(2, 1, 32, 16), metadata, tokens)


COMPARED = ["sequential", "rotor", "isolated", "set-based", "pine"]
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
    for method in COMPARED:
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
    assert [method for method, *_ in families[case]] == COMPARED
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
    scores = {method: torch.tensor(told, dtype=torch.float64) for method, *told in families["gptq"]}
    assert [*scores] == COMPARED
    for method, (here, there) in scores.items():
        others = [other for name, (other, _) in scores.items() if name != method]
        assert all(10 * (here - there).abs().max() < (here - other).abs().max() for other in others)


def test_an_engine_that_would_read_causally_says_why_it_does_not_start_and_plain_requests_are_as_without_us(families):
    assert "expected no chunked prefill" in families["chunked prefill"][0]
    assert "with the plug-in invariant_rag in VLLM_PLUGINS" in families["no plug-in"][0]
    assert families["plain"] == families["plain, no plug-in"], "bit by bit"
    assert "logprob=" in families["plain"][0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
