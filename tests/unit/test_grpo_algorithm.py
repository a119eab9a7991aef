"""GRPO's advantages and loss against formulas that are written out token by token, in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from examples.grpo.algorithm import advantages, grpo_loss, kl_estimate


def test_advantages_are_standard_scores_within_a_prompt() -> None:
    rewards = torch.rand(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = advantages(rewards)
    for of_prompt, scores in zip(rewards.tolist(), found.tolist(), strict=True):
        mean, spread = statistics.fmean(of_prompt), statistics.pstdev(of_prompt)
        assert scores == pytest.approx([(reward - mean) / (spread + 1e-4) for reward in of_prompt], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_prompt_whose_samples_got_the_same_teaches_nothing(reward: float) -> None:
    rewards = torch.tensor([[reward] * 7, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert advantages(rewards)[0].tolist() == [0.0] * 7
    assert advantages(rewards)[1].abs().min() > 0.3


def _case(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 9)
    trainer, noise, other = (torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = (torch.rand(*shape, generator=generator) < 0.6).double()
    return {
        "trainer": (trainer - 3.0).to(dtype).requires_grad_(),
        "engine": (trainer - 3.0 + 0.3 * noise).to(dtype),
        "reference": (trainer - 3.0 + 0.5 * other).to(dtype),
        "advantage": torch.randn(6, dtype=torch.float64, generator=generator).to(dtype),
        "mask": mask.to(dtype),
    }


def _written_out(
    case: dict[str, torch.Tensor], clip: float, coefficient: float
) -> tuple[float, float, float, int, int]:
    loss, kl, kl_reference, clipped, tokens = 0.0, 0.0, 0.0, 0, 0
    for row, gain in enumerate(case["advantage"].double().tolist()):
        for at in range(case["mask"].shape[1]):
            if case["mask"][row, at] == 0:
                continue
            mine, drawn, near = (case[name][row, at].double().item() for name in ("trainer", "engine", "reference"))
            ratio = math.exp(mine - drawn)
            kept = min(max(ratio, 1.0 - clip), 1.0 + clip)
            loss -= min(ratio * gain, kept * gain)
            kl_reference += math.exp(near - mine) - 1.0 - (near - mine)
            kl += math.exp(mine - drawn) - 1.0 - (mine - drawn)
            clipped += ratio * gain > kept * gain
            tokens += 1
    return loss + coefficient * kl_reference, kl, kl_reference, clipped, tokens


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_is_the_formula(coefficient: float, dtype: torch.dtype, tolerance: float) -> None:
    case = _case(dtype)
    found = grpo_loss(**case, clip=0.2, kl_coefficient=coefficient)
    loss, kl, kl_reference, clipped, tokens = _written_out(case, 0.2, coefficient)
    assert found.loss.item() == pytest.approx(loss, rel=tolerance, abs=tolerance)
    assert found.kl_engine.item() == pytest.approx(kl, rel=tolerance)
    assert found.kl_reference.item() == pytest.approx(kl_reference, rel=tolerance)
    assert (found.clipped.item(), found.tokens.item()) == (clipped, tokens)
    assert 0 < clipped < tokens


def test_gradient_is_the_formula_s() -> None:
    case = _case(torch.float64)
    grpo_loss(**case, clip=0.2, kl_coefficient=0.1).loss.backward()
    step = 1e-6
    for row, at in ((0, 0), (1, 3), (2, 5), (4, 8), (5, 1)):
        moved = {sign: {**case, "trainer": case["trainer"].detach().clone()} for sign in (1, -1)}
        for sign, changed in moved.items():
            changed["trainer"][row, at] += sign * step
        expected = (_written_out(moved[1], 0.2, 0.1)[0] - _written_out(moved[-1], 0.2, 0.1)[0]) / (2 * step)
        assert case["trainer"].grad[row, at].item() == pytest.approx(expected, abs=1e-7)


def test_gradient_on_policy_is_that_of_the_policy_gradient() -> None:
    case = _case(torch.float64)
    grpo_loss(case["trainer"], case["trainer"].detach(), case["advantage"], case["mask"], clip=0.2).loss.backward()
    assert torch.equal(case["trainer"].grad, -case["advantage"][:, None] * case["mask"])


@pytest.mark.parametrize("left_out", [("engine", -torch.inf), ("trainer", -1e4), ("reference", torch.nan)])
def test_what_the_mask_leaves_out_may_be_anything(left_out: tuple[str, float]) -> None:
    name, value = left_out
    case = _case(torch.float64)
    expected = grpo_loss(**case, clip=0.2, kl_coefficient=0.1)
    expected.loss.backward()
    gradient = case["trainer"].grad.clone()
    outside = case["mask"] == 0
    changed = {**case, name: case[name].detach().masked_fill(outside, value)}
    changed["trainer"] = changed["trainer"].detach().clone().requires_grad_()
    found = grpo_loss(**changed, clip=0.2, kl_coefficient=0.1)
    found.loss.backward()
    assert (found.loss.item(), found.kl_engine.item()) == (expected.loss.item(), expected.kl_engine.item())
    assert torch.equal(changed["trainer"].grad, gradient)


def test_estimate_of_kl_is_right_on_average_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(2)
    of, to = (torch.randn(32, dtype=torch.float64, generator=generator).log_softmax(0) for _ in range(2))
    each = kl_estimate(of, to)
    assert (each >= 0.0).all()
    assert (of.exp() * each).sum().item() == pytest.approx((of.exp() * (of - to)).sum().item(), rel=1e-12)
