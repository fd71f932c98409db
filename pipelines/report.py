"""The report of a study: one HTML page that needs nothing from outside, readable in light and dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from data.labels import episode_returns
from pipelines import figures
from pipelines.comparison import Comparison, ScoreRow
from pipelines.figures import Curve
from pipelines.home import write_whole
from pipelines.tables import number, score_text
from pipelines.work import Work

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --paper: #ffffff; --soft: #6a717a; --line: #dfe3e8; --tint: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15171a; --soft: #98a0aa; --line: #31363d; --tint: #1c1f24; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 60rem; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; } h3 { font-size: 1rem;
  margin: 1.5rem 0 0; }
p { margin: .25rem 0 .75rem; } .soft, caption, footer { color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; } .word { text-align: left; }
caption { caption-side: bottom; text-align: left; padding-top: .5rem; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; font-family: system-ui, sans-serif; }
code { font-size: .85em; background: var(--tint); padding: .1em .3em; border-radius: 3px; }
"""


def write_report(work: Work, comparison: Comparison) -> Path:
    """Write the page of a study. Returns where it is."""
    sections = [_table(comparison), *_scores(work, comparison), *_curves(work, comparison), *_labels(work, comparison)]
    sections.append(_origins(work, comparison))
    title = html.escape(f"{comparison.study}: labelers compared")
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{_lead(comparison)}\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )
    path = work.home.report(comparison.study)
    write_whole(path, page)
    return path


def _lead(comparison: Comparison) -> str:
    """What came out, in one sentence for each dataset and algorithm."""
    said = []
    for (dataset, algorithm), rows in _groups(comparison.scores):
        known = [(row.mean, row) for row in rows if row.mean is not None]
        if known:
            best = max(known, key=lambda pair: pair[0])[1]
            said.append(
                f"On {dataset}, {algorithm} reaches most with labels of <b>{html.escape(best.labeler)}</b>: "
                f"{score_text(best)}."
            )
    if not comparison.complete:
        said.append("Not all runs of this study are finished: the table holds what is there.")
    return f"<p>{' '.join(said)}</p>" if said else ""


def _table(comparison: Comparison) -> str:
    unit = {row.dataset: row.unit for row in comparison.data}
    head = ("dataset", "algorithm", "labeler", "score", "n", "Pearson", "Spearman", "Pearson", "Spearman", "labels")
    groups = (
        '<tr><th class="word" colspan="3"></th><th></th><th></th><th colspan="2">by step</th>'
        '<th colspan="2">by return</th><th></th></tr>'
    )
    rows = []
    for row in comparison.scores or _rows_without_training(comparison):
        label = comparison.label_row(row.dataset, row.labeler)
        agreement = label.agreement
        cells = [html.escape(word) for word in (row.dataset, row.algorithm, row.labeler)]
        numbers = [score_text(row), str(row.n)]
        numbers += [
            number(value)
            for value in (
                (
                    agreement.pearson_steps,
                    agreement.spearman_steps,
                    agreement.pearson_returns,
                    agreement.spearman_returns,
                )
                if agreement
                else (None,) * 4
            )
        ]
        words = "".join(f'<td class="word">{cell}</td>' for cell in cells)
        rows.append(
            f"<tr>{words}{''.join(f'<td>{n}</td>' for n in numbers)}"
            f'<td class="word">{html.escape(label.convergence or "")}</td></tr>'
        )
    heads = "".join(f'<th class="word">{h}</th>' if h in head[:3] or h == "labels" else f"<th>{h}</th>" for h in head)
    units = "; ".join(f"{html.escape(d)}: {u}" for d, u in unit.items() if u)
    return (
        f'<div class="scroll"><table><thead>{groups}<tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"<caption>Score: mean ± sample standard deviation over n seeds ({units or 'no roll-outs'}). Agreement: "
        "correlation with the rewards of the file, over steps and over returns of episodes; n/a where labels are "
        "constant or the file has no rewards.</caption></table></div>"
    )


def _rows_without_training(comparison: Comparison) -> list[ScoreRow]:
    return [
        ScoreRow(dataset=r.dataset, algorithm="", labeler=r.labeler, scores={}, mean=None, std=None, n=0)
        for r in comparison.labels
    ]


def _groups(rows: Sequence[ScoreRow]) -> list[tuple[tuple[str, str], list[ScoreRow]]]:
    groups: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in rows:
        groups.setdefault((row.dataset, row.algorithm), []).append(row)
    return list(groups.items())


def _scores(work: Work, comparison: Comparison) -> list[str]:
    sections = []
    for index, ((dataset, algorithm), rows) in enumerate(_groups(comparison.scores)):
        values = {row.labeler: [s for s in row.scores.values() if s is not None] for row in rows}
        data = next(row for row in comparison.data if row.dataset == dataset)
        if data.unit is None or not any(values.values()):
            continue
        figure = figures.scores(values, data.unit, data.score, key=f"scores{index}")
        sections.append(f"<h2>Scores: {html.escape(algorithm)} on {html.escape(dataset)}</h2>{figure}")
    return sections


