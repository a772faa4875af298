"""The example of a LangChain vector store passes LangChain's standard tests, where these are installed.

They are of no extra. In an environment with langchain-tests: ``pytest --asyncio-mode=auto
-o asyncio_default_fixture_loop_scope=function tests/unit/test_langchain.py``.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

suite = pytest.importorskip(
    "langchain_tests.integration_tests", reason="langchain-tests is not installed"
)
RECIPE = Path(__file__).parents[2] / "recipes" / "langchain_store.py"


class TestGeniusStore(suite.VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path):
        return runpy.run_path(str(RECIPE))["GeniusStore"](
            tmp_path / "texts.index", self.get_embeddings()
        )
