"""What a run leaves behind: results_python.log (the runner writes it), results.json, JUnit XML and one HTML page."""

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
    """The last lines of a log, without colours, overwritten progress and what no page can show."""
    lines = text.rstrip().split("\n")[-_TAIL_LINES:]
    kept = [_NO_XML.sub("?", _COLOUR.sub("", line)).rstrip().rpartition("\r")[2] for line in lines]
    return "\n".join(kept)[-_TAIL_CHARS:]


def problems(facts: dict[str, Any]) -> list[str]:
    """Why a run is no certificate: what failed here, what failed on other nodes, or that nothing was run at all."""
    found = [f"{c['id']}: {c['reason']}" for c in facts["commands"] if c["status"] == "failed"]
    for name, other in facts["nodes"].items():
        if other:
            found += [f"{name}: {problem}" for problem in problems(other)]
            found += [f"{name}: did not come to its end"] if not other["finished"] else []
    away = facts["node"]["number"] > 0
    if facts["finished"] and not found and not away and not any(c["status"] == "ok" for c in facts["commands"]):
        found.append("nothing was run, every command was skipped: this certifies nothing")
    return found


def entry(result: Result, directory: Path) -> dict[str, Any]:
    """A result as the report keeps it; its log by the way from the report's directory."""
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
    """By which text file the results there were made, as the end of a name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads((directory / JSON).read_text(encoding="utf-8"))
        return f".{Path(facts['config']).stem}"
    return ""


def of_node(directory: Path, token: str) -> dict[str, Any] | None:
    """Another node's results, where it shares this directory; None where it does not. They may be unfinished."""
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


def write(directory: Path, facts: dict[str, Any]) -> None:
    """All forms; an OutputError where that cannot be done."""
    page_text = report_page.html(facts, problems(facts)).encode(errors=ODD)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in ((JSON, json_bytes(facts)), (JUNIT, junit(facts)), (PAGE, page_text)):
        replace_file(directory / name, data)


def junit(facts: dict[str, Any]) -> bytes:
    """A test suite for each chain, a test case for each command."""
    suites = ElementTree.Element("testsuites", name=_NO_XML.sub("?", f"TIPC {facts['model']} {facts['mode']}"))
    for run in dict.fromkeys(command["run"] for command in facts["commands"]):
        commands = [command for command in facts["commands"] if command["run"] == run]
        count = {status: str(sum(c["status"] == status for c in commands)) for status in ("failed", "skipped")}
        suite = ElementTree.SubElement(
            suites, "testsuite", name=run, tests=str(len(commands)), failures=count["failed"], errors="0",
            skipped=count["skipped"], time=f"{sum(c['seconds'] for c in commands):.2f}",
        )  # fmt: skip
        for command in commands:
            case = ElementTree.SubElement(
                suite, "testcase", name=command["id"], classname=f"{facts['model']}.{facts['mode']}",
                time=f"{command['seconds']:.2f}",
            )  # fmt: skip
            if command["status"] != "ok":
                kind = "failure" if command["status"] == "failed" else "skipped"
                ElementTree.SubElement(case, kind, message=_NO_XML.sub("?", command["reason"]))
            output = "\n".join(filter(None, (command["command"], command["note"], command["tail"])))
            ElementTree.SubElement(case, "system-out").text = _NO_XML.sub("?", output)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))
