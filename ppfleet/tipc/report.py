"""The results of a run: results.json, JUnit XML and an HTML page, beside the runner's results_python.log."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ppfleet import limits
from ppfleet.checkpoint.files import ODD, json_bytes, replace_file
from ppfleet.tipc import report_page

if TYPE_CHECKING:
    from ppfleet.tipc.execute import Result

STATUS, JSON, JUNIT, PAGE = "results_python.log", "results.json", "results.xml", "report.html"
_TAIL_LINES, _TAIL_CHARS = 60, 8000
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def end_of(text: str) -> str:
    """The last lines of a log, without colours, overwritten progress and characters that XML forbids."""
    lines = text.rstrip().split("\n")[-_TAIL_LINES:]
    kept = [_NO_XML.sub("?", _COLOUR.sub("", line)).rstrip().rpartition("\r")[2] for line in lines]
    return "\n".join(kept)[-_TAIL_CHARS:]


def problems(results: dict[str, Any]) -> list[str]:
    """Why a run certifies nothing: failures here and on other nodes, or that no command was run."""
    found = [f"{c['id']}: {c['reason']}" for c in results["commands"] if c["status"] == "failed"]
    for name, other in results["nodes"].items():
        if other:
            found += [f"{name}: {problem}" for problem in problems(other)]
            found += [f"{name}: did not finish"] if not other["finished"] else []
    first = results["node"]["number"] == 0
    if results["finished"] and not found and first and not any(c["status"] == "ok" for c in results["commands"]):
        found.append("no command was run, all were skipped: this certifies nothing")
    return found


def entry(result: Result, directory: Path) -> dict[str, Any]:
    """A result for results.json; the path of its log is relative to the report's directory."""
    command = result.command
    return {
        "id": command.id,
        "stage": command.stage,
        "run": command.run,
        "status": result.status,
        "reason": result.reason,
        "seconds": round(result.seconds, 2),
        "exit_code": result.code,
        "device": command.device,
        "batch_size": command.batch_size,
        "note": command.note,
        "command": command.text,
        "needs": list(command.needs),
        "log": os.path.relpath(command.log, directory) if result.code is not None else "",
        "figures": result.figures,
        "tail": end_of(result.tail),
    }


def name_of(directory: Path) -> str:
    """A suffix for the name of old results: the text file that they are from."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        results = json.loads((directory / JSON).read_text(encoding="utf-8"))
        return f".{Path(results['config']).stem}"
    return ""


def of_node(directory: Path, token: str) -> dict[str, Any] | None:
    """Another node's results, possibly unfinished; None if it does not share this directory."""
    deadline = time.monotonic() + limits.LAST_WORDS
    found: dict[str, Any] | None = None
    while directory.is_dir() and time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            read = json.loads((directory / JSON).read_text(encoding="utf-8"))
            found = dict(read) if read.get("token") == token else found
        if found and found["finished"]:
            break
        time.sleep(0.5)
    return found


def write(directory: Path, results: dict[str, Any]) -> None:
    """Write all formats; an OutputError says why that failed."""
    page_text = report_page.html(results, problems(results)).encode(errors=ODD)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in ((JSON, json_bytes(results)), (JUNIT, junit(results)), (PAGE, page_text)):
        replace_file(directory / name, data)


def junit(results: dict[str, Any]) -> bytes:
    """JUnit XML: a test suite for each chain, a test case for each command."""
    suites = ElementTree.Element("testsuites", name=_NO_XML.sub("?", f"TIPC {results['model']} {results['mode']}"))
    for run in dict.fromkeys(command["run"] for command in results["commands"]):
        commands = [command for command in results["commands"] if command["run"] == run]
        count = {status: str(sum(c["status"] == status for c in commands)) for status in ("failed", "skipped")}
        suite = ElementTree.SubElement(
            suites, "testsuite", name=run, tests=str(len(commands)), failures=count["failed"], errors="0",
            skipped=count["skipped"], time=f"{sum(c['seconds'] for c in commands):.2f}",
        )  # fmt: skip
        for command in commands:
            case = ElementTree.SubElement(
                suite, "testcase", name=command["id"], classname=f"{results['model']}.{results['mode']}",
                time=f"{command['seconds']:.2f}",
            )  # fmt: skip
            if command["status"] != "ok":
                kind = "failure" if command["status"] == "failed" else "skipped"
                ElementTree.SubElement(case, kind, message=_NO_XML.sub("?", command["reason"]))
            output = "\n".join(filter(None, (command["command"], command["note"], command["tail"])))
            ElementTree.SubElement(case, "system-out").text = _NO_XML.sub("?", output)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))
