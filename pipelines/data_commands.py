"""`assay data`: look at files and stored datasets, make others from them, and write them in other formats."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from data.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from data.check import Check
    from data.findings import Finding
    from data.operations import Derived, Parent
    from data.readers.reader import Reader
    from data.store import Store

SOURCE = "source"
REFUSED = 2

Where = Annotated[Path, Parameter(name="--home", env_var="ASSAY_HOME", help="Folder that everything is written to.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
HOME = Path(".assay")

app = App(name="data", help="Look at files and stored datasets, make others from them, write them in other formats.")


@app.command
def check(
    file: Path,
    *,
    format: Annotated[
        str | None, Parameter(help="Kind of the reader; recognised from the content if left out.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Read a file from end to end, and list every problem with its place and consequence. Nothing is changed.

    Exit code 2 if the file could not be ingested.
    """
    from data.check import check as examine
    from pipelines.progress import bar

    with bar(f"check {file.name}", None, "steps") as progress:
        found = examine(file, None if format is None else _reader(format), progress)
    if json:
        _print_json(found.to_json())
    else:
        _print_check(file, found)
    return REFUSED if found.refused else 0


@app.command
def show(
    dataset: str,
    *,
    digest: str | None = None,
    plot: Annotated[Path | None, Parameter(help="SVG to write: lengths, and returns by label set.")] = None,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Show a stored dataset: shapes, lengths, returns by label set, statistics of each dimension, findings."""
    store = _store(home)
    stored = store.dataset(dataset, digest)
    sets = [found for found in store.label_sets(stored.digest) if found.manifest.column == "rewards"]
    if plot is not None:
        _refuse_existing(plot)
        from pipelines.figures import dataset_figure

        returns = {found.labeler: stored.returns(found) for found in sets}
        plot.write_text(dataset_figure(stored.trajectories().lengths, returns), encoding="utf-8")
    if json:
        labels: list[JsonValue] = [
            {"labeler": s.labeler, "id": s.id, "rewards": s.manifest.rewards, "returns": s.manifest.returns}
            for s in sets
        ]
        _print_json({"dataset": stored.manifest.model_dump(mode="json"), "labels": labels})
        return 0
    from rich.console import Console

    from pipelines.tables import dataset_tables

    for shown in dataset_tables(stored, sets):
        Console().print(shown, highlight=False, markup=False)
    if plot is not None:
        print(f"plot: {plot}")
    return 0


@app.command
def merge(
    datasets: Annotated[list[str], Parameter(consume_multiple=True)],
    *,
    name: Annotated[str, Parameter(help="Name of the new dataset.")],
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Make one dataset of all episodes of several, in their order."""
    from data import operations
    from pipelines.progress import bar

    store = _store(home)
    parents = [_parent(store, dataset) for dataset in datasets]
    total = sum(parent.dataset.manifest.n_steps for parent in parents)
    with bar(f"merge {name}", total, "steps") as progress:
        derived = operations.merge(store, name, parents, progress)
    _print_derived([derived], json)
    return 0


@app.command
def split(
    dataset: str,
    parts: Annotated[list[str], Parameter(consume_multiple=True, help="Names and fractions: train=0.9 test=0.1.")],
    *,
    seed: int = 0,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Deal the episodes of a dataset out to several new ones, at random."""
    from data import operations
    from pipelines.progress import bar

    store = _store(home)
    parent = _parent(store, dataset)
    with bar(f"split {dataset}", parent.dataset.manifest.n_steps, "steps") as progress:
        derived = operations.split(store, dict(map(_fraction, parts)), parent, seed, progress)
    _print_derived(derived, json)
    return 0


@app.command
def filter(
    dataset: str,
    *,
    name: Annotated[str, Parameter(help="Name of the new dataset.")],
    top: Annotated[int | None, Parameter(help="Only so many, those with the highest return.")] = None,
    lowest: Annotated[float | None, Parameter(help="Only returns from here up.")] = None,
    highest: Annotated[float | None, Parameter(help="Only returns up to here.")] = None,
    shortest: Annotated[int | None, Parameter(help="Only episodes of so many steps or more.")] = None,
    longest: Annotated[int | None, Parameter(help="Only episodes of so many steps or fewer.")] = None,
    by: Annotated[str, Parameter(help="Label set whose returns are meant: its labeler, or its id.")] = SOURCE,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Make a dataset of some episodes of another: by return, by length, the best."""
    from data import operations
    from pipelines.progress import bar

    store = _store(home)
    parent = _parent(store, dataset)
    criteria = operations.Criteria(top=top, lowest=lowest, highest=highest, shortest=shortest, longest=longest)
    labels = store.find_labels(parent.dataset, by) if criteria.need_returns else None
    with bar(f"filter {dataset}", None, "steps") as progress:
        derived = operations.filter_episodes(store, name, parent, criteria, labels, progress)
    _print_derived([derived], json)
    return 0


@app.command
def export(
    dataset: str,
    path: Path,
    *,
    format: Annotated[str, Parameter(help="Kind of the writer: d4rl, minari or lerobot.")] = "d4rl",
    labels: Annotated[str | None, Parameter(help="Label set whose rewards go along: its labeler, or its id.")] = None,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Write a stored dataset in another format, with the rewards of any label set: label once, train anywhere."""
    from data.export import export as write
    from data.writers import WRITERS
    from pipelines.progress import bar

    store = _store(home)
    stored = store.dataset(dataset)
    chosen = None if labels is None else store.find_labels(stored, labels)
    kinds = {str(writer.model_fields["kind"].default): writer for writer in WRITERS}
    if format not in kinds:
        raise ConfigurationError(f"there is no writer '{format}'. Writers: {', '.join(kinds)}.")
    with bar(f"export {dataset}", stored.manifest.n_steps, "steps") as progress:
        findings = write(stored, path, kinds[format].model_validate({}), chosen, progress)
    if json:
        said: list[JsonValue] = [finding.model_dump(mode="json") for finding in findings]
        label = None if chosen is None else chosen.id
        _print_json({"path": str(path), "dataset": stored.digest, "labels": label, "findings": said})
    else:
        print(path)
        _print_findings(findings)
    return 0


# ---------------------------------------------------------------- what they share


def _store(home: Path) -> Store:
    from pipelines.home import Home

    return Home(home).store


def _reader(kind: str) -> Reader:
    from data.readers import READERS

    kinds = {str(reader.model_fields["kind"].default): reader for reader in READERS}
    if kind not in kinds:
        raise ConfigurationError(f"there is no reader '{kind}'. Readers: {', '.join(sorted(kinds))}.")
    return kinds[kind].model_validate({})


def _parent(store: Store, name: str) -> Parent:
    """A stored dataset with its own rewards, if it has any."""
    from data.operations import Parent

    stored = store.dataset(name)
    own = [found for found in store.label_sets(stored.digest) if found.labeler == SOURCE]
    return Parent(stored, own[0] if own else None)


def _fraction(part: str) -> tuple[str, float]:
    name, _, fraction = part.partition("=")
    try:
        return name, float(fraction)
    except ValueError:
        raise ConfigurationError(f"'{part}': a part is named with its fraction: train=0.9.") from None


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigurationError(f"{path}: it exists already, and is left as it is.")


def _print_check(file: Path, found: Check) -> None:
    if found.counts is None:
        print(f"{file.name}: {found.format or 'no known format'}, refused")
    else:
        counts = found.counts
        print(
            f"{file.name}: {found.format}, {counts.episodes:,} episodes, {counts.steps:,} steps; "
            f"{counts.terminated:,} terminated, {counts.truncated:,} truncated"
        )
    spaces = found.to_json()
    for key in ("observation", "action", "reward_sum"):
        if spaces[key] is not None:
            print(
                f"  {key.replace('_', ' ')}: {json_module.dumps(spaces[key]) if key != 'reward_sum' else spaces[key]}"
            )
    _print_findings(found.problems)


def _print_findings(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        print(f"  {finding.severity}: {finding.message} [{finding.code}]")


def _print_derived(derived: list[Derived], json: bool) -> None:
    if json:
        _print_json([one.model_dump(mode="json") for one in derived])
        return
    for one in derived:
        print(f"{one.name}: {one.dataset}")
        _print_findings(one.findings)


def _print_json(value: JsonValue) -> None:
    print(json_module.dumps(value, indent=1, ensure_ascii=False))
