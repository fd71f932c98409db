"""The store: datasets, labels beside them, and runs, each whole or absent.

    <store>/datasets/<name>/<digest>/  manifest.json  episodes.arrow  observations-00000.arrow  actions-00000.arrow ...
    <store>/labels/<dataset digest>/<label id>/  manifest.json  diagnostics.arrow  rewards-00000.arrow ...
    <store>/ingests/<key>.json
    <store>/runs/<run id>/
    <store>/partial/  <store>/locks/

Everything is made under `partial/`, fsynced and renamed, and never edited afterwards. Shards hold whole episodes; a
shard is the unit of streaming, of labelling and of retry. Columns are Arrow IPC files, uncompressed, mapped and read
without a copy. A dataset's digest does not depend on how it was cut into shards.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import polars as pl
from pydantic import JsonValue

from data import columns
from data.config import Config
from data.digests import ColumnHasher
from data.errors import DatasetError, StoreError
from data.findings import Finding
from data.labels import ActionLabels, AnyLabels, episode_returns
from data.readers.reader import Block
from data.statistics import Moments, MomentsOf, moments_of
from data.trajectories import Column, Sharded, Trajectories, digest_of_columns

SHARD_BYTES = 256 << 20

BLOCK_BYTES = 8 << 20
"""Stored episodes are streamed in blocks of about so many bytes, or of one longer episode."""

M = TypeVar("M", bound=Config)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Shard(Config):
    """One shard: how many episodes and steps, and the files with their sizes in bytes."""

    n_episodes: int
    n_steps: int
    files: dict[str, int]


class ArraySpec(Config):
    """Shape of one row and dtype, as stored."""

    shape: tuple[int, ...]
    dtype: str


class Lengths(Config):
    """Steps an episode."""

    minimum: int
    median: float
    mean: float
    maximum: int


class DatasetManifest(Config):
    """What a stored dataset is and where it came from.

    n_unobserved: episodes whose final observation is not known. statistics: of `observations` at the steps (final
    observations left out, as D4RL users compute them) and of `actions`, see `Moments`.
    """

    format: Literal["assay-dataset/1"] = "assay-dataset/1"
    name: str
    digest: str
    n_episodes: int
    n_steps: int
    n_terminated: int
    n_truncated: int
    n_unobserved: int
    observation: ArraySpec
    action: ArraySpec
    n_actions: tuple[int, ...] | None
    action_bounds: tuple[float, float] | None
    lengths: Lengths
    statistics: dict[str, dict[str, JsonValue]]
    shards: tuple[Shard, ...]
    episodes_bytes: int
    provenance: JsonValue
    findings: tuple[Finding, ...]


class LabelsManifest(Config):
    """What a stored label set is: for which dataset, made by what, and how its values lie.

    column: what the labels are. rewards, returns: sum, mean, std, minimum and maximum of rewards and of episode
    returns, None for actions. actions: moments of action labels, see `Moments`.
    """

    format: Literal["assay-labels/1"] = "assay-labels/1"
    dataset: str
    id: str
    column: Literal["rewards", "actions"] = "rewards"
    n_steps: int
    n_episodes: int
    shards: tuple[Shard, ...]
    diagnostics_bytes: int | None
    rewards: dict[str, JsonValue] | None
    returns: dict[str, JsonValue] | None
    actions: dict[str, JsonValue] | None = None
    origin: JsonValue


@dataclass(frozen=True, eq=False)
class StoredDataset:
    """A dataset in the store. Opening checks that every file is there and has its size."""

    path: Path
    manifest: DatasetManifest

    @property
    def name(self) -> str:
        """The name it was stored under."""
        return self.manifest.name

    @property
    def digest(self) -> str:
        """Identity of its content."""
        return self.manifest.digest

    @cached_property
    def _ends(self) -> dict[str, np.ndarray]:
        table = columns.read_table(self.path / "episodes.arrow")
        return {name: table[name].to_numpy() for name in ("length", "terminated", "truncated", "final_observed")}

    def statistics(self, column: Literal["observations", "actions"]) -> Moments:
        """Stored moments of a column; the same for training and evaluation."""
        return Moments.from_json(self.manifest.statistics[column])

    def shards(self) -> list[Trajectories]:
        """One `Trajectories` a shard, mapped from disk without a copy."""
        shards, episode = [], 0
        for index, shard in enumerate(self.manifest.shards):
            shards.append(
                self._trajectories(
                    columns.read(self.path / f"observations-{index:05d}.arrow"),
                    columns.read(self.path / f"actions-{index:05d}.arrow"),
                    slice(episode, episode + shard.n_episodes),
                )
            )
            episode += shard.n_episodes
        return shards

    def trajectories(self) -> Trajectories:
        """The whole dataset, mapped from disk; nothing is loaded but the episode ends."""
        shards = self.shards()
        if len(shards) == 1:
            return shards[0]
        return self._trajectories(
            Sharded([np.asarray(s.observations) for s in shards]),
            Sharded([np.asarray(s.actions) for s in shards]),
            slice(None),
        )

    def shard_steps(self) -> list[slice]:
        """The steps of each shard, as slices of the dataset's steps."""
        ends = np.cumsum([0, *(s.n_steps for s in self.manifest.shards)])
        return [slice(int(a), int(b)) for a, b in pairwise(ends)]

    def blocks(self, labels: StoredLabels | None = None) -> Iterator[Block]:
        """All episodes in order, some at a time, mapped from disk, with the rewards of a label set beside them.

        Raises StoreError if the labels are for another dataset.
        """
        if labels is not None and labels.manifest.dataset != self.digest:
            raise StoreError(
                f"labels {labels.id} are for dataset {labels.manifest.dataset}, not for '{self.name}' {self.digest}."
            )
        for shard, steps in zip(self.shards(), self.shard_steps(), strict=True):
            rewards = None if labels is None else labels.rewards[steps]
            row = columns.row_bytes(shard.observations) + columns.row_bytes(shard.actions)
            block = shard.offsets[1:] * row // BLOCK_BYTES
            cuts = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), shard.n_episodes]
            for start, stop in pairwise(cuts):
                part = slice(int(shard.offsets[start]), int(shard.offsets[stop]))
                yield Block(shard.part(start, stop), None if rewards is None else rewards[part])

    def returns(self, labels: StoredLabels) -> np.ndarray:
        """[E] float64, the return of each episode by a label set of this dataset."""
        blocks = ((block.rewards, block.trajectories.offsets) for block in self.blocks(labels))
        return np.concatenate([episode_returns(rewards, offsets) for rewards, offsets in blocks if rewards is not None])

    def _trajectories(self, observations: Column, actions: Column, episodes: slice) -> Trajectories:
        ends = self._ends
        return Trajectories(
            observations=observations,
            actions=actions,
            offsets=np.concatenate([[0], np.cumsum(ends["length"][episodes])]).astype(np.int64),
            terminated=ends["terminated"][episodes],
            truncated=ends["truncated"][episodes],
            final_observed=ends["final_observed"][episodes],
            n_actions=self.manifest.n_actions,
            action_bounds=self.manifest.action_bounds,
        )


