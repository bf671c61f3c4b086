"""Settings of all tests."""

import os

import pytest

# The tests share a small machine: one math thread per process, also in those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/config/golden from the configs")
