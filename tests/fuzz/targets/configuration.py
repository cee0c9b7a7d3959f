"""Configuration files.

Invariants: any text is either settings or a `ConfigError`; each of its problems says where (a line that is
in the file) and what, in one line that can be shown.
"""

from collections.abc import Sequence

from zonerelay.config.load import ConfigError, ConfigProblem, load_text
from zonerelay.config.settings import Settings


def toml(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        assert isinstance(load_text(text), Settings)
    except ConfigError as error:
        _check_problems(error.problems, lines=text.count("\n") + 1)


def _check_problems(problems: Sequence[ConfigProblem], *, lines: int) -> None:
    assert problems
    for problem in problems:
        assert problem.path
        assert problem.text
        assert 1 <= problem.line <= lines, (problem.line, lines)
        assert "\n" not in str(problem)