@dataclass(frozen=True, eq=False)
class StoredLabels:
    """A label set in the store: rewards or actions."""

    path: Path
    manifest: LabelsManifest

    @property
    def id(self) -> str:
        """Its identity."""
        return self.manifest.id

    @property
    def labeler(self) -> str:
        """Kind of the labeler that gave it, and of the transforms after it: `optimal_transport > return_range`."""
        return _made_by(self.manifest.origin)

    @cached_property
    def rewards(self) -> Column:
        """[N] float32, row for row with the dataset's steps, mapped from disk. Raises StoreError for action labels."""
        return self._column("rewards")

    @cached_property
    def actions(self) -> Column:
        """[N, ...] like the dataset's actions, mapped from disk. Raises StoreError for reward labels."""
        return self._column("actions")

    def _column(self, column: str) -> Column:
        if self.manifest.column != column:
            raise StoreError(f"{self.path}: these labels are {self.manifest.column}, not {column}.")
        parts = [columns.read(self.path / f"{column}-{i:05d}.arrow") for i in range(len(self.manifest.shards))]
        return parts[0] if len(parts) == 1 else Sharded(parts)

    @cached_property
    def diagnostics(self) -> pl.DataFrame | None:
        """One row an episode, or None if the labeler gave none."""
        if self.manifest.diagnostics_bytes is None:
            return None
        return columns.read_table(self.path / "diagnostics.arrow")


