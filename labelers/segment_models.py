"""Ensembles that say what a segment and each of its steps are worth: by the step alone, or by what led to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, layer_norm, scaled_dot_product_attention

from labelers.networks import Networks

HEADS = 4
"""Of the attention over earlier steps, as in the configuration that Kim et al. (2023) recommend, with its one block."""


def bradley_terry_loss(first: Tensor, second: Tensor, first_better: Tensor) -> Tensor:
    """Cross-entropy of P(first better) = sigmoid(first - second) against the stated probability.

    first, second: [...] what either segment is worth. first_better: [...] in [0, 1], 0.5 for a tie.
    Returns [...]. Bradley and Terry 1952; Christiano et al. 2017, eq. 1.
    """
    return binary_cross_entropy_with_logits(first - second, first_better.expand_as(first), reduction="none")


class SegmentModel(ABC):
    """P reward models made of named `Networks`, which train together, each as if alone."""

    def __init__(self, parts: Mapping[str, Networks]) -> None:
        self.parts = dict(parts)

    @property
    @abstractmethod
    def context(self) -> int:
        """How many steps, up to the one that is asked for, a reward depends on."""

    @abstractmethod
    def scores(self, segments: Tensor) -> Tensor:
        """What whole segments are worth. segments: [P, B, L, D] float32. Returns [P, B]."""

    @abstractmethod
    def rewards(self, windows: Tensor, last: Tensor) -> Tensor:
        """What one step of each window is worth.

        windows: [B, context, D] float32. last: [B] int64, the step asked for; steps after it are not looked at.
        Returns [P, B].
        """

    def parameters(self) -> list[Tensor]:
        """Of all parts, for an optimiser."""
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def frozen(self) -> Self:
        """A copy that asks for no gradients."""
        return type(self)({name: part.frozen() for name, part in self.parts.items()})

    def take(self, source: SegmentModel, which: Tensor) -> None:
        """Copy from `source` the members for which `which` [P] bool is true, in place."""
        for name, part in self.parts.items():
            part.take(source.parts[name], which)

    def state(self) -> dict[str, Tensor]:
        """Every tensor by part and name; `of` is the inverse."""
        return {f"{name}.{n}": t for name, part in self.parts.items() for n, t in part.state_dict().items()}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Self:
        """The model that gave `state`, whose tensors it shares; it asks for no gradients."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            name, _, rest = key.partition(".")
            parts.setdefault(name, {})[rest] = tensor
        return cls({name: Networks.of(tensors) for name, tensors in parts.items()})


class StepModel(SegmentModel):
    """Each step is worth what it is worth alone, and a segment the sum of its steps (Christiano et al. 2017)."""

    @classmethod
    def fresh(
        cls, n_inputs: int, hidden: Sequence[int], generators: Sequence[torch.Generator], device: torch.device
    ) -> StepModel:
        """One member for each generator, with hidden layers of the given widths."""
        return cls({"rewards": Networks((n_inputs, *hidden, 1), generators, device)})

    @property
    def context(self) -> int:
        return 1

    def scores(self, segments: Tensor) -> Tensor:
        members, _, length, _ = segments.shape
        return self.parts["rewards"](segments.flatten(1, 2)).view(members, -1, length).sum(-1)

    def rewards(self, windows: Tensor, last: Tensor) -> Tensor:
        network = self.parts["rewards"]
        return network(windows[:, 0].expand(network.n_networks, -1, -1)).squeeze(-1)


class AttentionModel(SegmentModel):
    """Preference Transformer (Kim et al. 2023): a step is worth something in the light of the steps before it.

    Every step is embedded by a multilayer perceptron, gets its place in the segment, and looks at itself and the steps
    before it in one block of a causal transformer. Of what comes out a last layer makes a reward r_t, a query q_t and a
    key k_t. Across the whole segment w_t = mean over i of softmax over t (q_i . k_t / sqrt(width)), and the segment is
    worth sum over t of w_t r_t (their eq. 6). A label is r_t, with the steps before it that a segment would hold.

    Here a step is one token (theirs are two, of which they read the second), normalisation has no learned scale, and
    there is no dropout, since training stops early.
    """

    @classmethod
    def fresh(
        cls,
        n_inputs: int,
        hidden: Sequence[int],
        context: int,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> AttentionModel:
        """One member for each generator. hidden: widths of the embedding; its last, the width of the block, is a
        multiple of `HEADS`. context: steps of a segment."""
        width = hidden[-1]
        sizes = {
            "embedding": (n_inputs, *hidden),
            "place": (context, width),
            "queries": (width, width),
            "keys_values": (width, 2 * width),
            "mixing": (width, width),
            "feedforward": (width, 4 * width, width),
            "preference": (width, 1 + 2 * width),
        }
        return cls({name: Networks(size, generators, device) for name, size in sizes.items()})

    @property
    def context(self) -> int:
        return self.parts["place"].sizes[0]

    def scores(self, segments: Tensor) -> Tensor:
        _, n_segments, length, _ = segments.shape
        every = torch.arange(length, device=segments.device).expand(n_segments, -1)
        said = self._said(segments, every)
        return preference_attention(said[..., 0], *said[..., 1:].chunk(2, dim=-1))

    def rewards(self, windows: Tensor, last: Tensor) -> Tensor:
        members = self.parts["place"].n_networks
        return self._said(windows.expand(members, -1, -1, -1), last[:, None])[..., 0, 0]

    def _said(self, segments: Tensor, asked: Tensor) -> Tensor:
        """Reward, query and key [P, B, A, 1 + 2 width] of the steps `asked` [B, A] of segments [P, B, L, D]."""
        members, _, length, _ = segments.shape
        width = self.parts["place"].sizes[1]

        def each(name: str, values: Tensor) -> Tensor:
            said: Tensor = self.parts[name](values.flatten(1, 2)).unflatten(1, values.shape[1:3])
            return said

        def heads(values: Tensor) -> Tensor:
            split: Tensor = values.unflatten(-1, (HEADS, width // HEADS))
            return split.transpose(2, 3).flatten(0, 1)

        place = self.parts["place"].weights[0][:, None, :length] + self.parts["place"].biases[0][:, None]
        steps = each("embedding", segments) + place
        current = steps.gather(2, asked[None, :, :, None].expand(members, -1, -1, width))
        keys, values = each("keys_values", layer_norm(steps, (width,))).chunk(2, dim=-1)
        queries = each("queries", layer_norm(current, (width,)))
        earlier = torch.arange(length, device=segments.device) <= asked[:, :, None]
        seen = scaled_dot_product_attention(
            heads(queries), heads(keys), heads(values), earlier.repeat(members, 1, 1)[:, None]
        )
        current = current + each("mixing", seen.unflatten(0, (members, -1)).transpose(2, 3).flatten(3))
        current = current + each("feedforward", layer_norm(current, (width,)))
        return each("preference", layer_norm(current, (width,)))


def preference_attention(rewards: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What a segment is worth: the mean over its steps i of sum over t of softmax(q_i . k_t / sqrt(d)) r_t.

    rewards: [..., L]. queries, keys: [..., L, d]. Returns [...]. Kim et al. 2023, eq. 5 and 6.
    """
    weights: Tensor = (queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])).softmax(-1).mean(-2)
    return (weights * rewards).sum(-1)
