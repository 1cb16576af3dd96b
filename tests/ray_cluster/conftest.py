"""The benchmark files and the tiny model of the tests of evaluation."""

from tests.evaluation.conftest import files as files
from tests.evaluation.conftest import lm as lm
