"""What the claims are tested with: torch's answers for CUDA, without one; published results; a claim's own words."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# Forward only, and in a process of its own: torch built for CPUs aborts where a graph of such tensors is made.
ASK_CUDA = """
import json, logging, torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

def answer(compute):
    try:
        return str(compute().dtype).removeprefix("torch.")
    except RuntimeError as error:
        return str(error)

def fp8(rows, columns):
    return torch.empty(rows, columns, device="cuda", dtype=torch.float8_e4m3fn)

def fp8_product(rows, inner, columns):
    one = torch.empty((), device="cuda")
    a, b = fp8(rows, inner), fp8(columns, inner).t()
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

logging.disable()
with FakeTensorMode(), torch.no_grad():
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    half = torch.empty(4, 8, device="cuda", dtype=torch.float16)
    single = torch.empty(4, 8, device="cuda")
    image, channels = torch.empty(2, 4, 8, 8, device="cuda", dtype=torch.float16), torch.empty(4, device="cuda")
    asked = {
        "linear": lambda: F.linear(single, single),
        "layer_norm": lambda: F.layer_norm(half, (8,)),
        "group_norm": lambda: F.group_norm(image, 2),
        "rms_norm": lambda: F.rms_norm(half, (8,)),
        "batch_norm": lambda: F.batch_norm(image, None, None, channels, channels, training=True),
        "sum": half.sum,
        "mean": half.mean,
        "softmax": lambda: half.softmax(-1),
        "cross_entropy": lambda: torch.nn.functional.cross_entropy(half, half),
        "exp": half.exp,
        "binary_cross_entropy": lambda: F.binary_cross_entropy(single, single),
        "binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(half, half),
        "product of 17": lambda: torch.empty(17, 17, device="cuda") @ torch.empty(17, 17, device="cuda"),
        "fp8 product, inner 24": lambda: fp8_product(16, 24, 16),
        "fp8 product, columns 24": lambda: fp8_product(16, 32, 24),
        "fp8 product, inner 32": lambda: fp8_product(16, 32, 16),
    }
    answers = {name: answer(compute) for name, compute in asked.items()}
tf32 = {"products": torch.backends.cuda.matmul.allow_tf32, "convolutions": torch.backends.cudnn.allow_tf32}
print(json.dumps({**answers, "tf32": tf32}))
"""


@pytest.fixture(scope="session")
def cuda(warm, tmp_path_factory):
    """In which type CUDA's autocast, for FP16, gives what is asked of it, or the error; and the switches of TF32."""
    done = warm.run("-c", ASK_CUDA, cwd=tmp_path_factory.mktemp("cuda"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def result_named(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def published():
    """The rows of a published result, each by its columns' names."""

    def rows(name):
        result = result_named(name)
        return [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]

    return rows


@pytest.fixture(scope="session")
def notes():
    """The notes of a published result, as one text."""
    return lambda name: "\n".join(result_named(name)["notes"])


@pytest.fixture
def truth(request):
    """What the page says of this test's claim."""
    return request.function.claim.truth
