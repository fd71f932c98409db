"""Training: batches, logging and checkpoints for a population of members, whatever the algorithm.

Member p draws its batches from its own seed and reads the rewards of its own label set. The batch of a step depends on
seed and step alone, so a resumed run goes on with just the batches that it would have had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, State
from algorithms.files import read_about, read_tensors, write_tensors
from algorithms.policy import Policy
from algorithms.policy import load_policy as load_policy
from algorithms.policy import save_policy as save_policy
from algorithms.spec import PIECE, Spec
from data.config import Config
from data.errors import ConfigurationError, DatasetError, WorkError
from data.progress import Progress, silent
from data.trajectories import Column, Trajectories
from labelers.memory import keep_freed_memory
from labelers.networks import generator

FORMAT = "assay checkpoint, version 1"


BLOCK = 64
"""Steps whose batches are drawn together."""

RESIDENT_BYTES = 4 << 30
"""Transitions of more bytes, as networks see them, are not loaded: batches are read from disk."""

Evaluate: TypeAlias = Callable[[Policy], Mapping[str, np.ndarray]]
"""What policies are worth: any number of metrics by name, each [P]."""

S = TypeVar("S", bound=State)


class Training(Config):
    """How long and how often.

    steps: updates of every member. batch_size: transitions an update, drawn with replacement. log_every: steps whose
    metrics are averaged into one row. checkpoint_every: steps that a kill may cost.
    """

    steps: int = Field(default=100_000, gt=0)
    batch_size: int = Field(default=256, gt=0)
    log_every: int = Field(default=1_000, gt=0)
    checkpoint_every: int = Field(default=5_000, gt=0)


@dataclass(frozen=True, eq=False)
class Member:
    """One run of a population.

    run_id: its identity: of data, labels, settings and seed. rewards: [N] float32, its labels. seed: >= 0.
    """

    run_id: str
    rewards: Column
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """What training leaves.

    policy: of all members, in their order. metrics: one row for each member, step and name, with columns member
        (int32), step (int64), name, value (float64). The row of a step holds means over the steps since the row before.
    """

    policy: Policy
    metrics: pl.DataFrame


def train(
    algorithm: Algorithm[S],
    trajectories: Trajectories,
    members: Sequence[Member],
    training: Training,
    *,
    device: torch.device,
    checkpoint: Path | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    progress: Progress = silent,
    on_checkpoint: Callable[[pl.DataFrame], None] | None = None,
) -> Trained:
    """Train all members as one program, each exactly as if alone.

    checkpoint: file that is written every `checkpoint_every` steps and at the end, and from which training goes on if
        it is there; on one machine with as many threads, a resumed run gives the same bits.
    evaluate: called every `evaluate_every` steps and after the last; what it returns joins the metrics.
    progress: called with the number of steps just done, those of a checkpoint first.
    on_checkpoint: called with all metrics so far after each checkpoint (without a file, just as often).
    Raises ConfigurationError or DatasetError if algorithm, data and members do not fit together, or if the checkpoint
    belongs to other ones; WorkError if a loss is no longer finite.
    """
    spec = Spec.of(trajectories)
    state = algorithm.init(spec, [m.seed for m in members], training.steps, device)
    log = _Log(members)
    identity: dict[str, JsonValue] = {
        "members": [m.run_id for m in members],
        "seeds": [m.seed for m in members],
        "algorithm": algorithm.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
    }
    step = 0
    if checkpoint is not None and checkpoint.exists():
        step = _resume(checkpoint, identity, state, log, device)
        progress(step)
    transitions = _Transitions(trajectories, spec, members, training.batch_size, device)
    policy = algorithm.policy(state)

    def due(every: int | None) -> bool:
        return step == training.steps or (every is not None and step % every == 0)

    with settled():
        while step < training.steps:
            log.add(algorithm.update(state, transitions.batch(step)))
            step += 1
            if due(training.log_every):
                log.row(step)
            if evaluate is not None and due(evaluate_every):
                log.check(step)
                log.evaluation(step, evaluate(policy))
            if due(training.checkpoint_every):
                log.check(step)
                if checkpoint is not None:
                    _write_checkpoint(checkpoint, identity, step, state, log)
                if on_checkpoint is not None:
                    on_checkpoint(log.frame())
            progress(1)
    return Trained(policy, log.frame())


def checkpoint_members(path: Path) -> tuple[str, ...] | None:
    """Run ids of the members whose checkpoint lies at `path`; None if there is no file.

    Raises StoreError if the file is no checkpoint.
    """
    if not path.exists():
        return None
    return tuple(read_about(path, FORMAT)["identity"]["members"])


class _Transitions:
    """All transitions, and the batches that members draw from them.

    Up to `RESIDENT_BYTES` they lie in the device's memory, standardised once and shared by the members; beyond it each
    batch is read from the mapped columns. Either way the batches are the same, to the last bit.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        spec: Spec,
        members: Sequence[Member],
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._trajectories, self._spec, self._device, self._batch_size = trajectories, spec, device, batch_size
        self._seeds = [m.seed for m in members]
        left_out = trajectories.without_next
        self._gaps = left_out - np.arange(len(left_out))
        self._n_transitions = trajectories.n_steps - len(left_out)
        if not self._n_transitions:
            raise DatasetError(
                f"no transition among {trajectories.n_steps:,} steps: each is the last of a truncated episode whose "
                "final observation is not known."
            )
        columns = {id(m.rewards): m.rewards for m in members}
        places = {key: place for place, key in enumerate(columns)}
        for member in members:
            _check_rewards(member, trajectories)
        self._columns = list(columns.values())
        self._label_set = np.array([places[id(m.rewards)] for m in members])
        self._block: tuple[int, Tensor] | None = None
        numbers = spec.n_inputs + spec.n_outputs + len(columns) + 1
        self._resident: _Resident | None = None
        if 4 * numbers * trajectories.n_steps <= RESIDENT_BYTES:
            self._resident = self._load()

    def batch(self, step: int) -> Batch:
        """The batch of one step, the first being 0."""
        block, within = divmod(step, BLOCK)
        if self._block is None or self._block[0] != block:
            drawn = [
                torch.randint(
                    self._n_transitions, (BLOCK, self._batch_size), generator=generator(seed, f"batches {block}")
                )
                for seed in self._seeds
            ]
            place = torch.device("cpu") if self._resident is None else self._device
            self._block = block, torch.stack(drawn, dim=1).to(place)
        index = self._block[1][within]
        return self._read(index.numpy()) if self._resident is None else self._resident.batch(index)

    def _steps(self, index: np.ndarray) -> np.ndarray:
        """Steps of the given transitions: those that are none are passed over."""
        return index + np.searchsorted(self._gaps, index, side="right")

    def _load(self) -> _Resident:
        observations = torch.empty(len(self._trajectories.observations), self._spec.n_inputs, device=self._device)
        for start in range(0, len(observations), PIECE):
            piece = np.array(self._trajectories.observations[start : start + PIECE])
            observations[start : start + PIECE] = self._spec.standardise(torch.from_numpy(piece))
        steps = self._steps(np.arange(self._n_transitions))
        return _Resident(
            observations,
            actions=torch.from_numpy(self._spec.encode(self._trajectories.actions[steps])).to(self._device),
            rows=torch.from_numpy(self._trajectories.observation_rows(steps)).to(self._device),
            discounts=torch.from_numpy(self._discounts(steps)).to(self._device),
            rewards=torch.from_numpy(np.stack([c[steps] for c in self._columns])).to(self._device),
            label_set=torch.from_numpy(self._label_set[:, None]).to(self._device),
        )

    def _read(self, index: np.ndarray) -> Batch:
        """Batches [P, B] of the given transitions, from the mapped columns."""
        steps = self._steps(index)
        flat = steps.reshape(-1)
        rows = self._trajectories.observation_rows(flat)

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).reshape(*index.shape, *values.shape[1:]).to(self._device)

        def observations(rows: np.ndarray) -> Tensor:
            read = torch.from_numpy(self._trajectories.observations[rows])
            return self._spec.standardise(read).reshape(*index.shape, -1).to(self._device)

        return Batch(
            observations=observations(rows),
            actions=on_device(self._spec.encode(self._trajectories.actions[flat])),
            rewards=torch.from_numpy(
                np.stack([self._columns[c][own] for c, own in zip(self._label_set, steps, strict=True)])
            ).to(self._device),
            next_observations=observations(rows + 1),
            discounts=on_device(self._discounts(flat)),
        )

    def _discounts(self, steps: np.ndarray) -> np.ndarray:
        """[n] float32, 0 on the last step of a terminated episode, else 1."""
        offsets = self._trajectories.offsets
        episodes = np.searchsorted(offsets, steps, side="right") - 1
        ends = (steps == offsets[episodes + 1] - 1) & self._trajectories.terminated[episodes]
        discounts: np.ndarray = (~ends).astype(np.float32)
        return discounts


