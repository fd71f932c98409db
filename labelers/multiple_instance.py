"""`multiple_instance`: rewards of steps learned from nothing but returns of whole trajectories, with memory.

Early, Bewley, Evers and Ramchurn, "Non-Markovian reward modelling from trajectory labels via interpretable multiple
instance learning" (NeurIPS 2022). A trajectory is a bag whose label is its return G, and its steps are the instances. A
network trained to predict G is built so that its prediction is a sum over steps; the terms are the rewards. Let e_t be
the embedding of step t, h_t the state after it of an LSTM that reads the embeddings, f the head:

    instance_space_nn           r_t = f(e_t)                    Markovian
    embedding_space_lstm        r_t = f(h_t) - f(h_{t-1})       f(h_t) predicts the return so far, and f(h_0) is 0
    instance_space_lstm         r_t = f(h_t)
    csc_instance_space_lstm     r_t = f([e_t, h_t])             concatenated skip connections; the paper's best

What differs from the official code: returns are standardised, as G = sum over t of (rate + scale r_t); bags are trained
in batches; the LSTM state is wider (2 there, to be looked at) and begins by remembering; no dropout; an ensemble.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue
from torch import Tensor, nn

from data.errors import ConfigurationError
from data.labels import Labels, episode_returns
from data.progress import Progress, silent
from data.statistics import Moments, moments_of
from data.trajectories import Trajectories
from labelers.evidence import Evidence, TrajectoryReturns
from labelers.labeler import LearningLabeler
from labelers.networks import Adam, generator, load_tensors
from labelers.reward_model import held_out, standard_inputs, step_inputs

EMBEDDING = 32
"""Width of an embedding; that of the other layers (64 and 32 before it, 32 and 16 in the head) is the paper's too."""

FORGET_BIAS = 1.0
"""Added to the initial bias of the LSTM's forget gate (Jozefowicz, Zaremba, Sutskever 2015)."""

BATCH = 16
LEARNING_RATE = 2e-3
HELD_OUT = 0.1
CHECK_EVERY = 100
"""Updates between looks at the held-out error. Members keep the weights of their lowest, and train to the end: what
must be remembered is found late, when errors have stayed on a plateau for hundreds of updates."""

BAGS, CHUNK = 32, 64
"""Bags, and steps of each, that a network sees at once when labelling. Always as many, so that what a step is worth
does not depend on what comes with it, to the last bit."""

ModelName: TypeAlias = Literal[
    "instance_space_nn", "embedding_space_lstm", "instance_space_lstm", "csc_instance_space_lstm"
]


