"""Networks for a population: P multilayer perceptrons of one shape, whose weights are stacked along a leading axis.

One call computes all P on their own inputs, and the gradient of a sum over P is for each the gradient of its own term:
P networks train together, each exactly as if alone. Reward models and learners share this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose ("initialisation", "batches") of one seed; purposes share no numbers.

    seed: >= 0.
    """
    entropy = np.random.SeedSequence([seed, *purpose.encode()])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))


class Networks:
    """P multilayer perceptrons with ReLU between layers and none after the last.

    weights: one [P, in, out] float32 a layer. biases: one [P, 1, out] a layer. All require gradients,
        but for those of `of` and `frozen`.
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

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Networks:
        """Networks made of what `state_dict` gave, which they share; they ask for no gradients."""
        networks = cls.__new__(cls)
        layers = range(len(tensors) // 2)
        networks.weights = [tensors[f"weight.{i}"] for i in layers]
        networks.biases = [tensors[f"bias.{i}"] for i in layers]
        networks.sizes = (networks.weights[0].shape[1], *(w.shape[2] for w in networks.weights))
        return networks

    def frozen(self) -> Networks:
        """A copy that asks for no gradients: a target."""
        return Networks.of({name: tensor.clone() for name, tensor in self.state_dict().items()})

    @torch.no_grad()
    def follow(self, source: Networks, rate: float) -> None:
        """Move every parameter by `rate` in [0, 1] of its distance to that of `source`, in place (Polyak averaging)."""
        torch._foreach_lerp_(self.parameters(), source.parameters(), rate)

    @torch.no_grad()
    def take(self, source: Networks, which: Tensor) -> None:
        """Copy from `source` the networks for which `which` [P] bool is true, in place (early stopping)."""
        for mine, theirs in zip(self.parameters(), source.parameters(), strict=True):
            mine.copy_(torch.where(which[:, None, None], theirs, mine))

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name: `weight.0` [P, in, out], `bias.0` [P, 1, out], and so on."""
        named = {f"weight.{i}": w.detach() for i, w in enumerate(self.weights)}
        return named | {f"bias.{i}": b.detach() for i, b in enumerate(self.biases)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_dict`, in place. Raises KeyError or ValueError if names or shapes differ."""
        load_tensors(self.state_dict(), tensors)


class Adam:
    """Adam (Kingma, Ba 2015) for tensors of a whole population: each number has its own moments, so members never mix.

    Constants are PyTorch's: beta 0.9 and 0.999, epsilon 1e-8.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float, decay_steps: int | None = None) -> None:
        """rate: learning rate; with `decay_steps` it falls to 0 over so many steps along a cosine, and stays there."""
        self.parameters = list(parameters)
        self._rate, self._decay_steps = rate, decay_steps
        self._mean = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._square = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._counts = [torch.zeros((), device=p.device) for p in self.parameters]
        self.n_steps = 0

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        if self._decay_steps is None:
            return self._rate
        return self._rate * (1 + math.cos(math.pi * min(1.0, self.n_steps / self._decay_steps))) / 2

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step down the given gradients, one for each parameter, in place."""
        adam(
            self.parameters,
            list(gradients),
            self._mean,
            self._square,
            [],
            self._counts,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
        self.n_steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Both moments of each parameter, and the number of steps."""
        named = {f"mean.{i}": m for i, m in enumerate(self._mean)}
        named |= {f"square.{i}": s for i, s in enumerate(self._square)}
        return named | {"n_steps": torch.tensor(self.n_steps)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_dict`, in place. Raises KeyError or ValueError if names or shapes differ."""
        own = self.state_dict()
        load_tensors(own, tensors)
        self.n_steps = int(tensors["n_steps"])
        for count in self._counts:
            count.fill_(self.n_steps)


def load_tensors(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy each of `tensors` into its namesake in `own`. Raises KeyError or ValueError if names or shapes differ."""
    if own.keys() != tensors.keys():
        raise KeyError(f"expected {sorted(own)}, found {sorted(tensors)}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name}: expected {tuple(tensor.shape)}, found {tuple(tensors[name].shape)}")
        tensor.copy_(tensors[name])


class Trainable(Protocol):
    """Networks of several members that train together."""

    def frozen(self) -> Self: ...

    def take(self, source: Self, which: Tensor) -> None: ...


N = TypeVar("N", bound=Trainable)


class Best(Generic[N]):
    """What each of M members had learned when its held-out error was lowest.

    networks: with those weights, no gradients. steps: [M] int64, the updates after which they were looked at; 0 before.
    """

    def __init__(self, networks: N, n_members: int, patience: int, device: torch.device) -> None:
        """patience: updates without a better error, of every member, after which training is over."""
        self.networks = networks.frozen()
        self.steps = torch.zeros(n_members, dtype=torch.int64)
        self._lowest = torch.full((n_members,), torch.inf, device=device)
        self._patience = patience

    def look(self, step: int, networks: N, error: Tensor, each: int = 1) -> bool:
        """Keep the weights of the members that are better than ever. Returns whether training is over.

        error: [M], held-out. each: networks of a member; those of its first place come first, then those of its second.
        """
        better = error < self._lowest
        self._lowest = torch.where(better, error, self._lowest)
        self.networks.take(networks, better.repeat(each))
        self.steps[better.cpu()] = step
        return step - int(self.steps.max()) >= self._patience
