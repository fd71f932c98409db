"""The work of a study, step by step: what each step's result is called, whether it is there, and how it is made.

Everything is found by content: the key of an ingestion gives a dataset digest, that and a labeler's evidence give
label ids, those and the training settings give run ids. Every step returns at once if its result is there. Nothing
here knows of Prefect; tracking is given from outside.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from pydantic import JsonValue

from algorithms.algorithm import Algorithm
from algorithms.evaluation import evaluate, normalised_score, resolve_device
from algorithms.policy import Policy, save_policy
from algorithms.training import Member, checkpoint_members, train
from data.digests import digest_of
from data.errors import ConfigurationError
from data.ingest import Ingested, ingest, ingest_key, ingested
from data.labels import AnyLabels, Labels, label_id
from data.readers import recognise
from data.readers.reader import Reader
from data.store import Store, StoredDataset, StoredLabels
from data.trajectories import Column, Trajectories
from labelers.evidence import NOTHING, Evidence
from labelers.labeler import FittedLabeler, LearnedLabeler
from pipelines.comparison import Comparison
from pipelines.home import Home, write_whole
from pipelines.progress import bar
from pipelines.study import SELF, SOURCE, Study

if TYPE_CHECKING:
    from pipelines.recording import Record


RETURN, SCORE = "evaluation/return", "evaluation/normalised_score"
"""Names of the metrics of a roll-out."""


@dataclass(frozen=True)
class LabelIds:
    """A label set as the labeler gave it (raw), and after its transforms (final; the same id if it has none)."""

    raw: str
    final: str


@dataclass(frozen=True)
class Cell:
    """One run of a study: what is trained on which labels from which seed."""

    dataset: str
    algorithm: str
    labeler: str
    seed: int
    label_id: str
    run_id: str

    @property
    def name(self) -> str:
        """For people; the identity is `run_id`."""
        return f"{self.dataset} {self.labeler} {self.algorithm} seed {self.seed}"


class Work:
    """A study and the home folder in which it is done."""

    def __init__(self, study: Study, home: Home) -> None:
        self.study = study
        self.home = home
        self.store: Store = home.store
        self._keys: dict[str, str] = {}
        self._datasets: dict[str, StoredDataset] = {}
        self._evidence: dict[tuple[str, str], Evidence] = {}

    # ------------------------------------------------------------ identities

    @cached_property
    def id(self) -> str:
        """Identity of the study, known before any work: what it says and the content of its files."""
        said = self.study.model_dump(mode="json", exclude={"tracking", "device", "datasets", "demonstrations"})
        for name, labeler in self.study.labelers.items():
            if labeler.evidence_spec is not None:
                said["labelers"][name][labeler.evidence_field] = labeler.evidence_spec.identity()
        datasets = {
            name: {"ingest": self.ingest_key(name), **entry.model_dump(mode="json", exclude={"path", "reader"})}
            for name, entry in self.study.datasets.items()
        }
        demonstrations = {name: self.ingest_key(name) for name in self.study.demonstrations}
        versions = {name: labeler.version for name, labeler in self.study.labelers.items()}
        return digest_of({**said, "datasets": datasets, "demonstrations": demonstrations, "versions": versions})

    def reader(self, name: str) -> Reader:
        """How a source file is read."""
        entry = self.study.files()[name]
        return entry.reader or recognise(entry.path)

    def ingest_key(self, name: str) -> str:
        """Key of a source file's ingestion."""
        if name not in self._keys:
            self._keys[name] = ingest_key(self.study.files()[name].path, name, self.reader(name))
        return self._keys[name]

    def ingested(self, name: str) -> Ingested | None:
        """What the ingestion of a source file gave, or None if it is still to be done."""
        return ingested(self.ingest_key(name), self.store)

    def dataset(self, name: str) -> StoredDataset:
        """An ingested dataset."""
        if name not in self._datasets:
            found = self.ingested(name)
            assert found is not None, f"{name} is used before it is ingested"
            self._datasets[name] = self.store.dataset(name, found.dataset)
        return self._datasets[name]

    def source_labels(self, name: str) -> str | None:
        """Id of the label set of a file's own rewards, if it has any."""
        found = self.ingested(name)
        assert found is not None, f"{name} is used before it is ingested"
        return found.source_labels

    def evidence(self, dataset: str, labeler: str) -> Evidence:
        """What a labeler may look at, resolved. Label sets that it names must be there."""
        if (dataset, labeler) not in self._evidence:
            spec = self.study.labelers[labeler].evidence_spec
            found = NOTHING if spec is None else spec.resolve(_StudyEvidence(self, dataset))
            self._evidence[dataset, labeler] = found
        return self._evidence[dataset, labeler]

    def label_ids(self, dataset: str, labeler: str) -> LabelIds:
        """Ids of a labeler's label sets, whether or not they are there yet."""
        configuration = self.study.labeler(labeler)
        digest = self.dataset(dataset).digest
        if configuration.kind == SOURCE:
            raw = self._source_labels_or_refuse(dataset)
        else:
            evidence = self.evidence(dataset, labeler).digest
            if (actions := self.actions_id(dataset, labeler)) is not None:
                evidence = digest_of({"evidence": evidence, "actions": actions})
            raw = label_id(digest, configuration.identity(), configuration.version, evidence)
        if not configuration.transforms:
            return LabelIds(raw, raw)
        return LabelIds(raw, label_id(digest, self._transformed(labeler), 1, raw))

    def actions_id(self, dataset: str, labeler: str | None = None) -> str | None:
        """Id of the action labels in place of a dataset's own: in training, and for a labeler unless it makes them."""
        named = self.study.datasets[dataset].actions if dataset in self.study.datasets else None
        if named is None or (labeler is not None and self.study.labelers[labeler].column == "actions"):
            return None
        return self.label_ids(dataset, named).final

    def trajectories(self, dataset: str, labeler: str | None = None) -> Trajectories:
        """A dataset as it is trained on, or as a labeler sees it: with action labels in place of actions, if it has."""
        trajectories, actions = self.dataset(dataset).trajectories(), self._action_labels(dataset, labeler)
        return trajectories if actions is None else replace(trajectories, actions=actions)

    def _action_labels(self, dataset: str, labeler: str | None = None) -> Column | None:
        label = self.actions_id(dataset, labeler)
        return None if label is None else self.store.labels(self.dataset(dataset).digest, label).actions

    def cells(self, dataset: str, algorithm: str) -> list[Cell]:
        """The runs of one dataset and algorithm: one population. Label sets need not be there, their evidence must."""
        cells = []
        actions = self.actions_id(dataset)
        for labeler in self.study.reward_labelers:
            label = self.label_ids(dataset, labeler).final
            for seed in self.study.seeds:
                identity: dict[str, JsonValue] = {
                    "dataset": self.dataset(dataset).digest,
                    "labels": label,
                    "algorithm": self.study.algorithms[algorithm].model_dump(mode="json"),
                    "training": self.study.training.model_dump(mode="json"),
                    "seed": seed,
                    "evaluation": self._evaluation(dataset),
                    **({} if actions is None else {"actions": actions}),
                }
                cells.append(Cell(dataset, algorithm, labeler, seed, label, digest_of(identity)))
        return cells

    # ------------------------------------------------------------ what is there

    def is_ingested(self) -> bool:
        """Whether every file is in the store."""
        return all(self.ingested(name) is not None for name in self.study.files())

    def is_labelled(self) -> bool:
        """Whether every label set is in the store."""
        return self.is_ingested() and self._labelled() == len(self.study.datasets) * len(self.study.labelers)

    def is_trained(self) -> bool:
        """Whether every run is in the store."""
        return self.is_labelled() and all(self.store.has_run(cell.run_id) for cell in self.all_cells())

    def all_cells(self) -> list[Cell]:
        """Every run of the study; evidence must be there."""
        return [c for d in self.study.datasets for a in self.study.algorithms for c in self.cells(d, a)]

    def progress(self) -> str:
        """What is done, in words."""
        files = self.study.files()
        n_ingested = sum(self.ingested(name) is not None for name in files)
        n_sets = len(self.study.datasets) * len(self.study.labelers)
        n_populations = len(self.study.datasets) * len(self.study.algorithms)
        n_runs = n_populations * len(self.study.reward_labelers) * len(self.study.seeds)
        n_labelled = self._labelled() if n_ingested == len(files) else 0
        n_trained = sum(self.store.has_run(c.run_id) for c in self.all_cells()) if n_labelled == n_sets else 0
        return (
            f"{n_ingested} of {len(files)} files ingested, {n_labelled} of {n_sets} label sets, "
            f"{n_trained} of {n_runs} runs"
        )

    def _labelled(self) -> int:
        """How many label sets are there, up to the first missing one of each dataset."""
        n = 0
        for dataset in self.study.datasets:
            digest = self.dataset(dataset).digest
            for labeler in self.study.labeling_order():
                ids = self.label_ids(dataset, labeler)
                if not (self.store.has_labels(digest, ids.raw) and self.store.has_labels(digest, ids.final)):
                    break
                n += 1
        return n

    def labels(self, dataset: str, labeler: str) -> StoredLabels:
        """A labeler's label set, transformed."""
        return self.store.labels(self.dataset(dataset).digest, self.label_ids(dataset, labeler).final)

    def diagnostics(self, dataset: str, labeler: str) -> pl.DataFrame | None:
        """What a labeler had to say about each episode, if it did."""
        return self.store.labels(self.dataset(dataset).digest, self.label_ids(dataset, labeler).raw).diagnostics

    def metrics(self, cell: Cell) -> pl.DataFrame:
        """Metrics of a finished run: a column `step`, and one for each metric, null where it has no value."""
        return pl.read_ipc(self.store.run(cell.run_id) / "metrics.arrow")

    def evaluations(self, cell: Cell) -> pl.DataFrame | None:
        """Returns of a finished run's final policy: columns step, episode, return, score (null without a reference)."""
        path = self.store.run(cell.run_id) / "evaluations.arrow"
        return pl.read_ipc(path) if path.exists() else None

    def remember(self, comparison: Comparison) -> None:
        """Keep what the study came to."""
        write_whole(self._memory, comparison.model_dump_json(indent=1) + "\n")

    def remembered(self) -> Comparison | None:
        """What the study came to when it was last compared."""
        if not self._memory.exists():
            return None
        return Comparison.model_validate_json(self._memory.read_text(encoding="utf-8"))

    @property
    def _memory(self) -> Path:
        return self.home.studies / self.id / "comparison.json"

    def _evaluation(self, dataset: str) -> JsonValue:
        environment = self.study.datasets[dataset].environment
        if environment is None:
            return None
        return {"environment": environment, **self.study.evaluation.model_dump(mode="json")}

    def _transformed(self, labeler: str) -> dict[str, JsonValue]:
        transforms: list[JsonValue] = [t.model_dump(mode="json") for t in self.study.labeler(labeler).transforms]
        return {"kind": "transformed", "transforms": transforms}

    def _source_labels_or_refuse(self, dataset: str) -> str:
        found = self.source_labels(dataset)
        if found is None:
            raise ConfigurationError(f"dataset '{dataset}' has no rewards of its own, and a labeler asks for them.")
        return found

    # ------------------------------------------------------------ steps

    @cached_property
    def device(self) -> torch.device:
        """Where labelers and algorithms compute."""
        return resolve_device(self.study.device)

    def ingest(self, name: str) -> Ingested:
        """Read a source file into the store."""
        entry, reader = self.study.files()[name], self.reader(name)
        with reader.open(entry.path) as source:
            total = source.n_steps
        with bar(f"ingest {name}", total, "steps") as progress:
            return ingest(entry.path, name, self.store, reader, progress)

    def label(self, dataset: str, labeler: str) -> StoredLabels:
        """Make a labeler's label sets: as the labeler gives it, then transformed."""
        stored, ids = self.dataset(dataset), self.label_ids(dataset, labeler)
        if not self.store.has_labels(stored.digest, ids.raw):
            self._label_raw(stored, ids.raw, dataset, labeler)
        if ids.final != ids.raw and not self.store.has_labels(stored.digest, ids.final):
            self._label_transformed(stored, ids, labeler)
        return self.store.labels(stored.digest, ids.final)

    def _label_raw(self, stored: StoredDataset, label: str, dataset: str, labeler: str) -> None:
        configuration, evidence = self.study.labelers[labeler], self.evidence(dataset, labeler)
        spec = configuration.evidence_spec
        origin: dict[str, JsonValue] = {
            "labeler": configuration.identity(),
            "version": configuration.version,
            "evidence": {
                "digest": evidence.digest,
                "named": None if spec is None else spec.model_dump(mode="json"),
            },
            "actions": self.actions_id(dataset, labeler),
        }
        fitted: list[FittedLabeler] = []
        actions = self._action_labels(dataset, labeler)
        started = time.perf_counter()
        with (
            bar(f"label {dataset} with {labeler}", stored.manifest.n_episodes, "episodes") as progress,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")

            def make(index: int, shard: Trajectories, steps: slice) -> AnyLabels:
                if not fitted:
                    trajectories = self.trajectories(dataset, labeler)
                    fitted.append(configuration.fit(trajectories, evidence, device=self.device))
                if actions is not None:
                    shard = replace(shard, actions=actions[steps])
                known = None if evidence.known is None else evidence.known[steps]
                labels = fitted[0].label(shard, known, progress)
                # The manifest is written after the last shard: it takes up what is known by then.
                if isinstance(fitted[0], LearnedLabeler):
                    origin["report"] = fitted[0].report
                origin["seconds"] = round(time.perf_counter() - started, 3)
                origin["notes"] = list[JsonValue](sorted({str(w.message) for w in caught}))
                return labels

            self.store.write_labels(stored, label, make, origin)

    def _label_transformed(self, stored: StoredDataset, ids: LabelIds, labeler: str) -> None:
        raw = self.store.labels(stored.digest, ids.raw)
        rewards = np.asarray(raw.rewards)
        offsets = stored.trajectories().offsets
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for transform in self.study.labeler(labeler).transforms:
                rewards = transform.apply(rewards, offsets)
        origin: dict[str, JsonValue] = {
            "labeler": self._transformed(labeler),
            "evidence": {"digest": ids.raw},
            "raw": raw.manifest.origin,
            "notes": list[JsonValue](sorted({str(w.message) for w in caught})),
        }
        self.store.write_labels(stored, ids.final, lambda index, shard, steps: Labels(rewards[steps]), origin)

    def train(self, dataset: str, algorithm: str, record: Record) -> None:
        """Train what is missing of one population: the runs of all labelers and seeds on one dataset.

        An unfinished population that holds all missing runs is taken up at its last checkpoint.
        """
        cells = self.cells(dataset, algorithm)
        missing = [cell for cell in cells if not self.store.has_run(cell.run_id)]
        if not missing:
            return
        checkpoint, members = self._checkpoint(cells, missing)
        stored = self.dataset(dataset)
        rewards = {c.label_id: self.store.labels(stored.digest, c.label_id).rewards for c in members}
        training, evaluation = self.study.training, self.study.evaluation
        learner: Algorithm[Any] = self.study.algorithms[algorithm]
        environment = self.study.datasets[dataset].environment
        title = f"{algorithm} on {dataset}, {len(members)} runs"
        with bar(f"train {title}", training.steps, "steps") as progress:
            trained = train(
                learner,
                self.trajectories(dataset),
                [Member(cell.run_id, rewards[cell.label_id], cell.seed) for cell in members],
                training,
                device=self.device,
                checkpoint=checkpoint,
                evaluate=None if environment is None else lambda policy: self._worth(dataset, policy),
                evaluate_every=evaluation.every if environment is not None else None,
                progress=progress,
                on_checkpoint=lambda metrics: record.progress(
                    members, [_wide(metrics, p) for p in range(len(members))]
                ),
            )
        returns = None
        if environment is not None:
            with bar(f"evaluate {title}", len(members) * evaluation.episodes, "episodes") as progress:
                returns = evaluate(trained.policy, environment, evaluation.episodes, evaluation.seed, progress)
        for p, cell in enumerate(members):
            frame = None if returns is None else self._evaluated(dataset, returns[p])
            self.store.write_run(cell.run_id, _Filling(cell, trained.policy, p, _wide(trained.metrics, p), frame))
        checkpoint.unlink()

    def _checkpoint(self, cells: list[Cell], missing: list[Cell]) -> tuple[Path, list[Cell]]:
        """Where the missing runs are checkpointed, and all runs that train there, in order."""
        by_id = {cell.run_id: cell for cell in cells}
        for path in sorted(self.home.checkpoints.glob("*.safetensors")):
            held = checkpoint_members(path) or ()
            if {cell.run_id for cell in missing} <= set(held) <= by_id.keys():
                return path, [by_id[run_id] for run_id in held]
        name = digest_of([cell.run_id for cell in missing])
        return self.home.checkpoints / f"{name}.safetensors", missing

    def _worth(self, dataset: str, policy: Policy) -> dict[str, np.ndarray]:
        """Mean return and score of each member."""
        entry, evaluation = self.study.datasets[dataset], self.study.evaluation
        assert entry.environment is not None
        returns = evaluate(policy, entry.environment, evaluation.episodes, evaluation.seed).mean(1)
        if entry.reference is None:
            return {RETURN: returns}
        return {RETURN: returns, SCORE: normalised_score(returns, entry.reference)}

    def _evaluated(self, dataset: str, returns: np.ndarray) -> pl.DataFrame:
        reference = self.study.datasets[dataset].reference
        columns = {
            "step": np.full(len(returns), self.study.training.steps),
            "episode": np.arange(len(returns)),
            "return": returns,
            "score": None if reference is None else normalised_score(returns, reference),
        }
        return pl.DataFrame(columns, schema_overrides={"score": pl.Float64})


def _wide(metrics: pl.DataFrame, member: int) -> pl.DataFrame:
    """One member's metrics: a column `step` and one for each metric."""
    own = metrics.filter(pl.col("member") == member).drop("member")
    return own.pivot("name", index="step", values="value").sort("step")


@dataclass(frozen=True, eq=False)
class _Filling:
    """Writes a finished run into its folder."""

    cell: Cell
    policy: Policy
    member: int
    metrics: pl.DataFrame
    evaluations: pl.DataFrame | None

    def __call__(self, folder: Path) -> None:
        save_policy(self.policy, self.member, folder / "policy.safetensors")
        self.metrics.write_ipc(folder / "metrics.arrow", compression="uncompressed")
        if self.evaluations is not None:
            self.evaluations.write_ipc(folder / "evaluations.arrow", compression="uncompressed")
        about = {"format": "assay-run/1", **asdict(self.cell)}
        (folder / "manifest.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


class _StudyEvidence:
    """Where a labeler's evidence is looked up: the files and label sets of the study. Labels are meant as the labeler
    gave them, before transforms; `source` is what the file said."""

    def __init__(self, work: Work, dataset: str) -> None:
        self._work = work
        self._dataset = dataset

    def trajectories(self, name: str) -> Trajectories:
        return self._work.dataset(self._name(name)).trajectories()

    def rewards(self, name: str, labels: str) -> np.ndarray:
        owner = self._name(name)
        if labels == SOURCE:
            found = self._work.source_labels(owner)
            if found is None:
                raise ConfigurationError(f"dataset '{owner}' has no rewards of its own, and a labeler asks for them.")
        else:
            found = self._work.label_ids(owner, labels).raw
        return np.asarray(self._work.store.labels(self._work.dataset(owner).digest, found).rewards)

    def demonstrations_of_dataset(self) -> str | None:
        return self._work.study.demonstrations_of(self._dataset)

    def _name(self, name: str) -> str:
        return self._dataset if name == SELF else name
