"""The GPU kernels run on a CUDA device where there is one, otherwise in Triton's interpreter."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
