"""Capsules of steps in precisions that are more than autocast: they are run again, or what stands in is told."""

import math

import pytest
import torch
from torch import nn

from ampwise import Engine, Policy
from ampwise.errors import BadInput, UnknownName
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import recipe_for_format
from ampwise.trace.capsule import CapsuleContents, read
from ampwise.trace.capsule.builder import BuiltModel
from ampwise.trace.capsule.capsule_replay import load_weights, precision_for, replay_capsule
from ampwise.trace.capsule.saving import Capsules

CPU = torch.device("cpu")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def contents_of(model, x, precision, **facts):
    return CapsuleContents(
        args=(x,), weights=dict(model.named_parameters()), precision=precision, device="cpu", **facts
    )


def again(contents, asked=None, model=None):
    model = model or net()
    load_weights(contents, [model])
    built = BuiltModel(models=(model,), loss_fn=lambda x: model(x).square().mean(), made_by="net")
    return replay_capsule(contents, built, CPU, precision_for(asked, contents, CPU))


def test_a_step_that_was_emulated_is_emulated_again():
    model, x = net(), torch.randn(4, 8)
    with emulated(model, {model: recipe_for_format("mxfp4")}):
        expected = model(x).square().mean().item()
    plain = model(x).square().mean().item()
    done = again(contents_of(model, x, "emulate:mxfp4"))
    assert (done.ended.loss, done.precision, done.as_it_was, done.remarks) == (expected, "emulate:mxfp4", True, ())
    assert expected != plain
    assert again(contents_of(model, x, "emulate:mxfp4"), "fp32").ended.loss == plain


def test_any_step_can_be_emulated():
    model, x = net(), torch.randn(4, 8)
    with emulated(model, {model: recipe_for_format("nvfp4")}):
        expected = model(x).square().mean().item()
    done = again(contents_of(model, x, "fp32"), "emulate:nvfp4,plain")
    assert (done.ended.loss, done.precision, done.as_it_was) == (expected, "emulate:nvfp4,plain", False)


def test_modules_that_were_kept_are_kept():
    model, x = net(), torch.randn(4, 8)
    policy = Policy("emulate:mxfp4").keep("fp32", "0", "2")
    done = again(contents_of(model, x, "emulate:mxfp4", policy=policy.as_dict()))
    assert done.ended.loss == model(x).square().mean().item()


@pytest.mark.parametrize("precision", ["fp8", "bf16-pure", "bf16-pure,kahan"])
def test_what_has_layers_or_weights_of_its_own_is_run_in_bf16_and_that_is_said(precision):
    model, x = net(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).square().mean().item()
    done = again(contents_of(model, x, precision))
    assert (done.ended.loss, done.precision, done.as_it_was) == (expected, "bf16", False)
    assert done.remarks == (
        f"The step ran in {precision}, with special layers or weights; this replay uses autocast to bf16.",
    )


def test_weights_in_bf16_are_given_to_a_model_in_fp32_only_where_the_precision_had_them_so():
    pure, x = net().bfloat16(), torch.randn(4, 8)
    model = net()
    load_weights(contents_of(pure, x, "bf16-pure"), [model])
    assert all(torch.equal(a, b.float()) for a, b in zip(model.parameters(), pure.parameters(), strict=True))
    with pytest.raises(BadInput, match=r"the weight '0.weight' is float32 \(32, 8\) in the model and bfloat16"):
        load_weights(contents_of(pure, x, "bf16"), [model])
    with pytest.raises(BadInput, match=r"is bfloat16 .* in the model and float32"):
        load_weights(contents_of(net(), x, "bf16-pure"), [net().bfloat16()])


@pytest.mark.parametrize("precision", ["emulate:mxfp8", "emulate:e4m3", "emulate:nvfp4,stochastic"])
def test_an_engine_saves_a_bad_step_that_is_bad_again(tmp_path, precision):
    model = net()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, callbacks=[Capsules(tmp_path)])
    x = torch.randn(4, 8)

    def loss_fn(x):
        return (0.0 * model(x)).log().mean()

    step = engine.step(loss_fn, x)
    assert step.skipped
    assert [finding.rule.name for finding in engine.findings], "explained through the emulation"
    (path,) = tmp_path.iterdir()
    contents = read(path)
    assert contents.precision == engine.precision
    built = BuiltModel(models=(model,), loss_fn=loss_fn, made_by="net")
    done = replay_capsule(contents, built, CPU, precision_for(None, contents, CPU))
    assert not done.ended.finite
    assert done.ended.loss == -math.inf
    assert done.precision == engine.precision


def test_a_product_that_goes_bad_is_found_and_not_how_it_is_emulated(capsys):
    model = net()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "emulate:fp16")
    engine.step(lambda x: model(1e6 * x).square().mean(), torch.randn(4, 8))  # which no operand in FP16 holds
    (finding,) = engine.findings
    assert finding.place.module == "0"
    assert "the matmul (addmm) of `0` (Linear) gives" in finding.message
    capsys.readouterr()


def test_names_there_are_not():
    contents = contents_of(net(), torch.randn(1, 8), "fp32")
    with pytest.raises(UnknownName, match=r"unknown precision 'fp61'. Did you mean fp16"):
        precision_for("fp61", contents, CPU)
    with pytest.raises(UnknownName, match="unknown format 'e4m4'"):
        precision_for("emulate:e4m4", contents, CPU)
    with pytest.raises(
        BadInput, match=r"^--precision fp8: it needs special layers or weights. A replay runs in fp32, "
    ):
        precision_for("fp8", contents, CPU)
