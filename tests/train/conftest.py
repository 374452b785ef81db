import pytest
import torch


@pytest.fixture(scope="module")
def small_operations_are_cheap():
    """oneDNN sets up for a millisecond where the multiplication takes ten microseconds."""
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    yield
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(onednn)
