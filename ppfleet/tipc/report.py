"""What a run leaves behind: results_python.log (the runner writes it), results.json, JUnit XML and one HTML page."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ppfleet.files import json_bytes, replace_file
from ppfleet.files import write as write_bytes
from ppfleet.tipc import page

if TYPE_CHECKING:
    from ppfleet.tipc.run import Result

STATUS, JSON, JUNIT, PAGE = "results_python.log", "results.json", "results.xml", "report.html"
_TAIL_LINES, _TAIL_CHARS = 40, 6000
_PATIENCE = 60.0  # seconds for another node's last lines
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def end_of(text: str, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, without colours and overwritten progress."""
    kept = [_COLOUR.sub("", line).rpartition("\r")[2].rstrip() for line in text.rstrip().split("\n")[-lines:]]
    return "\n".join(kept)[-_TAIL_CHARS:]


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
        "tail": result.tail,
    }


def of_node(directory: Path, token: str) -> dict[str, Any] | None:
    """Another node's results, where it shares this directory; None where it does not, or did not end in time."""
    deadline = time.monotonic() + _PATIENCE
    while directory.is_dir() and time.monotonic() < deadline:
        try:
            found = json.loads((directory / JSON).read_text(encoding="utf-8"))
            if found.get("token") == token and found.get("finished"):
                return dict(found)
        except (OSError, ValueError):
            pass
        time.sleep(0.5)
    return None


def write(directory: Path, facts: dict[str, Any]) -> None:
    for name, data in ((JSON, json_bytes(facts)), (JUNIT, junit(facts)), (PAGE, page.html(facts).encode())):
        replace_file(directory / name, lambda part, data=data: write_bytes(part, data))  # type: ignore[misc]


def junit(facts: dict[str, Any]) -> bytes:
    """A test suite for each chain, a test case for each command."""
    suites = ElementTree.Element("testsuites", name=f"TIPC {facts['model']} {facts['mode']}")
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