class Store:
    """A folder that holds datasets, labels and runs."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    # ------------------------------------------------------------ datasets

    def write_dataset(
        self,
        name: str,
        blocks: Iterable[Block],
        provenance: JsonValue,
        findings: Sequence[Finding] = (),
        shard_bytes: int = SHARD_BYTES,
    ) -> StoredDataset:
        """Store the episodes of `blocks` in order; rewards are ignored. Returns the stored dataset.

        findings: read once `blocks` is exhausted, so a list that a reader still fills will do.
        If a dataset of the same name and content exists it is left as it is. Raises DatasetError if there are no
        episodes, and passes on what `blocks` raises; then nothing is left behind.
        """
        if not NAME.fullmatch(name):
            raise StoreError(
                f"'{name}' cannot name a dataset: use letters, digits, dots, dashes and "
                "underscores, at most 100, and begin with a letter or digit."
            )
        with self.scratch("dataset") as partial:
            writer = _DatasetWriter(partial, shard_bytes)
            for block in blocks:
                writer.add(block.trajectories)
            manifest = writer.finish(name, provenance, tuple(findings))
            target = self._dataset_path(name, manifest.digest)
            with self.lock(f"dataset-{name}-{manifest.digest}"):
                if not target.exists():
                    _write_json(partial / "manifest.json", manifest)
                    publish(partial, target)
        return self.dataset(name, manifest.digest)

    def dataset(self, name: str, digest: str | None = None) -> StoredDataset:
        """A stored dataset by name; `digest`, or its beginning, tells apart several of one name.

        Raises StoreError, listing what there is, if there is none or more than one.
        """
        known = [d for d in self._dataset_digests(name) if d.startswith(digest or "")]
        if not known:
            raise StoreError(
                f"the store {self.root} has no dataset '{name}'{f' with digest {digest}' if digest else ''}; "
                f"it has: {', '.join(self.names()) or 'none'}."
            )
        if len(known) > 1:
            there = ", ".join(f"{name}@{d}" for d in known)
            raise StoreError(f"the store has {len(known)} datasets '{name}': say which digest: {there}.")
        path = self._dataset_path(name, known[0])
        manifest = _read_manifest(path, DatasetManifest)
        files = {"episodes.arrow": manifest.episodes_bytes}
        for shard in manifest.shards:
            files |= shard.files
        _check_sizes(path, files)
        return StoredDataset(path, manifest)

    def has_dataset(self, name: str, digest: str) -> bool:
        """Whether this dataset is stored."""
        return (self._dataset_path(name, digest) / "manifest.json").exists()

    def datasets(self) -> list[StoredDataset]:
        """All stored datasets, by name."""
        return [self.dataset(name, digest) for name, digest in self._dataset_paths()]

    def names(self) -> list[str]:
        """Names of all stored datasets, in order."""
        return sorted({name for name, _ in self._dataset_paths()})

    def _dataset_path(self, name: str, digest: str) -> Path:
        return self.root / "datasets" / name / digest

    def _dataset_digests(self, name: str) -> list[str]:
        return sorted(p.parent.name for p in (self.root / "datasets" / name).glob("*/manifest.json"))

    def _dataset_paths(self) -> list[tuple[str, str]]:
        found = (self.root / "datasets").glob("*/*/manifest.json")
        return sorted((p.parent.parent.name, p.parent.name) for p in found)

    # ------------------------------------------------------------ labels

    def has_labels(self, dataset_digest: str, label_id: str) -> bool:
        """Whether this label set is stored."""
        return (self._labels_path(dataset_digest, label_id) / "manifest.json").exists()

    def labels(self, dataset_digest: str, label_id: str) -> StoredLabels:
        """A stored label set. Raises StoreError if it is not there or not whole."""
        path = self._labels_path(dataset_digest, label_id)
        if not self.has_labels(dataset_digest, label_id):
            raise StoreError(f"the store {self.root} has no labels {label_id} for dataset {dataset_digest}.")
        manifest = _read_manifest(path, LabelsManifest)
        if manifest.dataset != dataset_digest:
            raise StoreError(f"{path}: these labels are for dataset {manifest.dataset}, not {dataset_digest}.")
        files = {} if manifest.diagnostics_bytes is None else {"diagnostics.arrow": manifest.diagnostics_bytes}
        for shard in manifest.shards:
            files |= shard.files
        _check_sizes(path, files)
        return StoredLabels(path, manifest)

    def label_sets(self, dataset_digest: str) -> list[StoredLabels]:
        """All label sets of a dataset, by id."""
        found = sorted((self.root / "labels" / dataset_digest).glob("*/manifest.json"))
        return [self.labels(dataset_digest, path.parent.name) for path in found]

    def find_labels(self, dataset: StoredDataset, wanted: str) -> StoredLabels:
        """The label set of a dataset by its id, the beginning of one, or by the labeler that made it (`source`).

        Raises StoreError, listing what there is, if there is none or more than one.
        """
        known = self.label_sets(dataset.digest)
        found = [s for s in known if s.labeler == wanted] or [s for s in known if s.id.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(f"{s.labeler} ({s.id})" for s in found or known) or "none"
        if found:
            raise StoreError(f"dataset '{dataset.name}' has {len(found)} label sets '{wanted}': {there}. Give the id.")
        raise StoreError(f"dataset '{dataset.name}' has no label set '{wanted}'; it has: {there}.")

    def write_labels(
        self,
        dataset: StoredDataset,
        label_id: str,
        make: Callable[[int, Trajectories, slice], AnyLabels],
        origin: JsonValue,
    ) -> StoredLabels:
        """Label a dataset shard by shard and store the result; asked again, return it without computing.

        make: called with a shard's index, its trajectories, and its steps as a slice of the dataset's steps. Shards
        that were finished before a kill are reused; a second process waits and finds the result.
        origin: where the labels came from, kept in the manifest; read after the last shard.
        Raises DatasetError unless there is one finite label for each step; finished shards are then kept for retry.
        """
        target = self._labels_path(dataset.digest, label_id)
        with self.lock(f"labels-{dataset.digest}-{label_id}"):
            if not self.has_labels(dataset.digest, label_id):
                partial = self.root / "partial" / f"labels-{dataset.digest}-{label_id}"
                partial.mkdir(parents=True, exist_ok=True)
                steps = dataset.shard_steps()
                for index, trajectories in enumerate(dataset.shards()):
                    if _column_of(partial, index) is None:
                        labels = make(index, trajectories, steps[index])
                        labels.check(trajectories)
                        _write_label_shard(partial, index, labels)
                _finish_labels(partial, dataset, label_id, origin)
                publish(partial, target)
        return self.labels(dataset.digest, label_id)

    def _labels_path(self, dataset_digest: str, label_id: str) -> Path:
        return self.root / "labels" / dataset_digest / label_id

    # ------------------------------------------------------------ runs

    def has_run(self, run_id: str) -> bool:
        """Whether this run is stored."""
        return self._run_path(run_id).exists()

    def run(self, run_id: str) -> Path:
        """Folder of a stored run. Raises StoreError if it is not there."""
        if not self.has_run(run_id):
            raise StoreError(f"the store {self.root} has no run {run_id}.")
        return self._run_path(run_id)

    def write_run(self, run_id: str, fill: Callable[[Path], None]) -> Path:
        """Store a run: `fill` writes files into the empty folder it is given. Asked again, the first one stands."""
        with self.lock(f"run-{run_id}"):
            if not self.has_run(run_id):
                with self.scratch("run") as partial:
                    fill(partial)
                    publish(partial, self._run_path(run_id))
        return self._run_path(run_id)

    def _run_path(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    # ------------------------------------------------------------ records, locks and unfinished work

    def write_record(self, path: Path, record: Config) -> None:
        """Write a small JSON record, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        _write_json(unfinished, record)
        _put(unfinished, path)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold `key` against other processes and threads; a second one waits. Freed however the process ends."""
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A new empty folder under `partial/`, gone afterwards unless it was renamed into place.

        It is locked while in use, so that what a killed process left behind can be told and is cleared away here.
        """
        partial = self.root / "partial"
        with self.lock("partial"):
            partial.mkdir(parents=True, exist_ok=True)
            for left in partial.glob("scratch-*"):
                if _try_lock_folder(left):
                    shutil.rmtree(left)
            folder = partial / f"scratch-{name}-{uuid.uuid4().hex}"
            folder.mkdir()
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _try_lock_folder(folder: Path) -> bool:
    """Whether nobody holds `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


class _DatasetWriter:
    """Cuts a stream of episodes into shards and hashes and measures them on the way."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._first: Trajectories | None = None
        self._hashers = {"observations": ColumnHasher(), "actions": ColumnHasher()}
        self._moments = {"observations": MomentsOf(), "actions": MomentsOf()}
        self._ends: list[np.ndarray] = []
        self._shards: list[Shard] = []
        self._parts: list[Trajectories] = []
        self._bytes = 0

    def add(self, trajectories: Trajectories) -> None:
        """Append episodes. Raises DatasetError if their columns or actions differ in kind from those before."""
        if trajectories.n_episodes == 0:
            return
        first = self._first = self._first or trajectories
        _check_same_kind(first, trajectories)
        self._hashers["observations"].update(np.asarray(trajectories.observations))
        self._hashers["actions"].update(np.asarray(trajectories.actions))
        self._moments["observations"].update(trajectories.step_observations)
        self._moments["actions"].update(np.asarray(trajectories.actions))
        self._ends.append(
            np.stack(
                [trajectories.lengths, trajectories.terminated, trajectories.truncated, trajectories.final_observed], 1
            ).astype(np.int64)
        )
        row = columns.row_bytes(trajectories.observations) + columns.row_bytes(trajectories.actions)
        ends = trajectories.offsets * row + np.arange(len(trajectories.offsets)) * columns.row_bytes(
            trajectories.observations
        )
        start = 0
        while start < trajectories.n_episodes:
            room = self._shard_bytes - self._bytes
            stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            if stop <= start and self._parts:
                self._flush()
                continue
            stop = max(stop, start + 1)
            self._parts.append(trajectories.part(start, stop))
            self._bytes += int(ends[stop] - ends[start])
            start = stop

    def _flush(self) -> None:
        index = len(self._shards)
        files = {}
        for name in ("observations", "actions"):
            path = self._folder / f"{name}-{index:05d}.arrow"
            columns.write(path, [np.asarray(getattr(p, name)) for p in self._parts])
            files[path.name] = path.stat().st_size
        self._shards.append(
            Shard(
                n_episodes=sum(p.n_episodes for p in self._parts),
                n_steps=sum(p.n_steps for p in self._parts),
                files=files,
            )
        )
        self._parts, self._bytes = [], 0

    def finish(self, name: str, provenance: JsonValue, findings: tuple[Finding, ...]) -> DatasetManifest:
        """Write what is left and say what it all is."""
        if self._first is None:
            raise DatasetError(f"dataset '{name}' would have no episodes: there is nothing to store.")
        self._flush()
        lengths, terminated, truncated, final_observed = np.concatenate(self._ends).T
        ends = {
            "length": lengths,
            "terminated": terminated.astype(bool),
            "truncated": truncated.astype(bool),
            "final_observed": final_observed.astype(bool),
        }
        path = self._folder / "episodes.arrow"
        pl.DataFrame(ends).write_ipc(path, compression="uncompressed")
        first = self._first
        return DatasetManifest(
            name=name,
            digest=digest_of_columns(
                self._hashers["observations"],
                self._hashers["actions"],
                np.concatenate([[0], np.cumsum(lengths)]),
                ends["terminated"],
                ends["truncated"],
                ends["final_observed"],
                first.n_actions,
                first.action_bounds,
            ),
            n_episodes=len(lengths),
            n_steps=int(lengths.sum()),
            n_terminated=int(terminated.sum()),
            n_truncated=int(truncated.sum()),
            n_unobserved=int((final_observed == 0).sum()),
            observation=_spec(first.observations),
            action=_spec(first.actions),
            n_actions=first.n_actions,
            action_bounds=first.action_bounds,
            lengths=Lengths(
                minimum=int(lengths.min()),
                median=float(np.median(lengths)),
                mean=float(lengths.mean()),
                maximum=int(lengths.max()),
            ),
            statistics={key: moments.moments().to_json() for key, moments in self._moments.items()},
            shards=tuple(self._shards),
            episodes_bytes=path.stat().st_size,
            provenance=provenance,
            findings=findings,
        )


