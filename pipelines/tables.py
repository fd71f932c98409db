"""Numbers and tables in a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from rich.table import Table

from data.statistics import Moments
from data.store import StoredDataset, StoredLabels
from labelers.quality import Quality
from pipelines.comparison import Comparison, LabelRow, ScoreRow


def number(value: float | None, digits: int = 3) -> str:
    """A number, or n/a where there is none."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def score_text(row: ScoreRow) -> str:
    """Mean and spread of a score, with the spread n/a for a single seed."""
    if row.mean is None:
        return "n/a"
    spread = "n/a" if row.std is None else f"{row.std:.1f}"
    return f"{row.mean:.1f} ± {spread}"


def comparison_table(comparison: Comparison, dataset: str) -> Table:
    """Labelers of one dataset: score, agreement with the file's rewards; below, how labelling went."""
    data = next(row for row in comparison.data if row.dataset == dataset)
    labels = [row for row in comparison.labels if row.dataset == dataset]
    algorithms = list(dict.fromkeys(row.algorithm for row in comparison.scores if row.dataset == dataset))
    table = _table(
        f"{dataset}: {data.n_episodes:,} episodes, {data.n_steps:,} steps",
        [*_actions(comparison, dataset), *_how_labelling_went(labels), _caption(data.unit, data.score)],
    )
    table.add_column("\nlabeler", no_wrap=True)
    score = "score" if data.unit else ""
    if len(algorithms) == 1:
        table.add_column(f"{algorithms[0]}\n{score}", justify="right", no_wrap=True)
    elif algorithms:
        table.add_column("\nalgorithm", no_wrap=True)
        table.add_column(f"\n{score}", justify="right", no_wrap=True)
    if algorithms:
        table.add_column("\nn", justify="right", no_wrap=True)
    for title in ("Pearson\nsteps", "Spearman\nsteps", "Pearson\nreturns", "Spearman\nreturns"):
        table.add_column(title, justify="right", no_wrap=True)
    for label in labels:
        correlations = [number(value) for value in _correlations(label)]
        if not algorithms:
            table.add_row(label.labeler, *correlations)
        for place, algorithm in enumerate(algorithms):
            row = next(
                s
                for s in comparison.scores
                if (s.dataset, s.algorithm, s.labeler) == (dataset, algorithm, label.labeler)
            )
            named = [algorithm] if len(algorithms) > 1 else []
            first = (label.labeler, correlations) if place == 0 else ("", [""] * len(correlations))
            table.add_row(first[0], *named, score_text(row), str(row.n), *first[1])
    return table


def _table(title: str, caption: Sequence[str]) -> Table:
    """An empty table, plain, with lines below."""
    return Table(
        title=title,
        title_justify="left",
        caption="\n".join(caption),
        caption_justify="left",
        header_style="bold",
        pad_edge=False,
        box=None,
        padding=(0, 1),
    )


def _correlations(label: LabelRow) -> tuple[float | None, ...]:
    if label.agreement is None:
        return (None,) * 4
    found = label.agreement
    return found.pearson_steps, found.spearman_steps, found.pearson_returns, found.spearman_returns


def _actions(comparison: Comparison, dataset: str) -> list[str]:
    """How action labels agree with the actions of the file, where the labeler was not shown those."""
    said = []
    for row in comparison.actions:
        if row.dataset == dataset:
            use = "trained on" if row.used else "not used"
            said.append(f"actions by {row.labeler} ({use}): {row.measure} {number(row.agreement)} where not shown")
            said += [f"{row.labeler}: {note}" for note in row.notes]
    return said


def _how_labelling_went(labels: Sequence[LabelRow]) -> list[str]:
    said = []
    for label in labels:
        remarks = [*([label.convergence] if label.convergence else []), *label.notes]
        said += [f"{label.labeler}: {remark}" for remark in remarks]
    return said


def _caption(unit: str | None, score: float | None) -> str:
    said = "correlations with the rewards of the file; n/a: constant labels, or no rewards in the file"
    if unit is None:
        return said
    mean = "" if score is None else f"; the data's own mean is {score:.1f}"
    return f"score: {unit}, mean ± sample standard deviation over n seeds{mean}\n{said}"


