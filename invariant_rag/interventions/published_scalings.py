"""The published parameters of positional hidden-state scaling, from the paper and from its code."""

from __future__ import annotations

from typing import Literal

Source = Literal["paper", "code"]
"""Where published parameters come from: the paper's table, or the files of its repository."""

PUBLISHED: dict[Source, dict[str, tuple[int, float, range]]] = {
    "paper": {
        "meta-llama/Llama-2-7b-chat-hf": (2393, -1.0, range(10, 26)),
        "meta-llama/Llama-2-13b-chat-hf": (4283, -1.0, range(10, 35)),
        "lmsys/vicuna-7b-v1.5-16k": (2393, 0.0, range(10, 26)),
        "lmsys/vicuna-13b-v1.5-16k": (4923, 0.0, range(10, 35)),
        "mistralai/Mistral-7B-Instruct-v0.2": (213, 0.0, range(10, 26)),
        "google/gemma-1.1-7b-it": (1665, 0.0, range(10, 23)),
        "Qwen/Qwen1.5-7B-Chat": (1081, 0.2, range(10, 26)),
        "mosaicml/mpt-30b-chat": (6926, 0.0, range(10, 43)),
    },
    "code": {
        "meta-llama/Llama-2-7b-chat-hf": (2393, -1.0, range(10, 26)),  # config_llama2_7b.json
        "meta-llama/Llama-2-13b-chat-hf": (4283, 0.0, range(10, 35)),  # config_llama2_13b.json, which lacks a comma
        "lmsys/vicuna-7b-v1.5-16k": (2393, 0.0, range(10, 26)),  # config_vicuna_v1.5_7b.json
        "lmsys/vicuna-13b-v1.5-16k": (4923, 0.0, range(10, 35)),  # config_vicuna_v1.5_13b.json, which lacks a comma
        "mistralai/Mistral-7B-Instruct-v0.2": (213, 0.0, range(10, 26)),  # config_mistral_7b_v0.2.json
        "google/gemma-1.1-7b-it": (1665, 0.0, range(10, 26)),  # config_gemma-7b.json
        "Qwen/Qwen1.5-7B-Chat": (1081, 0.0, range(10, 26)),  # config_qwen1.5-7b.json
        "mosaicml/mpt-30b-chat": (6926, -1.0, range(10, 43)),  # config_mpt_30b.json
    },
}
"""Dimension, factor and layers by hub id, in both sources.

`paper` is arXiv 2406.02536, table 5; `code` is the folder `configs` of PositionalHidden/PositionalHidden at f3bcd55.
They differ in the factor for Llama-2-13b, Qwen and MPT, and in the layers for Gemma. MPT has ALiBi instead of rotary
positions; its row does not depend on how positions are encoded, so it applies wherever the probe accepts the model.
"""
