"""Two actions in a row: "First X, then Y.", done by `x && y`.

Some pairs are held out: they are in no training task and in no demonstration, only in eval, where they show whether
a policy can put together what it knows.
"""

from __future__ import annotations

from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench import archives, counting, files, selection, text
from sandbox_env.suites.minibench.draw import Draw
from sandbox_env.suites.minibench.exercise import Action, ActionBuilder, Exercise

COMPOSABLE: dict[str, ActionBuilder] = {
    builder.__name__.replace("_", "-"): builder
    for builder in (
        files.write_word,
        files.append_word,
        files.copy_file,
        files.rename_file,
        files.delete_file,
        files.make_folder,
        text.replace_word,
        text.upper_case,
        counting.count_lines,
        counting.sum_column,
        selection.sort_lines,
        selection.keep_lines,
        selection.first_lines,
        archives.make_executable,
        archives.gzip_file,
    )
}

HELD_OUT_COMPOSITIONS = (
    frozenset({"count-lines", "rename-file"}),
    frozenset({"sort-lines", "make-executable"}),
    frozenset({"keep-lines", "delete-file"}),
)
"""Pairs of actions, in either order, that only eval has."""

TRAIN_PAIRS = tuple(
    (first, second)
    for first in COMPOSABLE
    for second in COMPOSABLE
    if first != second and frozenset({first, second}) not in HELD_OUT_COMPOSITIONS
)


def compose(draw: Draw, first: str, second: str) -> Exercise:
    """The exercise that asks for the two actions in this order."""
    one, two = COMPOSABLE[first](draw), COMPOSABLE[second](draw)
    request = draw.pick(
        f"First {one.phrase}, then {two.phrase}.",
        f"{one.phrase[0].upper()}{one.phrase[1:]}, and then {two.phrase}.",
    )
    return Exercise(
        family=f"{first}-then-{second}",
        subject=one.subject,
        instruction=request,
        files={**one.files, **two.files},
        turns=(_both(one.turn, two.turn),),
        checks=(*one.checks, *two.checks),
        mistakes=tuple((turn,) for turn in _mistakes(one, two)),
        actions=(first, second),
    )


def _both(one: DemoTurn, two: DemoTurn) -> DemoTurn:
    command = f"{one.command} && {two.command}"
    if one.exit_code:
        return DemoTurn(command, one.observation, one.exit_code)
    return DemoTurn(command, one.observation + two.observation, two.exit_code)


def _mistakes(one: Action, two: Action) -> list[DemoTurn]:
    """One step forgotten, or one of the two steps done wrongly."""
    wrong_first = [_both(mistake, two.turn) for mistake in one.mistakes[:2]]
    wrong_second = [_both(one.turn, mistake) for mistake in two.mistakes[:2]]
    return [one.turn, two.turn, *wrong_first, *wrong_second]
