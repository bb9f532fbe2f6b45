"""Command lines: what is refused, how, and with which exit code."""

import sys

import pytest

from ppfleet import cli
from ppfleet.errors import DataError


def parser():
    made = cli.Parser("what it does")
    made.add_argument("--count", type=cli.number(int, 1), default=3, help="how many")
    made.add_argument("--share", type=cli.number(float, 0, 1), default=0.5)
    made.switch("--fast", "be fast")
    return made


def test_values():
    options = parser().parse_args(["--count=4", "--share", "1", "--fast"])
    assert (options.count, options.share, options.fast) == (4, 1.0, True)
    assert [parser().parse_args([f"--fast={text}"]).fast for text in ("True", "false", "1", "no")] == [
        True,
        False,
        True,
        False,
    ]
    assert parser().parse_args([]).fast is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--count=0"], "must be an integer >= 1, got '0'"),
        (["--count=two"], "must be an integer >= 1, got 'two'"),
        (["--share=1.5"], "must be a number from 0 to 1, got '1.5'"),
        (["--share=inf"], "must be a number from 0 to 1, got 'inf'"),
        (["--share=nan"], "must be a number from 0 to 1, got 'nan'"),
        (["--fast=Fasle"], "must be True or False, got 'Fasle'"),
        (["--cou=3"], "unrecognized arguments: --cou=3"),
    ],
)
def test_refusals_are_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and error.count("\n") == 1


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "what it does" in shown and "how many (default: 3)" in shown and "None" not in shown


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [(DataError("no data"), 1, "error: no data\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_errors_end_in_one_line(capsys, failure, code, said):
    def main():
        raise failure

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert end.value.code == code and capsys.readouterr().err == said
    if code == 1:  # what the other ranks are told when they wait for this one
        assert sys.last_value is failure


def test_success_and_surprises():
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: None)
    assert end.value.code == 0
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.run(lambda: 1 // 0)
