"""Numbers and tables in a terminal of 100 columns."""

from __future__ import annotations

from rich.table import Table

from pipelines.comparison import Comparison, ScoreRow


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
    """Labelers of one dataset: score, agreement with the file's rewards, how labelling went."""
    data = next(row for row in comparison.data if row.dataset == dataset)
    table = Table(
        title=f"{dataset}: {data.n_episodes:,} episodes, {data.n_steps:,} steps",
        title_justify="left",
        caption=_caption(data.unit, data.score),
        caption_justify="left",
        header_style="bold",
        pad_edge=False,
        box=None,
        padding=(0, 1),
    )
    table.add_column("labeler\n")
    algorithms = list(dict.fromkeys(row.algorithm for row in comparison.scores if row.dataset == dataset))
    for algorithm in algorithms:
        table.add_column(f"{algorithm}\n{'score' if data.unit else ''}", justify="right")
        table.add_column("n\n", justify="right")
    for title in ("Pearson\nsteps", "Spearman\nsteps", "Pearson\nreturns", "Spearman\nreturns"):
        table.add_column(title, justify="right")
    table.add_column("labels\n", overflow="fold")
    for label in (row for row in comparison.labels if row.dataset == dataset):
        scores = [
            next(s for s in comparison.scores if (s.dataset, s.algorithm, s.labeler) == (dataset, a, label.labeler))
            for a in algorithms
        ]
        agreement = label.agreement
        correlations = (
            (agreement.pearson_steps, agreement.spearman_steps, agreement.pearson_returns, agreement.spearman_returns)
            if agreement
            else (None,) * 4
        )
        table.add_row(
            label.labeler,
            *(cell for score in scores for cell in (score_text(score), str(score.n))),
            *(number(value) for value in correlations),
            label.convergence or "",
        )
    return table


def _caption(unit: str | None, score: float | None) -> str:
    said = "correlations with the rewards of the file; n/a: constant labels, or no rewards in the file"
    if unit is None:
        return said
    mean = "" if score is None else f"; the data's own mean is {score:.1f}"
    return f"score: {unit}, mean ± sample standard deviation over n seeds{mean}\n{said}"
