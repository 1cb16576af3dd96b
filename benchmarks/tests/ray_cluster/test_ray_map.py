"""Ray: the records of a run over actors are those of a run without, also when an actor dies."""

from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import (
    ActorsLost,
    ContextOverflow,
    ExtraRequired,
    InvalidChoice,
)

from invariant_rag_benchmarks.config import BenchmarkConfig
from invariant_rag_benchmarks.ray_map import ATTEMPTS, ray_map
from invariant_rag_benchmarks.runner import run_benchmark
from tests.conftest import calling


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster on this machine for all tests: starting one takes seconds."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def saved(chat_llama: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a folder, for actors to load."""
    folder = tmp_path_factory.mktemp("tiny")
    chat_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# What actors run is made within functions: they cannot import this file, and get it by value.


def _square() -> Callable[[], Callable[[int], int]]:
    return lambda: lambda number: number * number


def _dying(folder: str) -> Callable[[], Callable[[int], int]]:
    """A function that kills its actor on items 1 and 3, once each."""

    def work(number: int) -> int:
        mark = Path(folder) / str(number)
        if number in {1, 3} and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    return lambda: work


def _deadly(folder: str) -> Callable[[], Callable[[int], int]]:
    """A function that kills its actor on every item; each actor leaves a file behind."""

    def work(number: int) -> int:
        (Path(folder) / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    return lambda: work


def _failing() -> Callable[[], Callable[[int], int]]:
    def work(number: int) -> int:
        raise ContextOverflow(f"job {number}")

    return lambda: work


@pytest.mark.usefixtures("cluster")
def test_every_item_is_mapped_once():
    assert sorted(ray_map(_square(), range(7), 2)) == [number * number for number in range(7)]


@pytest.mark.usefixtures("cluster")
def test_a_lost_actor_is_replaced_and_its_item_mapped_again(tmp_path: Path):
    found = sorted(ray_map(_dying(str(tmp_path)), range(5), 2))
    assert found == [number * number for number in range(5)]
    assert sorted(mark.name for mark in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.usefixtures("cluster")
def test_an_item_that_kills_every_actor_is_given_up(tmp_path: Path):
    with pytest.raises(ActorsLost, match=str(ATTEMPTS)):
        list(ray_map(_deadly(str(tmp_path)), [0], 1))
    assert len(list(tmp_path.iterdir())) == ATTEMPTS


@pytest.mark.usefixtures("cluster")
def test_an_error_in_an_actor_is_raised_as_it_is():
    with pytest.raises(ContextOverflow, match="job 0"):
        list(ray_map(_failing(), [0], 1))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("killed", [False, True])
def test_actors_write_the_records_of_a_local_run(killed, saved: Path, files: Path, tmp_path: Path):
    config = BenchmarkConfig("xquad", model=str(saved), data=files, batch_size=4, max_new_tokens=4)
    local = run_benchmark(config, tmp_path / "local")
    victims: list[int] = []

    def kill_one() -> None:
        if killed and not victims:
            victims.append(_actor_process())
            os.kill(victims[0], signal.SIGKILL)

    shared = run_benchmark(config, tmp_path / "shared", actors=2, progress=calling(kill_one))
    assert shared.records == local.records
    assert shared.summary == local.summary
    assert shared.config == local.config
    assert len(victims) == killed


def _actor_process() -> int:
    """Id of a process that holds one of the actors of this test's cluster."""
    import psutil

    ours = psutil.Process().children(recursive=True)
    return next(each.pid for each in ours if "_Actor" in " ".join(each.cmdline()))


def test_without_ray_the_error_says_what_to_install(lm: InvariantModel, files: Path, tmp_path: Path, monkeypatch):
    real = builtins.__import__

    def without_ray(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ExtraRequired, match=r'pip install "invariant-rag\[ray\]"'):
        run_benchmark(BenchmarkConfig("xquad", data=files), tmp_path, actors=2)


def test_at_least_one_actor_is_needed():
    with pytest.raises(InvalidChoice):
        list(ray_map(_square(), [1], 0))
