"""Networks for a population: P multilayer perceptrons of one shape, whose weights are stacked along a leading axis.

One call computes all P on their own inputs, and the gradient of a sum over P is for each the gradient of its own term:
P networks train together, each exactly as if alone. Reward models and learners share this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose ("initialisation", "batches") of one seed; purposes share no numbers.

    seed: >= 0.
    """
    entropy = np.random.SeedSequence([seed, *purpose.encode()])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))


class Networks:
    """P multilayer perceptrons with ReLU between layers and none after the last.

    weights: one [P, in, out] float32 a layer. biases: one [P, 1, out] a layer. All require gradients unless `frozen`.
    """

    def __init__(
        self, sizes: Sequence[int], generators: Sequence[torch.Generator], device: torch.device | str = "cpu"
    ) -> None:
        """Fresh networks, one for each generator, drawn one whole network after another.

        sizes: widths from input to output, at least two. generators: P of them, on the CPU, so that a network is the
        same on every device; one that is given twice makes two different networks. Weights and biases are uniform in
        +-1/sqrt(in), as `torch.nn.Linear` has them.
        """
        self.sizes = tuple(sizes)
        layers = list(pairwise(self.sizes))
        weights: list[list[Tensor]] = [[] for _ in layers]
        biases: list[list[Tensor]] = [[] for _ in layers]
        for source in generators:
            for layer, (n_in, n_out) in enumerate(layers):
                bound = 1 / math.sqrt(n_in)
                weights[layer].append(torch.empty(n_in, n_out).uniform_(-bound, bound, generator=source))
                biases[layer].append(torch.empty(1, n_out).uniform_(-bound, bound, generator=source))
        self.weights = [torch.stack(w).to(device).requires_grad_() for w in weights]
        self.biases = [torch.stack(b).to(device).requires_grad_() for b in biases]

    @property
    def n_networks(self) -> int:
        """P."""
        return len(self.weights[0])

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: [P, B, in] float32. Returns [P, B, out]."""
        hidden = inputs
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = torch.baddbmm(bias, hidden, weight).relu_()
        return torch.baddbmm(self.biases[-1], hidden, self.weights[-1])

    def parameters(self) -> list[Tensor]:
        """Weights and biases, for an optimiser."""
        return [*self.weights, *self.biases]

    def frozen(self) -> Networks:
        """A copy that asks for no gradients: a target."""
        copy = Networks.__new__(Networks)
        copy.sizes = self.sizes
        copy.weights = [w.detach().clone() for w in self.weights]
        copy.biases = [b.detach().clone() for b in self.biases]
        return copy

    @torch.no_grad()
    def follow(self, source: Networks, rate: float) -> None:
        """Move every parameter by `rate` in [0, 1] of its distance to that of `source`, in place (Polyak averaging)."""
        torch._foreach_lerp_(self.parameters(), source.parameters(), rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name: `weight.0` [P, in, out], `bias.0` [P, 1, out], and so on."""
        named = {f"weight.{i}": w.detach() for i, w in enumerate(self.weights)}
        return named | {f"bias.{i}": b.detach() for i, b in enumerate(self.biases)}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_dict`, in place. Raises KeyError or ValueError if names or shapes differ."""
        own = self.state_dict()
        if own.keys() != tensors.keys():
            raise KeyError(f"expected {sorted(own)}, found {sorted(tensors)}")
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ValueError(f"{name}: expected {tuple(tensor.shape)}, found {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])
