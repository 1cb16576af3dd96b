"""What would be computed causally, or was not compared, is refused: configurations at the start, requests as they come.

Models that are served answer as here: grouped heads, norms of queries, sliding windows, heads of two workers.
"""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from invariant_rag import Prompt
from invariant_rag.arrangement import Layout
from invariant_rag.errors import UnsupportedCombination

from tests.family import METHODS
from vllm_invariant_rag import InvariantRAGConnector, UnsupportedServer
from vllm_invariant_rag.arranged_prompt import ArrangedPrompt
from vllm_invariant_rag.attention import STEP, ArrangedAttentionImpl
from vllm_invariant_rag.engines import ServerFacts


def with_change(config, path, value):
    """A copy of vLLM's configuration in which one field differs."""
    changed, (first, _, rest) = copy(config), path.partition(".")
    vars(changed)[first] = with_change(getattr(config, first), rest, value) if rest else value
    return changed


SILENT = {
    "vllm.scheduler_config.enable_chunked_prefill": (True, "--no-enable-chunked-prefill"),
    "vllm.scheduler_config.long_prefill_token_threshold": (64, "--no-enable-chunked-prefill"),
    "vllm.kv_transfer_config.kv_role": ("kv_consumer", "kv_role"),
    "vllm.kv_transfer_config.kv_load_failure_policy": ("recompute", "computes refused requests causally"),
    "vllm.model_config.hf_text_config.model_type": ("gpt_oss", "expected a model of llama, mistral, qwen2, qwen3"),
    "vllm.cache_config.cache_dtype": ("fp8", "--kv-cache-dtype"),
    "vllm.speculative_config": ({"method": "ngram"}, "speculative decoding"),
    "vllm.parallel_config.enable_dbo": (True, "dual batch overlap"),
    "vllm.parallel_config.decode_context_parallel_size": (2, "context parallelism"),
    "caches.kv_cache_groups": ([None, None], "--disable-hybrid-kv-cache-manager"),
}


@pytest.mark.parametrize("field", SILENT)
def test_a_configuration_that_is_not_exact_is_refused(field, core):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    value, words = SILENT[field]
    changed = with_change(SimpleNamespace(vllm=core.vllm_config, caches=core.scheduler.kv_cache_config), field, value)
    with pytest.raises(UnsupportedServer, match=words):
        InvariantRAGConnector(changed.vllm, KVConnectorRole.SCHEDULER, changed.caches)


LAYOUT = Layout((4, 9), ((20, 20),))
SPECIAL = {"lora_request": "adapter", "mm_features": ["image"], "prompt_embeds": [[0.0]] * 53, "resumable": True}


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


@pytest.mark.parametrize("field", SPECIAL)
def test_a_request_that_was_not_compared_fails_with_all_of_its_tokens(field, core):
    connector = core.scheduler.connector
    assert (failing(connector), failing(connector, **{field: SPECIAL[field]})) == (0, 52)


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


# --- engines of `tests.family`, which start in processes of their own ---


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "two workers"])
def test_a_family_gives_the_tokens_of_generate(case, families):
    found = families[case]
    assert [each["method"] for each in found[::2]] == list(METHODS)
    assert all(each["same"] for each in found), found
    assert all((each["cached"] > 0) == (each["method"] != "pine") for each in found[1::2]), found


def test_behind_a_sliding_window_nothing_is_reused_and_methods_that_look_back_are_refused(families):
    """Mistral with a window of 48 tokens, and a prompt of 162."""
    found = families["mistral"]
    assert [each["method"] for each in found[::2]] == list(METHODS)
    for each in found:
        if each["method"] in ("set-based", "pine"):
            assert "sliding window of 48" in each["refused"]
        else:
            assert each["same"], each
            assert each["method"] == "sequential" or each["cached"] == 0


def test_quantized_weights_are_attended_to_as_any_are(families):
    """GPTQ with 4 bits, computed in float16, against float32 here; rounding moves scores less than other methods do."""

    def distance(scores, others):
        return max(abs(one - other) for one, other in zip(scores, others, strict=True))

    found = families["gptq"]
    assert [each["method"] for each in found] == list(METHODS)
    for each in found:
        far = distance(each["here"], each["there"])
        assert all(10 * far < distance(each["here"], other["here"]) for other in found if other is not each)


def test_an_engine_that_would_read_causally_says_why_it_does_not_start_and_plain_requests_are_those_without_us(
    families,
):
    assert "expected no chunked prefill" in families["chunked prefill"][0]["refused"]
    assert "with the plug-in invariant_rag in VLLM_PLUGINS" in families["no plug-in"][0]["refused"]
    (ours,), (theirs,) = families["plain"], families["plain, no plug-in"]
    assert ours["told"] == theirs["told"], "bit by bit"
    assert "logprob=" in ours["told"][0]
