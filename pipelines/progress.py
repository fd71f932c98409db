"""Progress bars on the error stream; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

ERRORS = Console(stderr=True)
"""Where bars and messages go, so that standard output holds results alone."""


class _Rate(ProgressColumn):
    """Work done in a second."""

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f} {task.fields['unit']}/s", style="dim")


@contextmanager
def bar(title: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left. Gives a function to call with the units just done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=ERRORS, disable=not ERRORS.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total, unit=unit)
        yield lambda done: progress.advance(task, done)


def say(message: str) -> None:
    """One line on what was just done, for a person who watches."""
    ERRORS.print(message, style="dim", highlight=False)
