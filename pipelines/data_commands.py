"""`assay data`: look at files and stored datasets, make others from them, and write them in other formats."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import App, Parameter

from data.errors import ConfigurationError
from pipelines.options import HOME, AsJson, Where, print_json

if TYPE_CHECKING:
    from pydantic import JsonValue

    from data.check import Check
    from data.config import Config
    from data.findings import Finding
    from data.operations import Derived, Parent
    from data.store import Store, StoredDataset, StoredLabels

K = TypeVar("K", bound="Config")

SOURCE = "source"
FROM_FILE = "file"
REFUSED = 2
SAID_OF_LABELS = {"id", "column", "rewards", "returns", "actions"}


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
    from data.readers import READERS
    from pipelines.progress import bar

    reader = None if format is None else _of_kind("reader", format, READERS)
    with bar(f"check {file.name}", None, "steps") as progress:
        found = examine(file, reader, progress)
    if json:
        print_json(found.to_json())
    else:
        _print_check(file, found)
    return REFUSED if found.refused else 0


@app.command
def show(
    dataset: Annotated[str, Parameter(help="A stored dataset (NAME, or NAME@DIGEST among several), or a file.")],
    *,
    plot: Annotated[Path | None, Parameter(help="SVG to write: lengths, and returns by label set.")] = None,
    home: Where = HOME,
    json: AsJson = False,
) -> int:
    """Show a dataset: shapes, lengths, returns by label set, statistics of each dimension, findings.

    A file is shown as it would be stored; nothing is kept.
    """
    from tempfile import TemporaryDirectory

    store = _store(home)
    with TemporaryDirectory() as scratch:
        if dataset.partition("@")[0] not in store.names() and Path(dataset).exists():
            store, dataset = _ingested(Path(dataset), Path(scratch)), FROM_FILE
        stored = _dataset(store, dataset)
        sets = store.label_sets(stored.digest)
        if plot is not None:
            _draw(plot, stored, sets)
        if json:
            print_json(_described(stored, sets))
        else:
            _print_described(stored, sets)
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

    writer = _of_kind("writer", format, WRITERS)
    store = _store(home)
    stored = _dataset(store, dataset)
    chosen = None if labels is None else store.find_labels(stored, labels)
    with bar(f"export {dataset}", stored.manifest.n_steps, "steps") as progress:
        findings = write(stored, path, writer, chosen, progress)
    if json:
        said: list[JsonValue] = [finding.model_dump(mode="json") for finding in findings]
        label = None if chosen is None else chosen.id
        print_json({"path": str(path), "dataset": stored.digest, "labels": label, "findings": said})
    else:
        print(path)
        _print_findings(findings)
    return 0


# ---------------------------------------------------------------- what they share


def _store(home: Path) -> Store:
    from pipelines.home import Home

    return Home(home).store


def _of_kind(what: str, kind: str, known: Sequence[type[K]]) -> K:
    """The reader or writer of a kind, with default settings."""
    kinds = {str(one.model_fields["kind"].default): one for one in known}
    if kind not in kinds:
        raise ConfigurationError(f"there is no {what} '{kind}'. There is: {', '.join(kinds)}.")
    return kinds[kind].model_validate({})


def _dataset(store: Store, said: str) -> StoredDataset:
    """A stored dataset by NAME, or NAME@DIGEST, of which the beginning will do."""
    name, _, digest = said.partition("@")
    return store.dataset(name, digest or None)


def _parent(store: Store, said: str) -> Parent:
    """A stored dataset with its own rewards, if it has any. Raises StoreError if files gave it different ones."""
    from data.operations import Parent

    stored = _dataset(store, said)
    has_own = any(found.labeler == SOURCE for found in store.label_sets(stored.digest))
    return Parent(stored, store.find_labels(stored, SOURCE) if has_own else None)


def _ingested(path: Path, scratch: Path) -> Store:
    """A store with one dataset, that of a file."""
    from data.ingest import ingest
    from data.store import Store
    from pipelines.progress import bar

    store = Store(scratch)
    with bar(f"read {path.name}", None, "steps") as progress:
        ingest(path, FROM_FILE, store, progress=progress)
    return store


def _fraction(part: str) -> tuple[str, float]:
    name, _, fraction = part.partition("=")
    try:
        return name, float(fraction)
    except ValueError:
        raise ConfigurationError(f"'{part}': a part is named with its fraction: train=0.9.") from None


def _draw(path: Path, stored: StoredDataset, sets: Sequence[StoredLabels]) -> None:
    if path.suffix != ".svg":
        raise ConfigurationError(f"{path}: the picture is an SVG: give it a name that ends in .svg.")
    if path.exists():
        raise ConfigurationError(f"{path}: there is something of this name; it is not overwritten. Choose another.")
    from pipelines.figures import dataset_figure
    from pipelines.home import write_whole

    returns = {found.labeler: stored.returns(found) for found in sets if found.manifest.column == "rewards"}
    write_whole(path, dataset_figure(stored.trajectories().lengths, returns))


def _described(stored: StoredDataset, sets: Sequence[StoredLabels]) -> JsonValue:
    labels: list[JsonValue] = [
        {"labeler": found.labeler, **found.manifest.model_dump(mode="json", include=SAID_OF_LABELS)} for found in sets
    ]
    return {"dataset": stored.manifest.model_dump(mode="json"), "labels": labels}


def _print_described(stored: StoredDataset, sets: Sequence[StoredLabels]) -> None:
    from rich.console import Console

    from pipelines.tables import dataset_tables

    for shown in dataset_tables(stored, sets):
        Console().print(shown, highlight=False, markup=False)


def _print_check(file: Path, found: Check) -> None:
    said = found.to_json()
    if found.counts is None:
        print(f"{file.name}: {found.format or 'no known format'}, refused")
    else:
        counts = ", ".join(f"{said[name]:,} {name}" for name in ("episodes", "steps", "terminated", "truncated"))
        print(f"{file.name}: {found.format}, {counts}")
    for key in ("observation", "action", "reward_sum"):
        if said[key] is not None:
            print(f"  {key.replace('_', ' ')}: {json_module.dumps(said[key])}")
    _print_findings(found.problems)


def _print_findings(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        print(f"  {finding.severity}: {finding.message} [{finding.code}]")


def _print_derived(derived: list[Derived], json: bool) -> None:
    if json:
        print_json([one.model_dump(mode="json") for one in derived])
        return
    for one in derived:
        print(f"{one.name}: {one.dataset}")
        _print_findings(one.findings)