@dataclass(frozen=True, eq=False)
class _Resident:
    """M transitions in the device's memory.

    observations: [N + E, D] standardised. actions: [M, A]. rows: [M], of `observations`. discounts: [M]. rewards:
    [label sets, M]. label_set: [P, 1], that of each member.
    """

    observations: Tensor
    actions: Tensor
    rows: Tensor
    discounts: Tensor
    rewards: Tensor
    label_set: Tensor

    def batch(self, index: Tensor) -> Batch:
        """index: [P, B]."""
        rows = self.rows[index]
        return Batch(
            observations=self.observations[rows],
            actions=self.actions[index],
            rewards=self.rewards[self.label_set, index],
            next_observations=self.observations[rows + 1],
            discounts=self.discounts[index],
        )


def _check_rewards(member: Member, trajectories: Trajectories) -> None:
    if member.rewards.dtype != np.float32 or member.rewards.shape != (trajectories.n_steps,):
        raise DatasetError(
            f"run {member.run_id}: rewards are {member.rewards.dtype} {member.rewards.shape}; expected float32, one "
            f"for each of {trajectories.n_steps:,} steps."
        )
    for start in range(0, trajectories.n_steps, PIECE):
        piece = member.rewards[start : start + PIECE]
        bad = np.flatnonzero(~np.isfinite(piece))
        if len(bad):
            raise DatasetError(f"run {member.run_id}: the reward of step {start + bad[0]} is {piece[bad[0]]}.")