def dataset_tables(stored: StoredDataset, sets: Sequence[StoredLabels]) -> list[Table | str]:
    """A stored dataset: what it is, its label sets and returns, statistics of each dimension, findings."""
    manifest = stored.manifest
    lengths = manifest.lengths
    actions = "continuous"
    if manifest.n_actions is not None:
        actions = f"discrete, {' x '.join(map(str, manifest.n_actions))} choices"
    elif manifest.action_bounds is not None:
        actions = f"continuous in [{manifest.action_bounds[0]:g}, {manifest.action_bounds[1]:g}]"
    shown: list[Table | str] = [
        f"{stored.name} {stored.digest}\n"
        f"{_origin(manifest.provenance)}\n"
        f"{manifest.n_episodes:,} episodes, {manifest.n_steps:,} steps; {manifest.n_terminated:,} terminated, "
        f"{manifest.n_truncated:,} truncated, {manifest.n_unobserved:,} without a final observation\n"
        f"steps an episode: {lengths.minimum:,} to {lengths.maximum:,}, median {lengths.median:g}, "
        f"mean {lengths.mean:.1f}\n"
        f"observations {manifest.observation.dtype} {manifest.observation.shape}; "
        f"actions {manifest.action.dtype} {manifest.action.shape}, {actions}"
    ]
    if sets:
        table = _table("returns by label set", [])
        for title in ("labels", "id", "mean", "std", "lowest", "highest"):
            table.add_column(title, justify="left" if title in ("labels", "id") else "right", overflow="fold")
        for labels in sets:
            returns = labels.manifest.returns
            values = ["actions"]
            if returns is not None:
                values = [f"{float(str(returns[key])):,.2f}" for key in ("mean", "std", "minimum", "maximum")]
            table.add_row(labels.labeler, labels.id[:12], *values)
        shown.append(table)
    for column in ("observations", "actions"):
        shown.append(_moments_table(column, stored.statistics(column)))
    shown += [f"{finding.severity}: {finding.message} [{finding.code}]" for finding in manifest.findings]
    return shown


def _origin(provenance: JsonValue) -> str:
    """Where a dataset came from, in a line: a file, or others by an operation."""
    match provenance:
        case {"file": str(file), "reader": {"kind": str(kind)}}:
            return f"from {file}, read as {kind}"
        case {"operation": str(operation), "parents": [*parents]}:
            return f"by {operation} from {', '.join(str(p['name']) for p in parents if isinstance(p, dict))}"
    return "from elsewhere"


def _moments_table(title: str, moments: Moments, most: int = 32) -> Table:
    """A row a dimension."""
    left_out = len(moments.mean) - most
    table = _table(title, [f"{left_out:,} more: --json has them"] if left_out > 0 else [])
    for name in ("dimension", "mean", "std", "lowest", "highest", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for d in range(min(len(moments.mean), most)):
        numbers = (moments.mean[d], moments.std[d], moments.minimum[d], moments.maximum[d])
        table.add_row(str(d), *(f"{value:.4g}" for value in numbers), "constant" if moments.constant[d] else "")
    return table


def quality_table(dataset: str, against: str, found: Mapping[str, Quality]) -> Table:
    """Label sets of one dataset against a reference, one row each; all of `Quality` is in the JSON."""
    notes: dict[str, list[str]] = {}
    for labeler, quality in found.items():
        for note in quality.notes:
            notes.setdefault(note, []).append(labeler)
    table = _table(
        f"{dataset}: label sets against {against}",
        [
            *(f"{', '.join(labelers)}: {note}" for note, labelers in notes.items()),
            "inside: of the steps of one episode, mean over episodes",
            "STARC: distance as rewards for planning, 0 the same to 1 opposite",
            "varies: part of the variance left among steps in similar states",
        ],
    )
    table.add_column("\nlabeler", no_wrap=True)
    for title in ("Pearson\nsteps", "Spearman\nsteps", "Spearman\nreturns", "Spearman\ninside", "\nSTARC", "\nvaries"):
        table.add_column(title, justify="right", no_wrap=True)
    for labeler, quality in found.items():
        table.add_row(
            labeler,
            number(quality.steps.pearson),
            number(quality.steps.spearman),
            number(quality.returns.spearman),
            number(quality.within_episodes.spearman),
            number(quality.starc),
            number(quality.labels_spread.share),
        )
    return table