def _spec(column: Column) -> ArraySpec:
    return ArraySpec(shape=column.shape[1:], dtype=column.dtype.name)


def _check_same_kind(first: Trajectories, other: Trajectories) -> None:
    for name in ("observations", "actions"):
        a, b = getattr(first, name), getattr(other, name)
        if (a.dtype, a.shape[1:]) != (b.dtype, b.shape[1:]):
            raise DatasetError(f"'{name}' are {a.dtype} {a.shape[1:]} and later {b.dtype} {b.shape[1:]}.")
    if (first.n_actions, first.action_bounds) != (other.n_actions, other.action_bounds):
        raise DatasetError("what actions mean changes between episodes: number of choices or bounds differ.")


def _write_label_shard(partial: Path, index: int, labels: AnyLabels) -> None:
    """Diagnostics first, the labels last: their file says that the shard is finished."""
    if labels.diagnostics is not None:
        path = partial / f"diagnostics-{index:05d}.arrow"
        labels.diagnostics.write_ipc(path.with_suffix(".unfinished"), compression="uncompressed")
        _put(path.with_suffix(".unfinished"), path)
    column, values = ("actions", labels.actions) if isinstance(labels, ActionLabels) else ("rewards", labels.rewards)
    path = partial / f"{column}-{index:05d}.arrow"
    columns.write(path.with_suffix(".unfinished"), [values])
    _put(path.with_suffix(".unfinished"), path)


