"""The option --device of tests marked gpu, and the device as a fixture.

A plugin of pytest: `make gpu-check` loads it without conftest.py, which needs MPI.
"""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "compared with the CPU by tests marked gpu; cpu is a dry run without a GPU"
    parser.addoption("--device", default="cuda", choices=("cuda", "cpu"), help=help)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that is compared with the CPU. Tests are skipped where it is absent."""
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU; --device cpu is a dry run without one")
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", 0)
