from __future__ import annotations

import pytest

from tests.loading.stores import Small, write_all


@pytest.fixture(scope="session")
def stores(tmp_path_factory) -> dict[str, Small]:
    return write_all(tmp_path_factory.mktemp("stores"))