def _column_of(partial: Path, index: int) -> Literal["rewards", "actions"] | None:
    """What the labels of a finished shard are; None if it is not finished."""
    for column in ("rewards", "actions"):
        if (partial / f"{column}-{index:05d}.arrow").exists():
            return column
    return None


def _finish_labels(partial: Path, dataset: StoredDataset, label_id: str, origin: JsonValue) -> None:
    """Write the manifest of a label set whose shards are all finished, one shard in memory at a time."""
    shards, returns, total = [], [], 0.0
    moments = MomentsOf()
    column = _column_of(partial, 0)
    assert column is not None, "a dataset has at least one shard"
    for index, (shard, trajectories) in enumerate(zip(dataset.manifest.shards, dataset.shards(), strict=True)):
        path = partial / f"{column}-{index:05d}.arrow"
        values = columns.read(path)
        moments.update(values)
        if column == "rewards":
            returns.append(episode_returns(values, trajectories.offsets))
            total += float(values.sum(dtype=np.float64))
        files = {path.name: path.stat().st_size}
        shards.append(Shard(n_episodes=shard.n_episodes, n_steps=shard.n_steps, files=files))
    parts = sorted(partial.glob("diagnostics-*.arrow"))
    diagnostics = partial / "diagnostics.arrow"
    if parts:
        assert len(parts) == len(shards), "a labeler gives diagnostics for all shards or for none"
        pl.concat([columns.read_table(p) for p in parts]).write_ipc(diagnostics, compression="uncompressed")
    manifest = LabelsManifest(
        dataset=dataset.digest,
        id=label_id,
        column=column,
        n_steps=dataset.manifest.n_steps,
        n_episodes=dataset.manifest.n_episodes,
        shards=tuple(shards),
        diagnostics_bytes=diagnostics.stat().st_size if parts else None,
        rewards=_summary(total, moments.moments()) if returns else None,
        returns=_summary(total, moments_of(np.concatenate(returns))) if returns else None,
        actions=None if returns else moments.moments().to_json(),
        origin=origin,
    )
    _write_json(partial / "manifest.json", manifest)
    for part in parts:
        part.unlink()


