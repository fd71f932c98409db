"""The comparison: which way of labelling was worth it, from what lies in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
from pydantic import Field, JsonValue

from algorithms.evaluation import normalised_score
from data.config import Config
from data.labels import episode_returns
from labelers.action_models import explained_variance
from labelers.inverse_dynamics import known_steps
from labelers.quality import correlation

if TYPE_CHECKING:
    from data.store import StoredLabels
    from pipelines.work import Cell, Work


class Agreement(Config):
    """How far labels agree with the file's own rewards; None where it is not defined, as for constant labels.

    Correlations over steps, and over the undiscounted returns of episodes.
    """

    pearson_steps: float | None
    spearman_steps: float | None
    pearson_returns: float | None
    spearman_returns: float | None


class LabelRow(Config):
    """One label set. convergence: what the labeler's diagnostics come to, in words; notes: what it warned of."""

    dataset: str
    labeler: str
    label_id: str
    agreement: Agreement | None
    rewards: dict[str, JsonValue]
    returns: dict[str, JsonValue]
    convergence: str | None = None
    notes: tuple[str, ...] = ()


class ActionRow(Config):
    """One set of action labels.

    used: in place of the file's actions. agreement: with those, on the steps where the labeler was not shown them: the
        explained part of their variance, or for discrete actions the share that is equal; None if it was shown all.
    """

    dataset: str
    labeler: str
    label_id: str
    used: bool
    measure: Literal["R2", "accuracy"]
    agreement: float | None
    notes: tuple[str, ...] = ()


class ScoreRow(Config):
    """What policies trained on one label set reach.

    scores: by seed, the mean over the evaluation episodes of the final policy; None for a run that is not there, and
        for all where policies are not rolled out. mean, std: over the seeds there are; std is the sample's, None below
        two. losses: by name, the final value, mean over seeds.
    """

    dataset: str
    algorithm: str
    labeler: str
    scores: dict[int, float | None]
    mean: float | None
    std: float | None
    n: int
    losses: dict[str, float] = Field(default={})


class DataRow(Config):
    """A dataset by its own account. score: mean return of its episodes in the unit of the scores, if it has rewards."""

    dataset: str
    digest: str
    n_episodes: int
    n_steps: int
    unit: Literal["normalised score", "return"] | None
    score: float | None


class Comparison(Config):
    """All that a study came to. complete: every run that the study names is there."""

    format: Literal["assay-comparison/1"] = "assay-comparison/1"
    study: str
    id: str
    complete: bool
    data: tuple[DataRow, ...]
    labels: tuple[LabelRow, ...]
    actions: tuple[ActionRow, ...] = ()
    scores: tuple[ScoreRow, ...]

    def label_row(self, dataset: str, labeler: str) -> LabelRow:
        """The row of a label set."""
        return next(row for row in self.labels if (row.dataset, row.labeler) == (dataset, labeler))

    def frame(self) -> pl.DataFrame:
        """One row a dataset, algorithm and labeler, as shown."""
        rows = []
        for score in self.scores:
            label = self.label_row(score.dataset, score.labeler)
            agreement = label.agreement.model_dump() if label.agreement else dict.fromkeys(Agreement.model_fields)
            rows.append(
                {
                    "dataset": score.dataset,
                    "algorithm": score.algorithm,
                    "labeler": score.labeler,
                    "mean": score.mean,
                    "std": score.std,
                    "n": score.n,
                    **agreement,
                    "convergence": label.convergence,
                    "label_id": label.label_id,
                }
            )
        numbers = dict.fromkeys(("mean", "std", *Agreement.model_fields), pl.Float64)
        return pl.DataFrame(rows, schema_overrides={**numbers, "convergence": pl.String})


def compare(work: Work) -> Comparison:
    """What a study came to, from what lies in the store; label sets must be there, runs may be missing."""
    data, labels, actions, scores = [], [], [], []
    complete = True
    for name in work.study.datasets:
        stored = work.dataset(name)
        offsets = stored.trajectories().offsets
        entry, source = work.study.datasets[name], work.source_labels(name)
        truth = None if source is None else np.asarray(work.store.labels(stored.digest, source).rewards)
        unit: Literal["normalised score", "return"] | None = None
        if entry.environment is not None:
            unit = "return" if entry.reference is None else "normalised score"
        own = None if truth is None else float(episode_returns(truth, offsets).mean())
        if own is not None and entry.reference is not None:
            own = float(normalised_score(np.asarray(own), entry.reference))
        data.append(
            DataRow(
                dataset=name,
                digest=stored.digest,
                n_episodes=stored.manifest.n_episodes,
                n_steps=stored.manifest.n_steps,
                unit=unit,
                score=own,
            )
        )
        actions += [_action_row(work, name, labeler) for labeler in work.study.action_labelers]
        for labeler in work.study.reward_labelers:
            found = work.labels(name, labeler)
            labels.append(
                LabelRow(
                    dataset=name,
                    labeler=labeler,
                    label_id=found.id,
                    agreement=None if truth is None else agreement(np.asarray(found.rewards), truth, offsets),
                    rewards=found.manifest.rewards,
                    returns=found.manifest.returns,
                    convergence=convergence(work.diagnostics(name, labeler)),
                    notes=_notes(found),
                )
            )
        for algorithm in work.study.algorithms:
            cells = work.cells(name, algorithm)
            complete &= all(work.store.has_run(cell.run_id) for cell in cells)
            for labeler in work.study.reward_labelers:
                scores.append(_score_row(work, [cell for cell in cells if cell.labeler == labeler]))
    return Comparison(
        study=work.study.study,
        id=work.id,
        complete=complete,
        data=tuple(data),
        labels=tuple(labels),
        actions=tuple(actions),
        scores=tuple(scores),
    )