class MultipleInstance(LearningLabeler):
    """Learn to predict returns by sums over steps, and label each step with its term.

    The labels of an episode sum to its predicted return, in units of the returns; the diagnostics give it
    (`predicted_return`) with the standard deviation between members. Where returns leave it open which step earned
    what, so do the labels. Inputs of a step are those of `reward_model`: (s, a) or (s, a, s'), and whether the task
    ended.

    returns: which are known. model: which network, see above. next_observations: whether s' is an input. members: size
        of the ensemble. hidden: width of the LSTM's state. steps: updates of each member, on 16 bags each.
    """

    kind: Literal["multiple_instance"] = "multiple_instance"
    returns: TrajectoryReturns = TrajectoryReturns()
    model: ModelName = "csc_instance_space_lstm"
    next_observations: bool = True
    members: int = Field(default=3, ge=1)
    hidden: int = Field(default=32, ge=1)
    steps: int = Field(default=2000, ge=1)
    seed: int = Field(default=0, ge=0)

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedMultipleInstance:
        """A tenth of the episodes whose return is known is held out. All steps of these episodes are held in memory.

        Raises ConfigurationError if fewer than two returns are known.
        """
        assert evidence.returns is not None
        episodes = np.flatnonzero(~np.isnan(evidence.returns))
        if len(episodes) < 2:
            raise ConfigurationError(
                f"multiple_instance: {len(episodes)} known return(s). Some are held out to choose the best weights, so "
                "at least two must be known: raise `fraction`."
            )
        test = np.zeros(len(episodes), bool)
        test[np.random.default_rng([self.seed, 1]).permutation(len(episodes))[: _n_held_out(len(episodes))]] = True
        bags, returns = trajectories.select(episodes), evidence.returns[episodes]

        inputs = step_inputs(bags, np.arange(bags.n_steps), self.next_observations)
        moments = moments_of(inputs[np.repeat(~test, bags.lengths)])
        lengths = torch.from_numpy(bags.lengths)
        rate = float(returns[~test].sum() / bags.lengths[~test].sum())
        rest = returns - rate * bags.lengths
        scale = float(moments_of(rest[~test]).scale[0])
        if self.model != "embedding_space_lstm":
            scale /= float(np.sqrt(bags.lengths[~test].mean()))
        data = Bags(
            torch.from_numpy(standard_inputs(inputs, moments)).to(device),
            lengths,
            torch.from_numpy((rest / scale).astype(np.float32)).to(device),
        )
        trained = [self._train(member, data, torch.from_numpy(test), progress) for member in range(self.members)]
        fitted = FittedMultipleInstance(self, [network for network, _ in trained], moments, rate, scale, {})

        mean, std = fitted.predict(bags.select(np.flatnonzero(test)))
        found = held_out(mean, std, returns[test], float(returns[~test].mean()), int(test.sum()))
        fitted.report.update(known=len(episodes), best_step=[step for _, step in trained], held_out=found.model_dump())
        if returns.min() == returns.max():
            warnings.warn(
                f"multiple_instance: every known return is {returns[0]:.6g}: they say nothing of what a step is worth.",
                stacklevel=2,
            )
        elif found.rmse >= found.rmse_of_mean:
            warnings.warn(
                f"multiple_instance: the root mean square error of held-out returns is {found.rmse:.4g}, that of "
                f"always saying the mean {found.rmse_of_mean:.4g}: nothing was learned. Give more returns (`fraction`) "
                "or train longer (`steps`).",
                stacklevel=2,
            )
        return fitted

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedMultipleInstance:
        mean, std, minimum, maximum = state["inputs"].cpu().numpy()
        count, rate, scale = state["returns"].tolist()
        moments = Moments(int(count), mean, std, minimum, maximum, state["constant"].cpu().numpy())
        networks = [self._network(member, len(mean), device) for member in range(self.members)]
        load_tensors(_named(networks), {n: t for n, t in state.items() if n.startswith("member ")})
        return FittedMultipleInstance(self, networks, moments, rate, scale, report)

    def _network(self, member: int, width: int, device: torch.device) -> BagNetwork:
        """A fresh network, that depends on seed and member alone; random numbers elsewhere are left as they are."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                generator(self.seed, f"initialisation of member {member}").initial_seed()
            )
            return BagNetwork(self.model, width, self.hidden).to(device)

    def _train(self, member: int, bags: Bags, test: Tensor, progress: Progress) -> tuple[BagNetwork, int]:
        """A member with the weights of its smallest held-out error, and the step at which it had them."""
        network = self._network(member, bags.inputs.shape[1], bags.inputs.device)
        best = self._network(member, bags.inputs.shape[1], bags.inputs.device)
        parameters = list(network.parameters())
        optimiser = Adam(parameters, LEARNING_RATE, decay_steps=self.steps)
        draw = generator(self.seed, f"batches of member {member}")
        train, held = (~test).nonzero()[:, 0], test.nonzero()[:, 0]
        lowest, best_step = torch.inf, 0
        for step in range(1, self.steps + 1):
            loss = bags.errors(network, train[torch.randint(len(train), (BATCH,), generator=draw)]).square().mean()
            optimiser.step(torch.autograd.grad(loss, parameters))
            if step % CHECK_EVERY == 0 or step == self.steps:
                with torch.no_grad():
                    error = float(torch.cat([bags.errors(network, some) for some in held.split(BATCH)]).square().mean())
                if error < lowest:
                    lowest, best_step = error, step
                    best.load_state_dict(network.state_dict())
                progress(1)
        return best, best_step


class BagNetwork(nn.Module):
    """One of the paper's networks: what each step adds to the return of its bag, in standard units."""

    def __init__(self, model: ModelName, width: int, hidden: int) -> None:
        super().__init__()
        self.model = model
        self.encoder = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, EMBEDDING), nn.ReLU()
        )
        self.memory = None if model == "instance_space_nn" else nn.LSTM(EMBEDDING, hidden, batch_first=True)
        if self.memory is not None:
            with torch.no_grad():
                self.memory.get_parameter("bias_ih_l0")[hidden : 2 * hidden] += FORGET_BIAS
        seen = {"instance_space_nn": EMBEDDING, "csc_instance_space_lstm": EMBEDDING + hidden}.get(model, hidden)
        self.head = nn.Sequential(nn.Linear(seen, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, state: BagState | None = None) -> tuple[Tensor, BagState | None]:
        """Rewards [B, T] of the next T steps of B bags, and the state after them.

        inputs: [B, T, D] standardised. state: that after the steps before; None where bags begin. No step looks at
        later ones, so bags may be filled up behind their last step with anything.
        """
        embedded = self.encoder(inputs)
        if self.memory is None:
            return self.head(embedded).squeeze(-1), None
        seen, (hidden, cell) = self.memory(embedded, None if state is None else (state.hidden, state.cell))
        if self.model == "csc_instance_space_lstm":
            seen = torch.cat([embedded, seen], dim=-1)
        said = self.head(seen).squeeze(-1)
        rewards = said
        if self.model == "embedding_space_lstm":
            rewards = differences(said, torch.zeros_like(said[:, 0]) if state is None else state.said)
        return rewards, BagState(hidden, cell, said[:, -1])


@dataclass(frozen=True)
class BagState:
    """Where an LSTM stands inside B bags: hidden and cell [1, B, H], and what the head last said [B]."""

    hidden: Tensor
    cell: Tensor
    said: Tensor


def differences(said: Tensor, before: Tensor) -> Tensor:
    """[B, T] what each step adds to predicted returns so far, said [B, T]; before: [B], that before the first step."""
    return torch.diff(said, prepend=before[:, None])


@dataclass(frozen=True)
class Bags:
    """All bags for training: inputs [N, D] standardised, lengths [E], targets [E] returns in standard units."""

    inputs: Tensor
    lengths: Tensor
    targets: Tensor

    def errors(self, network: BagNetwork, chosen: Tensor) -> Tensor:
        """[B] predicted minus known returns of the `chosen` [B] bags, in one padded batch; padding adds nothing."""
        lengths = self.lengths[chosen]
        place = torch.arange(int(lengths.max()))
        is_step = place < lengths[:, None]
        starts = self.lengths.cumsum(0)[chosen] - lengths
        steps = torch.where(is_step, starts[:, None] + place, 0).to(self.inputs.device)
        rewards, _ = network(self.inputs[steps])
        sums: Tensor = (rewards * is_step.to(rewards.device)).sum(1)
        return sums - self.targets[chosen.to(sums.device)]


@dataclass(eq=False)
class FittedMultipleInstance:
    """An ensemble, and what standardises it: a step's label is rate + scale * (mean over members of its reward).

    input_moments: of the steps trained on. report: counts, the step each member had its best weights at, and `HeldOut`
    for returns.
    """

    configuration: MultipleInstance
    networks: list[BagNetwork]
    input_moments: Moments
    rate: float
    scale: float
    report: dict[str, JsonValue]

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        """Rewards that sum to the predicted return of their episode."""
        rewards = self._rewards(trajectories, progress)
        returns = np.stack([episode_returns(r, trajectories.offsets) for r in rewards])
        diagnostics = {"predicted_return": returns.mean(0), "ensemble_std": returns.std(0)}
        if self.configuration.next_observations:
            diagnostics["next_unknown"] = ~trajectories.final_observed
        return Labels(rewards.mean(0).astype(np.float32), pl.DataFrame(diagnostics))

    def predict(self, trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over members of the return of each episode, [E] float64 each."""
        rewards = self._rewards(trajectories, silent)
        returns = np.stack([episode_returns(r, trajectories.offsets) for r in rewards])
        return returns.mean(0), returns.std(0)

    @torch.no_grad()
    def _rewards(self, trajectories: Trajectories, progress: Progress) -> np.ndarray:
        """[members, N] float64."""
        rewards = np.empty((len(self.networks), trajectories.n_steps))
        order = np.argsort(trajectories.lengths, kind="stable")
        for start in range(0, len(order), BAGS):
            episodes = order[start : start + BAGS]
            states: list[BagState | None] = [None] * len(self.networks)
            for steps, places in _chunks(trajectories, episodes):
                inputs = np.zeros((BAGS * CHUNK, len(self.input_moments.mean)), np.float32)
                found = step_inputs(trajectories, steps, self.configuration.next_observations)
                inputs[places] = standard_inputs(found, self.input_moments)
                chunk = torch.from_numpy(inputs).view(BAGS, CHUNK, -1).to(next(self.networks[0].parameters()).device)
                for member, network in enumerate(self.networks):
                    said, states[member] = network(chunk, states[member])
                    rewards[member, steps] = said.flatten().double().cpu().numpy()[places]
            progress(len(episodes))
        return self.rate + self.scale * rewards

    def state(self) -> dict[str, Tensor]:
        moments = self.input_moments
        inputs = np.stack([moments.mean, moments.std, moments.minimum, moments.maximum])
        return {
            "inputs": torch.from_numpy(inputs),
            "constant": torch.from_numpy(moments.constant),
            "returns": torch.tensor([moments.count, self.rate, self.scale], dtype=torch.float64),
            **_named(self.networks),
        }


def _n_held_out(n: int) -> int:
    return max(1, round(HELD_OUT * n))


def _named(networks: list[BagNetwork]) -> dict[str, Tensor]:
    """Every tensor of every member, by name."""
    return {f"member {m} {name}": t for m, network in enumerate(networks) for name, t in network.state_dict().items()}


def _chunks(trajectories: Trajectories, episodes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Up to BAGS episodes side by side, CHUNK steps at a time: steps [n], and their places in [BAGS * CHUNK]."""
    lengths = trajectories.lengths[episodes]
    for start in range(0, int(lengths.max()), CHUNK):
        bag, place = np.nonzero(start + np.arange(CHUNK) < lengths[:, None])
        yield trajectories.offsets[episodes][bag] + start + place, bag * CHUNK + place
