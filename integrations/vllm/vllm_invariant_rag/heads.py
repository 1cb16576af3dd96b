"""Which heads of a layer a tensor-parallel worker of vLLM holds."""

from __future__ import annotations

from vllm_invariant_rag.errors import UnsupportedServer


def local_heads(total: int, size: int, rank: int) -> slice:
    """Return the key-value heads of one worker, as vLLM deals them out.

    With fewer heads than workers, neighbouring workers hold copies of the same head.

    >>> [local_heads(8, 4, rank) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None), slice(6, 8, None)]
    >>> [local_heads(2, 4, rank) for rank in range(4)]
    [slice(0, 1, None), slice(0, 1, None), slice(1, 2, None), slice(1, 2, None)]

    Args:
        total: Key-value heads of the model.
        size: Workers that share a layer.
        rank: Which of them this is.

    Raises:
        UnsupportedServer: The heads cannot be dealt out evenly.
    """
    if total % size and size % total:
        raise UnsupportedServer(f"expected {total} key-value heads to be shared evenly, got {size} workers")
    if total >= size:
        each = total // size
        return slice(rank * each, (rank + 1) * each)
    head = rank // (size // total)
    return slice(head, head + 1)
