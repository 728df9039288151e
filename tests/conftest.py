"""What all tests share. Modules in `tests/tools` are imported by name: `import synthetic`."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; read when triton is imported

sys.path.append(str(Path(__file__).parent / "tools"))
torch.set_num_threads(1)  # tensors are tiny here: more threads only wait for each other

# The same examples in every run; no time limit, since machines are shared.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def synthetic_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace with the exact shares and mvar, of a few requests."""
    import synthetic  # on the path from here on

    shape = synthetic.Shape(requests=4, layers=4, kv_heads=2, steps=8, estimators=("exact", "mvar"), seed=1)
    return synthetic.write(tmp_path_factory.mktemp("synthetic") / "trace", shape)