def _made_by(origin: JsonValue) -> str:
    labeler = origin.get("labeler") if isinstance(origin, dict) else None
    if not isinstance(origin, dict) or not isinstance(labeler, dict):
        return "unknown"
    if labeler.get("kind") != "transformed":
        return str(labeler.get("kind"))
    transforms = labeler.get("transforms")
    kinds = [str(t.get("kind")) for t in transforms if isinstance(t, dict)] if isinstance(transforms, list) else []
    return " > ".join([_made_by(origin.get("raw")), *kinds])


def _summary(total: float, moments: Moments) -> dict[str, JsonValue]:
    values = {"mean": moments.mean, "std": moments.std, "minimum": moments.minimum, "maximum": moments.maximum}
    return {"sum": total, **{name: float(value[0]) for name, value in values.items()}}


def _write_json(path: Path, model: Config) -> None:
    path.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _put(unfinished: Path, path: Path) -> None:
    """Make a finished file appear at once, for good."""
    _fsync(unfinished)
    unfinished.rename(path)
    _fsync(path.parent)


def publish(partial: Path, target: Path) -> None:
    """Make a finished file or folder appear at once, for good."""
    for file in partial.rglob("*"):
        _fsync(file)
    _fsync(partial)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(target)
    _fsync(target.parent)
    _fsync(target.parent.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path, model: type[M]) -> M:
    file = path / "manifest.json"
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text)["format"]
        if found != model.model_fields["format"].default:
            raise StoreError(f"{file}: its format is {found!r}, not one that this version of assay reads.")
        return model.model_validate_json(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} is not a whole manifest ({error}). Delete {path} and make it again.") from error


def _check_sizes(path: Path, files: dict[str, int]) -> None:
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            said = "is missing" if found is None else f"has {found:,} bytes"
            raise StoreError(
                f"{path / name} {said}, its manifest says {size:,}: it is cut or was altered. "
                f"Delete {path} and make it again."
            )
