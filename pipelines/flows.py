"""Prefect flows: `study` and, for parts of it, `ingest`, `label`, `train` and `compare`.

Flows and tasks are given a study file and a home folder, never arrays, so that any worker can run them. Every task
returns at once if its result is in the store; Prefect's own results are not used. Tasks run one after the other: each
uses the whole machine, and a population of runs trains as one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

from data.errors import AssayError
from data.ingest import ingest
from data.readers import recognise
from pipelines.comparison import compare
from pipelines.home import Home
from pipelines.progress import bar
from pipelines.recording import Record
from pipelines.report import write_report
from pipelines.study import load_study
from pipelines.work import Work


@lru_cache(maxsize=1)
def _open(study: str, home: str) -> tuple[Work, Record]:
    work = Work(load_study(Path(study)), Home(Path(home)))
    return work, Record(work)


@task(name="ingest", task_run_name="ingest {name}", cache_policy=NO_CACHE)
def ingest_task(study: str, home: str, name: str) -> str:
    """Read a source file into the store. Returns the dataset's digest."""
    work, _ = _open(study, home)
    return work.ingest(name).dataset


@task(name="label", task_run_name="label {dataset} with {labeler}", cache_policy=NO_CACHE)
def label_task(study: str, home: str, dataset: str, labeler: str) -> str:
    """Make a label set. Returns its id."""
    work, _ = _open(study, home)
    return work.label(dataset, labeler).id


@task(name="train", task_run_name="train {algorithm} on {dataset}", cache_policy=NO_CACHE)
def train_task(study: str, home: str, dataset: str, algorithm: str) -> list[str]:
    """Train what is missing of one population, and record all of it. Returns the run ids."""
    work, record = _open(study, home)
    work.train(dataset, algorithm, record)
    cells = work.cells(dataset, algorithm)
    for cell in cells:
        record.complete(cell)
    return [cell.run_id for cell in cells]


@task(name="compare", cache_policy=NO_CACHE)
def compare_task(study: str, home: str) -> str:
    """Compare what is there, write the report and record both. Returns the path of the report."""
    work, record = _open(study, home)
    comparison = compare(work)
    path = write_report(work, comparison)
    record.close(comparison)
    work.remember(comparison)
    if comparison.complete:
        record.mark_done()
    return str(path)


@flow(name="ingest", flow_run_name="ingest {study}")
def ingest_flow(study: str, home: str) -> None:
    """Ingest the files of a study."""
    with _part(study, home) as work:
        _ingest(work, study, home)


@flow(name="label", flow_run_name="label {study}")
def label_flow(study: str, home: str) -> None:
    """Make the label sets of a study, and what they need."""
    with _part(study, home) as work:
        _ingest(work, study, home)
        _label(work, study, home)


@flow(name="train", flow_run_name="train {study}")
def train_flow(study: str, home: str) -> None:
    """Train the policies of a study, and what they need."""
    with _part(study, home) as work:
        _ingest(work, study, home)
        _label(work, study, home)
        _train(work, study, home)


@flow(name="compare", flow_run_name="compare {study}")
def compare_flow(study: str, home: str) -> None:
    """Compare what is there of a study."""
    with _part(study, home):
        compare_task(study, home)


@flow(name="study", flow_run_name="study {study}")
def study_flow(study: str, home: str) -> None:
    """All of a study."""
    with _part(study, home) as work:
        _ingest(work, study, home)
        _label(work, study, home)
        _train(work, study, home)
        compare_task(study, home)


def _ingest(work: Work, study: str, home: str) -> None:
    for name in work.study.files():
        ingest_task(study, home, name)


def _label(work: Work, study: str, home: str) -> None:
    for dataset in work.study.datasets:
        for labeler in work.study.labeling_order():
            label_task(study, home, dataset, labeler)


def _train(work: Work, study: str, home: str) -> None:
    for dataset in work.study.datasets:
        for algorithm in work.study.algorithms:
            train_task(study, home, dataset, algorithm)


@contextmanager
def _part(study: str, home: str) -> Iterator[Work]:
    """Hold the study against other processes, and leave no run behind that claims to be running."""
    work, record = _open(study, home)
    with work.home.lock(f"study-{work.id}"):
        _close_crashed(work.id)
        try:
            yield work
        except KeyboardInterrupt:
            record.stop("KILLED")
            raise
        except BaseException:
            record.stop("FAILED")
            raise


def _close_crashed(study_id: str) -> None:
    """Flow runs of this study that say Running are those of killed processes: the study's lock is ours."""
    running = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[study_tag(study_id)]),
        state={"type": FlowRunFilterStateType(any_=[StateType.RUNNING])},
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=running):
            if run.id != runtime.flow_run.get_id():
                client.set_flow_run_state(run.id, Crashed(message="The process ended without a word."), force=True)


def study_tag(study_id: str) -> str:
    """Tag of a study's flow runs."""
    return f"assay:{study_id}"


@task(name="ingest file", task_run_name="ingest {file}", cache_policy=NO_CACHE)
def ingest_file_task(file: str, home: str) -> str:
    """Read a file into the store as a dataset of the file's name. Returns its digest."""
    path = Path(file)
    reader = recognise(path)
    with reader.open(path) as source:
        total = source.n_steps
    with bar(f"ingest {path.stem}", total, "steps") as progress:
        return ingest(path, path.stem, Home(Path(home)).store, reader, progress).dataset


@flow(name="ingest-files")
def ingest_files_flow(files: list[str], home: str) -> dict[str, str]:
    """Ingest files as one job: each is stored or refused for itself. Returns the reasons against the refused ones."""
    refused = {}
    for file in files:
        try:
            ingest_file_task(file, home)
        except AssayError as error:
            refused[file] = str(error)
    return refused