def _curves(work: Work, comparison: Comparison) -> list[str]:
    sections = []
    for index, ((dataset, algorithm), _) in enumerate(_groups(comparison.scores)):
        panels: dict[str, dict[str, Curve]] = {}
        for labeler in work.study.reward_labelers:
            frames = [
                work.metrics(cell)
                for cell in work.cells(dataset, algorithm)
                if cell.labeler == labeler and work.store.has_run(cell.run_id)
            ]
            for quantity in frames[0].columns if frames else ():
                if quantity != "step" and (curve := _curve(frames, quantity)) is not None:
                    panels.setdefault(quantity, {})[labeler] = curve
        if panels:
            figure = figures.curves(panels, figures.colours(work.study.reward_labelers), key=f"curves{index}")
            sections.append(
                f"<h2>Training: {html.escape(algorithm)} on {html.escape(dataset)}</h2>"
                f'<p class="soft">Mean over seeds, with their range.</p>{figure}'
            )
    return sections


def _curve(frames: Sequence[pl.DataFrame], quantity: str) -> Curve | None:
    """One quantity of several seeds at the steps where all have it; None if those do not make a curve."""
    columns = [frame.select("step", quantity).drop_nulls() for frame in frames if quantity in frame.columns]
    steps = sorted(set.intersection(*(set(column["step"].to_list()) for column in columns)))
    if len(steps) < 2:
        return None
    values = np.stack(
        [column.filter(pl.col("step").is_in(steps)).sort("step")[quantity].to_numpy() for column in columns]
    )
    return Curve(np.asarray(steps), values)


def _labels(work: Work, comparison: Comparison) -> list[str]:
    sections = []
    colours = figures.colours(work.study.reward_labelers)
    for index, dataset in enumerate(work.study.datasets):
        stored = work.dataset(dataset)
        offsets = stored.trajectories().offsets
        rows = [row for row in comparison.labels if row.dataset == dataset]
        returns = {
            row.labeler: episode_returns(np.asarray(work.store.labels(stored.digest, row.label_id).rewards), offsets)
            for row in rows
        }
        source = work.source_labels(dataset)
        part = [f"<h2>Labels of {html.escape(dataset)}</h2>"]
        if source is not None:
            truth = episode_returns(np.asarray(work.store.labels(stored.digest, source).rewards), offsets)
            part.append("<h3>Returns by labels and by the file's rewards</h3>")
            part.append('<p class="soft">A point an episode.</p>')
            part.append(figures.agreement(truth, returns, colours, key=f"agreement{index}"))
        part.append("<h3>Returns by label set</h3>")
        part.append(figures.histograms(returns, colours, key=f"histograms{index}"))
        for place, row in enumerate(rows):
            table = work.diagnostics(dataset, row.labeler)
            varying = [] if table is None else [c for c in table if c.dtype.is_numeric() and c.n_unique() > 1]
            if table is not None and varying:
                part.append(f"<h3>{html.escape(row.labeler)}, by episode</h3>")
                part.append(f'<p class="soft">A point an episode. {html.escape(row.convergence or "")}</p>')
                lengths = np.diff(offsets)
                key = f"convergence{index}n{place}"
                part.append(figures.diagnostics(pl.DataFrame(varying), lengths, colours[row.labeler], key))
        notes = [f"{row.labeler}: {note}" for row in rows for note in row.notes]
        notes += [
            f"actions by {row.labeler} ({'trained on' if row.used else 'not used'}): {row.measure} "
            f"{number(row.agreement)} with those of the file where they were not shown"
            for row in comparison.actions
            if row.dataset == dataset
        ]
        part += [f'<p class="soft">{html.escape(note)}</p>' for note in notes]
        sections.append("\n".join(part))
    return sections


def _origins(work: Work, comparison: Comparison) -> str:
    said = ["<h2>Where it comes from</h2>"]
    for row in comparison.data:
        findings = work.dataset(row.dataset).manifest.findings
        said.append(
            f"<p><b>{html.escape(row.dataset)}</b>: {row.n_episodes:,} episodes, {row.n_steps:,} steps, "
            f"<code>{row.digest}</code></p>"
        )
        said += [f'<p class="soft">{html.escape(f.severity)}: {html.escape(f.message)}</p>' for f in findings]
    said += [
        f'<p class="soft">labels {html.escape(row.labeler)} of {html.escape(row.dataset)}: '
        f"<code>{row.label_id}</code></p>"
        for row in comparison.labels
    ]
    said.append(f"<footer>study <code>{comparison.id}</code></footer>")
    return "\n".join(said)
