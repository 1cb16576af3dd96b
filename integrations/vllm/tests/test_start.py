"""A vLLM that would compute documents causally does not start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.servers import free_port, launch_arguments

CASES = {
    "chunked prefill": (["--enable-chunked-prefill"], {}, "expected no chunked prefill"),
    "no plug-in": ([], {"VLLM_PLUGINS": "another"}, "with the plug-in invariant_rag in VLLM_PLUGINS"),
    "fp8 keys": (["--kv-cache-dtype", "fp8"], {}, "expected keys and values as they are computed"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_says_why(case: str) -> None:
    options, environment, words = CASES[case]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *launch_arguments(free_port(), "key")]
    run = subprocess.run(
        [*command, *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode != 0
    assert words in run.stdout + run.stderr
