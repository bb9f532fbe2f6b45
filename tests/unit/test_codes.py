"""Programs decide by codes: no code of ours looks for words in a message, and every exception has a stable code."""

import ast
import json
import pickle
import re

import pytest

from ppfleet import errors
from ppfleet.errors import CommError, FleetError, MismatchError, Preempted, Stalled
from tests.harness import ROOT

# What others print has no codes: foreign.py reads the failures of Paddle, gloo, compilers and crashed interpreters,
# tipc/figures.py the figures (`ips: 12.3`) that training and inference scripts print.
FOREIGN = {"ppfleet/foreign.py", "ppfleet/tipc/figures.py"}
_SEARCH = {"find", "rfind", "index", "startswith", "endswith", "replace", "removeprefix", "removesuffix", "count"}
_PATTERN = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
# What holds words for people, by its name: an attribute, a variable, or a key.
_MESSAGES = {
    "text",
    "what",
    "why",
    "message",
    "sentence",
    "reason",
    "said",
    "told",
    "output",
    "stderr",
    "line",
    "lines",
}
_FAILURES = {"failure", "error", "exception", "e", "err", "exc", "cause"}


def is_words(node):
    """Whether a literal is a word or a phrase: letters that a rewording would change, not a mark, flag or file name."""
    if isinstance(node, ast.JoinedStr):
        return any(is_words(part) for part in node.values)
    if isinstance(node, ast.Tuple):
        return any(is_words(part) for part in node.elts)
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    text = re.sub(r"\[[^]]*\]|\\x\w\w|\\\w", "", node.value)  # without the classes and escapes of a pattern
    flag = text.startswith(("-", ".", "/", "#", "<")) or text.endswith(("=", "/", "://"))
    return sum(map(str.isalpha, text)) >= 3 and not flag


def is_message(node):
    """Whether an expression is a text for people: str(failure), x.text, x["why"], message, message.lower()."""
    if isinstance(node, ast.Attribute):
        return node.attr in _MESSAGES
    if isinstance(node, ast.Name):
        return node.id in _MESSAGES
    if isinstance(node, ast.Subscript):
        key = node.slice
        return isinstance(key, ast.Constant) and key.value in _MESSAGES
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("str", "repr") and node.args:
            inside = node.args[0]
            return is_message(inside) or (isinstance(inside, ast.Name) and inside.id in _FAILURES)
        same = ("lower", "upper", "casefold", "strip", "lstrip", "rstrip", "decode")
        return isinstance(function, ast.Attribute) and function.attr in same and is_message(function.value)
    return isinstance(node, ast.JoinedStr) and any(
        is_message(part.value) for part in node.values if isinstance(part, ast.FormattedValue)
    )


def decisions(source):
    """The lines of a program that look for words in a message."""
    tree, dicts = ast.parse(source), set()
    for node in ast.walk(tree):  # a JSON message that came from another rank is looked at by its keys
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            dicts.add(ast.dump(node.func.value))
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            dicts.add(ast.dump(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            where = node.comparators[0]
            if is_words(node.left) and is_message(where) and ast.dump(where) not in dicts:
                yield node.lineno
            if is_message(node.left) and is_message(where):  # one message in another
                yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, words = node.func.attr, [arg for arg in node.args if is_words(arg)]
            if name in _SEARCH and words and is_message(node.func.value):
                yield node.lineno
            if name in _PATTERN and any(is_message(arg) for arg in node.args) and _has_words(node, tree):
                yield node.lineno


def _has_words(call, tree):
    """Whether re.search("words", …), or the pattern that a name of this file stands for, holds words."""
    patterns = list(call.args[:1])
    if isinstance(call.func.value, ast.Name):
        name = call.func.value.id
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                patterns += getattr(node.value, "args", [])[:1]
    return any(is_words(pattern) for pattern in patterns)


@pytest.mark.parametrize(
    "line",
    [
        'if "is taken" in text: pass',
        'if "did not come" not in str(failure): pass',
        'x = "gradient" in entry.what',
        'x = doom.text.replace("its process", "")',
        'x = [line for line in lines if "rror" in line]',
        'x = answer.sentence.startswith("rank 1 ")',
        'x = re.search(r"failed on rank \\d", str(failure))',
        'P = re.compile("by peer|gloo")\nx = P.search(rank.text)',
        'x = words["why"].find("left the")',
        'x = f"line {n} (" in str(failure)',
        'x = rank.text not in answer.sentence',
        'x = "killed" in found.sentence.lower()',
    ],
)  # fmt: skip
def test_a_search_in_a_message_is_found(line):
    assert list(decisions(line))


@pytest.mark.parametrize(
    "line",
    [
        'if "error" in message: raise unpack(message["error"])',  # a key of a dict
        'x = path.startswith("workerlog.")',
        'x = text.splitlines()[0]',
        'x = text.endswith("\\n")',
        'x = word.startswith("--log_dir=")',
        'x = "step" in fields',
    ],
)  # fmt: skip
def test_other_code_is_left_alone(line):
    assert not list(decisions(line))


def test_no_code_looks_for_words_in_a_message():
    found = []
    for path in sorted((ROOT / "ppfleet").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in FOREIGN:
            found += [f"{name}:{line}" for line in decisions(path.read_text(encoding="utf-8"))]
    assert not found, f"{found}: give the failure a code (errors.py, watchdog/events.py) and decide by that"


def family(of=FleetError):
    return {of, *(each for child in of.__subclasses__() for each in family(child))}


def test_every_exception_has_a_code_of_its_own():
    codes = {each.__name__: vars(each).get("code") for each in {*family(), Preempted}}
    assert all(isinstance(code, str) for code in codes.values()), codes
    assert len(set(codes.values())) == len(codes), codes


def test_the_exit_codes_stay_what_python_takes_them_from():
    assert (Stalled("no").code, Preempted("no").code, Preempted("no", 143).code) == (76, 75, 143)
    assert [errors.code_of(each("no")) for each in (Stalled, Preempted)] == ["stalled", "preempted"]


def test_an_error_that_travels_keeps_class_code_and_fields():
    failure = CommError("port 1", code="port_taken", ranks=[2])
    for sent in (errors.unpack(json.loads(json.dumps(errors.pack(failure)))), pickle.loads(pickle.dumps(failure))):
        assert (type(sent), sent.code, sent.fields, str(sent)) == (CommError, "port_taken", {"ranks": [2]}, "port 1")
    there = errors.unpack(errors.pack(MismatchError("other weights")), "saving failed on rank 0: ", origin=0)
    assert (type(there), there.code, there.fields) == (MismatchError, "mismatch", {"origin": 0})
    assert str(errors.unpack(errors.pack(OSError(28, "full")))) == "OSError: [Errno 28] full"
    assert errors.unpack(errors.pack(Stalled("no"))).code == 76


def test_errors_of_others_are_told_apart():
    assert errors.code_of(RuntimeError("gloo: Connection closed by peer [127.0.0.1]:4242")) == "connection"
    assert errors.code_of(BrokenPipeError("no")) == "connection" and errors.code_of(ValueError("no")) == ""
    assert errors.code_of(KeyboardInterrupt()) == "interrupted"
