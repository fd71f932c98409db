"""The command line. Heavy libraries are imported inside the commands that need them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from data.errors import AssayError, ConfigurationError, WorkError
from pipelines import data_commands, labels_commands
from pipelines.home import Home, quieten
from pipelines.options import HOME, AsJson, Where, print_json

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.console import RenderableType

    from data.ingest import Ingested
    from pipelines.comparison import Comparison
    from pipelines.work import Work

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

app = App(
    name="assay",
    help="Turn trajectories without rewards into policies, and see which way of labelling them was worth it.",
    help_epilogue="Exit codes: 0 done, 1 work failed part-way, 2 bad input or usage, 130 interrupted.",
)
app.command(data_commands.app)
app.command(labels_commands.app)


@app.command
def run(study: Path, *, home: Where = HOME, json: AsJson = False) -> int:
    """Do all of a study: ingest, label, train, compare.

    Asked again, it prints the result and does nothing. Killed or failed, the same command goes on where it stopped.
    """
    work = _work(study, home)
    comparison = _finished(work)
    if comparison is None:
        _check(work)
        _flow("study", study, work)
        comparison = work.remembered()
        assert comparison is not None, "the flow ends with a comparison"
    _print_comparison(work, comparison, json)
    return DONE


@app.command
def ingest(
    path: Annotated[list[Path], Parameter(consume_multiple=True)], *, home: Where = HOME, json: AsJson = False
) -> int:
    """Read files into the store, each as a dataset named like the file; or all files of one study.

    A file that cannot be read costs one line; the others are stored.
    """
    if len(path) == 1 and path[0].suffix in (".yaml", ".yml"):
        work = _work(path[0], home)
        _check(work)
        if not work.is_ingested():
            _flow("ingest", path[0], work)
        results = {name: work.ingested(name) for name in work.study.files()}
        refused: dict[str, str] = {}
    else:
        results, refused = _ingest_files(path, Home(home))
    _print_ingested(results, refused, json)
    if not refused:
        return DONE
    return FAILED if results else USAGE


@app.command
def label(study: Path, *, home: Where = HOME, json: AsJson = False) -> int:
    """Make the label sets of a study, ingesting what they need."""
    work = _work(study, home)
    if not work.is_labelled():
        _check(work)
        _flow("label", study, work)
    _print_labels(work, json)
    return DONE


@app.command
def train(study: Path, *, home: Where = HOME, json: AsJson = False) -> int:
    """Train the policies of a study, ingesting and labelling what they need."""
    work = _work(study, home)
    if not work.is_trained():
        _check(work)
        _flow("train", study, work)
    _print_runs(work, json)
    return DONE


@app.command
def compare(study: Path, *, home: Where = HOME, json: AsJson = False) -> int:
    """Compare what is there of a study, and write its report."""
    work = _work(study, home)
    comparison = _finished(work)
    if comparison is None:
        if not work.is_labelled():
            raise WorkError(f"{study.name}: there are no labels to compare yet: `assay label {study}` makes them.")
        _flow("compare", study, work)
        comparison = work.remembered()
        assert comparison is not None, "the flow ends with a comparison"
    _print_comparison(work, comparison, json)
    return DONE


@app.command
def show(study: Path | None = None, *, home: Where = HOME, json: AsJson = False) -> int:
    """Show what the store holds, or how far a study has come."""
    from pipelines import inventory

    place = Home(home)
    if study is None:
        held = inventory.of_store(place.store)
        if json:
            print_json(held.model_dump(mode="json"))
        else:
            for table in inventory.tables(held):
                _print(table)
        return DONE
    work = _work(study, home)
    comparison = work.remembered()
    if json:
        said = None if comparison is None else comparison.model_dump(mode="json")
        print_json({"study": work.study.study, "id": work.id, "progress": work.progress(), "comparison": said})
    else:
        _print(f"{work.study.study}: {work.progress()}")
        if comparison is not None:
            _print_comparison(work, comparison, json)
    return DONE


@app.command
def doctor(*, home: Where = HOME, json: AsJson = False) -> int:
    """Check what assay needs: Python, packages, the processor, environments, and that the store is whole."""
    from pipelines.doctor import examine, table

    findings = examine(Home(home))
    if json:
        print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        _print(table(findings))
    return FAILED if any(finding.status == "fail" for finding in findings) else DONE


def main(tokens: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    sys.exit(_main(tokens))


def _main(tokens: Sequence[str] | None) -> int:
    quieten()
    try:
        result = app(tokens, exit_on_error=False, result_action="return_value")
        return result if isinstance(result, int) else DONE
    except CycloptsError:  # printed by cyclopts, with the nearest right word
        return USAGE
    except AssayError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted. What was finished is kept; the same command goes on from there.", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        return _fail(f"{error}. What was finished is kept; the same command goes on from there.", FAILED)


def _fail(message: str, code: int) -> int:
    from pipelines.progress import ERRORS

    ERRORS.print(
        f"error: {message}",
        style="bold red" if ERRORS.is_terminal else "",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return code


# ---------------------------------------------------------------- work


def _work(study: Path, home: Path) -> Work:
    """The study, with every file there and of a known format."""
    from pipelines.study import load_study
    from pipelines.work import Work

    return Work(load_study(study), Home(home))


def _finished(work: Work) -> Comparison | None:
    """The result of a study that is finished and recorded."""
    from pipelines.recording import Record

    return work.remembered() if work.is_trained() and Record(work).is_done else None


def _check(work: Work) -> None:
    from pipelines.checks import check

    check(work)


def _flow(name: str, study: Path, work: Work) -> None:
    """Run one of the flows for a study. Raises WorkError saying what is kept if it fails."""
    from pipelines.progress import say

    work.home.settle_prefect()
    say(f"{name} {work.study.study}: starting Prefect")
    from prefect import tags

    from pipelines import flows

    flow = {
        "ingest": flows.ingest_flow,
        "label": flows.label_flow,
        "train": flows.train_flow,
        "compare": flows.compare_flow,
        "study": flows.study_flow,
    }[name]
    try:
        with tags(flows.study_tag(work.id)):
            flow(str(study.resolve()), str(work.home.path.resolve()))
    except AssayError as error:
        raise WorkError(f"{error}\nKept: {work.progress()}. The same command goes on from there.") from error


def _ingest_files(paths: Sequence[Path], home: Home) -> tuple[dict[str, Ingested | None], dict[str, str]]:
    """Ingest files as one job. Returns what came of the good ones, and the reason against each other one."""
    from data.ingest import ingest_key, ingested
    from data.readers import recognise

    keys: dict[str, str] = {}
    refused: dict[str, str] = {}
    waiting: list[str] = []
    for path in paths:
        try:
            if path.stem in keys:
                raise ConfigurationError(f"{path}: another file is also called '{path.stem}', and names must differ.")
            reader = recognise(path)
            keys[path.stem] = ingest_key(path, path.stem, reader)
            if ingested(keys[path.stem], home.store) is None:
                with reader.open(path):
                    waiting.append(str(path.resolve()))
        except AssayError as error:
            keys.pop(path.stem, None)
            refused[str(path)] = str(error)
    if waiting:
        home.settle_prefect()
        from pipelines import flows

        for file, reason in flows.ingest_files_flow(waiting, str(home.path.resolve())).items():
            path = next(p for p in paths if str(p.resolve()) == file)
            keys.pop(path.stem)
            refused[str(path)] = reason
    return {name: ingested(key, home.store) for name, key in keys.items()}, refused


# ---------------------------------------------------------------- results


def _print_comparison(work: Work, comparison: Comparison, json: bool) -> None:
    report = work.home.report(comparison.study)
    if json:
        print_json({**comparison.model_dump(mode="json"), "report": str(report)})
        return
    from pipelines.tables import comparison_table

    for dataset in work.study.datasets:
        _print(comparison_table(comparison, dataset))
    if not comparison.complete:
        _print(f"not complete: {work.progress()}")
    _print(f"report: {report}")


def _print_ingested(results: Mapping[str, Ingested | None], refused: Mapping[str, str], json: bool) -> None:
    if json:
        stored: dict[str, JsonValue] = {
            name: None if r is None else r.model_dump(mode="json") for name, r in results.items()
        }
        print_json({"ingested": stored, "refused": dict(refused)})
    else:
        for name, result in results.items():
            assert result is not None, "what is not refused was ingested"
            _print(f"{name}: {result.dataset}")
            for finding in result.findings:
                _print(f"  {finding.severity}: {finding.message}")
    for reason in refused.values():
        _fail(reason, FAILED)


def _print_labels(work: Work, json: bool) -> None:
    from pipelines.comparison import compare
    from pipelines.tables import comparison_table

    comparison = compare(work)
    if json:
        print_json([row.model_dump(mode="json") for row in comparison.labels])
    else:
        for dataset in work.study.datasets:
            _print(comparison_table(comparison, dataset))


def _print_runs(work: Work, json: bool) -> None:
    cells = [cell for d in work.study.datasets for a in work.study.algorithms for cell in work.cells(d, a)]
    if json:
        print_json([dataclasses.asdict(cell) for cell in cells])
    else:
        for cell in cells:
            _print(f"{cell.run_id}  {cell.name}")


def _print(shown: RenderableType) -> None:
    from rich.console import Console

    Console().print(shown, highlight=False, soft_wrap=isinstance(shown, str))