class _Log:
    """Metrics of all members: steps since the last row, still on the device, and finished rows."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._names: list[str] = []
        self._recent: list[Tensor] = []
        self._rows: list[tuple[int, str, np.ndarray]] = []

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Keep the metrics of one step, each [P]."""
        self._names = list(metrics)
        self._recent.append(torch.stack(tuple(metrics.values())))

    def check(self, step: int) -> None:
        """Raise WorkError if a metric since the last row is not finite. step: steps done."""
        if not self._recent:
            return
        recent = torch.stack(self._recent)
        wrong = (~torch.isfinite(recent)).nonzero()
        if len(wrong):
            index, metric, member = wrong[0].tolist()
            raise WorkError(
                f"training of run {self._members[member].run_id} (member {member}, seed {self._members[member].seed}) "
                f"failed: {self._names[metric]} is {recent[index, metric, member].item()} at step "
                f"{step - len(recent) + index + 1:,}. Checkpoints up to there are kept. Look at the size of its "
                "rewards, or lower the learning rate."
            )

    def row(self, step: int) -> None:
        """Turn what was kept since the last row into the row of `step`."""
        self.check(step)
        means = torch.stack(self._recent).double().mean(0).cpu().numpy()
        self._rows += [(step, name, mean) for name, mean in zip(self._names, means, strict=True)]
        self._recent = []

    def evaluation(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Add metrics that are no means."""
        self._rows += [(step, name, np.asarray(values, np.float64)) for name, values in metrics.items()]

    def frame(self) -> pl.DataFrame:
        """All rows, as `Trained.metrics`."""
        n_members, n_rows = len(self._members), len(self._rows)
        return pl.DataFrame(
            {
                "member": np.tile(np.arange(n_members, dtype=np.int32), n_rows),
                "step": np.repeat(np.array([step for step, _, _ in self._rows], np.int64), n_members),
                "name": [name for _, name, _ in self._rows for _ in range(n_members)],
                "value": np.concatenate([np.zeros(0), *(values for _, _, values in self._rows)]),
            },
            schema={"member": pl.Int32, "step": pl.Int64, "name": pl.String, "value": pl.Float64},
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the names, which `titles` holds."""
        n_members = len(self._members)
        return {
            "recent": torch.stack(self._recent) if self._recent else torch.zeros(0, len(self._names), n_members),
            "values": torch.from_numpy(np.array([values for _, _, values in self._rows]).reshape(-1, n_members)),
        }

    def titles(self) -> dict[str, JsonValue]:
        """Names of metrics, and step and name of each row."""
        return {"names": list(self._names), "rows": [[step, name] for step, name, _ in self._rows]}

    def load(self, tensors: Mapping[str, Tensor], titles: dict[str, list[Any]], device: torch.device) -> None:
        """Inverse of `state_dict` and `titles`."""
        self._names = titles["names"]
        self._recent = list(tensors["recent"].to(device))
        values = tensors["values"].numpy()
        self._rows = [(step, name, row) for (step, name), row in zip(titles["rows"], values, strict=True)]


@contextmanager
def settled() -> Iterator[None]:
    """The one place that decides how training uses the CPU: threads and memory.

    Threads: all cores that this process may use, if idle threads sleep (OMP_WAIT_POLICY=PASSIVE, set before torch is
    imported, as the command line does); else one. Idle threads that spin instead make a step forty times slower as soon
    as another process wants a core.
    Memory: see `keep_freed_memory`, a quarter of the time of a step of nine members.
    """
    keep_freed_memory()
    before = torch.get_num_threads()
    passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    torch.set_num_threads(len(os.sched_getaffinity(0)) if passive else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_checkpoint(path: Path, identity: dict[str, JsonValue], step: int, state: State, log: _Log) -> None:
    tensors = {f"state.{name}": t for name, t in state.state_dict().items()}
    tensors |= {f"log.{name}": t for name, t in log.state_dict().items()}
    write_tensors(path, FORMAT, tensors, {"identity": identity, "step": step, "titles": log.titles()})


def _resume(path: Path, identity: dict[str, JsonValue], state: State, log: _Log, device: torch.device) -> int:
    """Load a checkpoint into `state` and `log`. Returns its step."""
    about, tensors = read_tensors(path, FORMAT)
    for key, asked in json.loads(json.dumps(identity)).items():
        if about["identity"][key] != asked:
            raise ConfigurationError(
                f"{path} is the checkpoint of other work: its {key} are {about['identity'][key]}, asked for are "
                f"{asked}. Name another file, or delete this one."
            )
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "log": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    state.load_state_dict(parts["state"])
    log.load(parts["log"], about["titles"], device)
    return int(about["step"])
