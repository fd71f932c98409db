"""Losses and models of segments: worked values and gradients, and attention as torch computes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data.trajectories import Trajectories
from labelers.networks import Networks, generator
from labelers.preferences import PreferenceFile
from labelers.segment_models import (
    HEADS,
    AttentionModel,
    SegmentModel,
    StepModel,
    bradley_terry_loss,
    preference_attention,
)

CPU = torch.device("cpu")
REWARDS = np.array(
    [
        [1.986, -1.555, 0.147, -0.708, 1.625],
        [-0.013, -0.813, 0.699, 0.016, -0.378],
        [-0.183, 0.193, -0.927, -2.1, 1.545],
        [-1.021, -0.025, -0.201, 0.681, 1.8],
        [-0.311, -0.317, 1.147, -0.581, 1.519],
        [0.774, 0.574, -1.926, 2.003, -0.405],
        [0.565, 1.258, -0.238, 0.751, -0.22],
        [-0.699, -1.373, -0.288, -0.351, 0.949],
    ]
)
"""Eight segments of five step rewards."""

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 7], [3, 4]]
ENCODED: dict[str, list[object]] = {
    "probability_first": [1.0, 0.0, 0.5, 1.0, 0.5, 0.0],
    "one_hot": [[1, 0], [0, 1], [0.5, 0.5], [1, 0], [0.5, 0.5], [0, 1]],
    "sign": [1, -1, 0, 1, 0, -1],
    "winner": [0, 1, -1, 0, -1, 1],
}
CERTAIN = [0, 1, 3, 5]
"""Pairs that are no ties."""


class EightEpisodes:
    """Each segment as an episode of its own."""

    def trajectories(self, name: str) -> Trajectories:
        return Trajectories(
            observations=np.zeros((48, 1), np.float32),
            actions=np.zeros((40, 1), np.float32),
            offsets=np.arange(0, 41, 5),
            terminated=np.ones(8, bool),
            truncated=np.zeros(8, bool),
            final_observed=np.ones(8, bool),
        )

    def rewards(self, name: str, labels: str) -> np.ndarray:
        raise AssertionError("no rewards are asked for")

    def demonstrations_of_dataset(self) -> str | None:
        return None


def loss_of(path: Path, encoding: str, labels: list[object], which: list[int]) -> float:
    starts = [[5 * a, 5 * b] for a, b in (PAIRS[pair] for pair in which)]
    said = {"length": 5, "starts": starts, "labels": [labels[pair] for pair in which]}
    path.write_text(json.dumps(said))
    found = PreferenceFile.model_validate({"path": path, "encoding": encoding}).resolve(EightEpisodes()).preferences
    assert found is not None
    first, second = torch.from_numpy(REWARDS.reshape(-1)[found.steps].sum(2)).unbind(1)
    return float(bradley_terry_loss(first, second, torch.from_numpy(found.first_better)).mean())


@pytest.mark.parametrize("encoding", ENCODED)
def test_labels_in_any_encoding_have_one_loss(encoding: str, tmp_path: Path) -> None:
    assert loss_of(tmp_path / "a.json", encoding, ENCODED[encoding], [*range(6)]) == pytest.approx(
        0.5308264504, rel=1e-6
    )


def test_the_same_numbers_read_the_other_way_round_have_quite_another_loss(tmp_path: Path) -> None:
    # untied 1 and 0 without a word: the probability of the first, or the index of the winner?
    labels: list[object] = [1, 0, None, 1, None, 0]
    path = tmp_path / "a.json"
    assert loss_of(path, "probability_first", labels, CERTAIN) == pytest.approx(0.20046174875, rel=1e-6)
    assert loss_of(path, "winner", labels, CERTAIN) == pytest.approx(2.39821174875, rel=1e-6)


def test_loss_and_gradient_are_the_worked_values() -> None:
    # sums .6 and .8: P(first better) = 1 / (1 + e^.2) = .450166; -log of it .798139, of the other .598139; tie: mean
    first = torch.tensor([0.6, 0.6, 0.6], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([0.8, 0.8, 0.8], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(first, second, torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))
    assert loss.tolist() == pytest.approx([0.79813887, 0.69813887, 0.59813887])
    loss.sum().backward()
    # P - stated for the first, and the opposite for the second
    assert first.grad is not None and second.grad is not None
    assert first.grad.tolist() == pytest.approx([0.450166 - 1, 0.450166 - 0.5, 0.450166], abs=1e-6)
    assert second.grad.tolist() == pytest.approx([1 - 0.450166, 0.5 - 0.450166, -0.450166], abs=1e-6)


def test_preference_attention_is_the_worked_value() -> None:
    # the mean over i of softmax over t of q_i k_t is w = [.30810958, .16346800, .52842241]; w . r = -.05166624
    q, k, r = torch.tensor([1.0, 2, 0])[:, None], torch.tensor([0.5, -0.5, 1])[:, None], torch.tensor([0.2, 0.6, -0.4])
    assert float(preference_attention(r, q, k)) == pytest.approx(-0.05166624, rel=1e-6)
    # four equal columns multiply q . k by 4 and divide it by sqrt(4): as if q were doubled
    assert float(preference_attention(r, q.expand(3, 4), k.expand(3, 4))) == pytest.approx(
        float(preference_attention(r, 2 * q, k)), rel=1e-6
    )


def test_a_segment_is_worth_the_sum_of_its_steps() -> None:
    # one input, no hidden layer: member 0 says x, member 1 says 2 x + 1
    networks = Networks.of({"weight.0": torch.tensor([[[1.0]], [[2.0]]]), "bias.0": torch.tensor([[[0.0]], [[1.0]]])})
    model = StepModel({"rewards": networks})
    segments = torch.tensor([[1.0, 2, 3], [0, 0, -1]])[None, :, :, None].expand(2, -1, -1, -1)
    assert model.scores(segments).tolist() == [[6, -1], [15, 1]]
    assert model.rewards(segments[0, 0, :, None], torch.zeros(3, dtype=torch.int64)).tolist() == [[1, 2, 3], [3, 5, 7]]


def models() -> list[SegmentModel]:
    starts = [generator(seed, "test") for seed in (0, 1)]
    return [StepModel.fresh(3, (8,), starts, CPU), AttentionModel.fresh(3, (8,), 6, starts, CPU)]


@pytest.mark.parametrize("which", [0, 1], ids=["steps", "attention"])
def test_members_are_each_as_if_alone(which: int) -> None:
    model = models()[which]
    segments = torch.randn(2, 4, 6, 3, generator=torch.Generator().manual_seed(0))
    alone = type(model).of({name: tensor[1:] for name, tensor in model.state().items()})
    assert torch.allclose(model.scores(segments)[1:], alone.scores(segments[1:]), atol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["steps", "attention"])
def test_a_member_is_taken_and_the_other_left(which: int) -> None:
    model, other = models()[which], models()[which].frozen()
    for tensor in other.parameters():
        tensor.add_(1)
    frozen = model.frozen()
    frozen.take(other, torch.tensor([False, True]))
    for name, tensor in frozen.state().items():
        assert torch.equal(tensor[0], model.state()[name][0])
        assert torch.equal(tensor[1], other.state()[name][1])


def attention_model() -> AttentionModel:
    model = models()[1]
    assert isinstance(model, AttentionModel)
    return model


def test_later_steps_change_no_reward_and_earlier_ones_do() -> None:
    model = attention_model()
    windows = torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(0))
    last = torch.tensor([0, 3, 5])
    before = model.rewards(windows, last)
    later, earlier = windows.clone(), windows.clone()
    later[0, 1:], later[1, 4:] = 7, float(np.pi)
    earlier[1:, 0] += 1
    assert torch.equal(model.rewards(later, last), before)
    assert (model.rewards(earlier, last)[:, 1:] != before[:, 1:]).all()


def test_labels_are_the_rewards_of_the_segment_that_was_trained_on() -> None:
    model = attention_model()
    segments = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0))
    every = torch.arange(6)
    together = model._said(segments.expand(2, 1, 6, 3), every[None])[:, 0, :, 0]
    one_by_one = model.rewards(segments.expand(6, -1, -1), every)
    assert torch.allclose(one_by_one, together, atol=1e-6)


def test_the_block_computes_what_torch_computes() -> None:
    """One member by torch.nn: linear layers, multi-head attention with a causal mask, layer norms before each."""
    model = attention_model()
    state = {name: tensor[1] for name, tensor in model.state().items()}

    def layer(name: str, x: Tensor, number: int = 0) -> Tensor:
        return x @ state[f"{name}.weight.{number}"] + state[f"{name}.bias.{number}"][0]

    def norm(x: Tensor) -> Tensor:
        return torch.nn.LayerNorm(8, elementwise_affine=False)(x)

    attention = torch.nn.MultiheadAttention(8, HEADS, batch_first=True)
    with torch.no_grad():
        q, kv = (state[f"{name}.weight.0"].T for name in ("queries", "keys_values"))
        attention.in_proj_weight.copy_(torch.cat([q, kv]))
        attention.in_proj_bias.copy_(torch.cat([state["queries.bias.0"][0], state["keys_values.bias.0"][0]]))
        attention.out_proj.weight.copy_(state["mixing.weight.0"].T)
        attention.out_proj.bias.copy_(state["mixing.bias.0"][0])
        segments = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
        x = layer("embedding", segments) + state["place.weight.0"] + state["place.bias.0"]
        future = torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1)
        x = x + attention(norm(x), norm(x), norm(x), attn_mask=future, need_weights=False)[0]
        x = x + layer("feedforward", torch.relu(layer("feedforward", norm(x))), 1)
        said = layer("preference", norm(x))
        scores = preference_attention(said[..., 0], said[..., 1:9], said[..., 9:])
    assert torch.allclose(model.scores(segments.expand(2, -1, -1, -1))[1], scores, atol=1e-6)
