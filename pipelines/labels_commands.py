"""`assay labels`: what can be said of label sets before anything is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from data.errors import ConfigurationError, WorkError
from pipelines.options import HOME, AsJson, Where, print_json

if TYPE_CHECKING:
    import numpy as np
    from pydantic import JsonValue

    from labelers.quality import Quality
    from pipelines.work import Work

SOURCE = "source"

app = App(name="labels", help="Look at label sets before anything is trained on them.")


@app.command
def quality(
    study: Path,
    *,
    against: str = SOURCE,
    dataset: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    labeler: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    plots: Path | None = None,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Compare label sets with another one, step by step, episode by episode, and as rewards (STARC).

    Parameters
    ----------
    study
        Study file; its labels must have been made (`assay label`).
    against
        Labeler of the study whose labels are the reference; `source` is what the file said.
    dataset
        Only these datasets.
    labeler
        Only these labelers; all but the reference by default.
    plots
        Folder for one picture of each comparison, as SVG.
    """
    from labelers.quality import plot
    from labelers.quality import quality as compare
    from pipelines.home import Home
    from pipelines.progress import bar
    from pipelines.study import load_study
    from pipelines.work import Work

    work = Work(load_study(study), Home(home))
    datasets = _chosen("dataset", dataset, list(work.study.datasets))
    labelers = _chosen("labeler", labeler, [name for name in work.study.reward_labelers if name != against])
    if against != SOURCE:
        _chosen("labeler", (against,), work.study.reward_labelers)
    if not work.is_labelled():
        raise WorkError(f"{study.name}: the labels are not there yet: `assay label {study}` makes them.")
    found: dict[str, dict[str, Quality]] = {}
    with bar("quality", len(datasets) * len(labelers), "label sets") as progress:
        for name in datasets:
            trajectories, reference = work.dataset(name).trajectories(), _reference(work, name, against)
            found[name] = {}
            for one in labelers:
                labels = _labels(work, name, one)
                found[name][one] = compare(labels, reference, trajectories)
                if plots is not None:
                    plots.mkdir(parents=True, exist_ok=True)
                    figure = plot(labels, reference, trajectories, found[name][one])
                    figure.suptitle(f"{name}: {one} against {against}")
                    figure.savefig(plots / f"{name}.{one}.svg")
                progress(1)
    if json:
        said: dict[str, JsonValue] = {
            name: {one: q.model_dump(mode="json") for one, q in row.items()} for name, row in found.items()
        }
        print_json({"against": against, "datasets": said})
        return 0
    from rich.console import Console

    from pipelines.tables import quality_table

    for name, row in found.items():
        Console().print(quality_table(name, against, row), highlight=False)
    if plots is not None:
        print(f"plots: {plots}")
    return 0


@app.command
def export(
    study: Path,
    labeler: str,
    path: Path,
    *,
    dataset: str | None = None,
    home: Where = HOME,
) -> int:
    """Write the rewards of a label set as a Parquet table: episode, step, reward, and the dataset they are for.

    The labeler `recorded` reads such a table, so that anyone's own rewards can join a study.

    Parameters
    ----------
    study
        Study file; its labels must have been made (`assay label`).
    labeler
        Labeler of the study.
    path
        File to write; it must not exist.
    dataset
        Dataset of the study; needed if there are several.
    """
    from labelers.recorded import write_reward_file
    from pipelines.home import Home
    from pipelines.study import load_study
    from pipelines.work import Work

    work = Work(load_study(study), Home(home))
    _chosen("labeler", (labeler,), work.study.reward_labelers)
    (name, *others) = _chosen("dataset", (dataset,) if dataset else (), list(work.study.datasets))
    if others:
        raise ConfigurationError(f"{study.name} has several datasets: say which by --dataset.")
    if not work.is_labelled():
        raise WorkError(f"{study.name}: the labels are not there yet: `assay label {study}` makes them.")
    try:
        write_reward_file(path, _labels(work, name, labeler), work.dataset(name).trajectories())
    except FileExistsError as error:
        raise ConfigurationError(f"{path}: it exists already, and is left as it is.") from error
    print(path)
    return 0


def _labels(work: Work, dataset: str, labeler: str) -> np.ndarray:
    import numpy as np

    return np.asarray(work.labels(dataset, labeler).rewards)


def _reference(work: Work, dataset: str, labeler: str) -> np.ndarray:
    """Labels that others are compared with; `source` means the rewards of the file, as they are."""
    import numpy as np

    if labeler != SOURCE:
        return _labels(work, dataset, labeler)
    found = work.source_labels(dataset)
    if found is None:
        raise ConfigurationError(
            f"dataset '{dataset}' has no rewards of its own to compare with: name another label set by --against."
        )
    return np.asarray(work.store.labels(work.dataset(dataset).digest, found).rewards)


def _chosen(what: str, asked: tuple[str, ...], known: list[str]) -> list[str]:
    for name in asked:
        if name not in known:
            raise ConfigurationError(f"there is no {what} '{name}' to compare. There is: {', '.join(known) or 'none'}.")
    return list(asked) or known
