"""The benchmark files and the tiny model of the tests of evaluation."""

from tests.evaluation.conftest import files, lm

__all__ = ["files", "lm"]