def _score_row(work: Work, cells: Sequence[Cell]) -> ScoreRow:
    scores: dict[int, float | None] = {}
    losses: dict[str, list[float]] = {}
    for cell in cells:
        there = work.store.has_run(cell.run_id)
        evaluations = work.evaluations(cell) if there else None
        column = None
        if evaluations is not None:
            column = evaluations["return" if evaluations["score"].null_count() else "score"]
        scores[cell.seed] = None if column is None else float(column.to_numpy().mean())
        if there:
            metrics = work.metrics(cell)
            for quantity in metrics.columns:
                if quantity != "step" and not quantity.startswith("evaluation/"):
                    losses.setdefault(quantity, []).append(float(metrics[quantity].drop_nulls()[-1]))
    found = spread([score for score in scores.values() if score is not None])
    n = sum(work.store.has_run(cell.run_id) for cell in cells)
    return ScoreRow(
        dataset=cells[0].dataset,
        algorithm=cells[0].algorithm,
        labeler=cells[0].labeler,
        scores=scores,
        mean=found.mean,
        std=found.std,
        n=n,
        losses={quantity: float(np.mean(values)) for quantity, values in losses.items()},
    )


def _action_row(work: Work, dataset: str, labeler: str) -> ActionRow:
    found, trajectories = work.labels(dataset, labeler), work.dataset(dataset).trajectories()
    shown = work.evidence(dataset, labeler).actions
    assert shown is not None, "labelers of actions are shown some"
    n = trajectories.n_steps
    hidden = ~known_steps(shown, trajectories.n_actions)
    truth = np.asarray(trajectories.actions).reshape(n, -1)[hidden]
    labels = np.asarray(found.actions).reshape(n, -1)[hidden]
    agreement: float | None = None
    if len(truth) and trajectories.n_actions is not None:
        agreement = float((truth == labels).all(1).mean())
    elif len(truth):
        truth = truth.astype(np.float64)
        agreement = explained_variance(truth - labels, truth)
    return ActionRow(
        dataset=dataset,
        labeler=labeler,
        label_id=found.id,
        used=work.study.datasets[dataset].actions == labeler,
        measure="R2" if trajectories.n_actions is None else "accuracy",
        agreement=agreement,
        notes=_notes(found),
    )


def _notes(found: StoredLabels) -> tuple[str, ...]:
    """What a label set's labeler and transforms warned of."""
    origin = found.manifest.origin
    raw = origin.get("raw", origin) if isinstance(origin, dict) else {}
    return tuple(dict.fromkeys(n for o in (origin, raw) if isinstance(o, dict) for n in _words(o.get("notes"))))


def _words(value: JsonValue) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of n values; None where not defined."""

    mean: float | None
    std: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread of the values there are."""
    n = len(values)
    mean = float(np.mean(values)) if n else None
    return Spread(mean, float(np.std(values, ddof=1)) if n > 1 else None, n)


def agreement(rewards: np.ndarray, reference: np.ndarray, offsets: np.ndarray) -> Agreement:
    """Correlations of `rewards` with `reference`, both [N], in episodes given by offsets [E + 1]."""
    steps = correlation(rewards, reference)
    returns = correlation(episode_returns(rewards, offsets), episode_returns(reference, offsets))
    return Agreement(
        pearson_steps=steps.pearson,
        spearman_steps=steps.spearman,
        pearson_returns=returns.pearson,
        spearman_returns=returns.spearman,
    )


def convergence(diagnostics: pl.DataFrame | None) -> str | None:
    """How labelling went, in words: outcomes by count, the largest error, the median of iterations."""
    if diagnostics is None:
        return None
    said = []
    for name in diagnostics.columns:
        column = diagnostics[name]
        if column.dtype == pl.String or column.dtype == pl.Boolean or column.dtype == pl.Categorical:
            counts = column.value_counts(sort=True)
            said += [
                f"{value if column.dtype != pl.Boolean else f'{name} {value}'} {n}/{len(column)}"
                for value, n in counts.iter_rows()
            ]
    return ", ".join(said) or None
