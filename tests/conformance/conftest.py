import pytest

from . import distributed_pair


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forks(request):
    distributed_pair.pythons = lambda: request.getfixturevalue("warm")
