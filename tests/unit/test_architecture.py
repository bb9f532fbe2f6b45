"""Arrows point one way: who may import whom, and no cycles."""

import pytest

from tests import architecture

BASE = {"errors", "foreign", "limits", "log", "_version"}
# Folder of ppfleet -> what of ppfleet it may import beside BASE. A new arrow is a decision: argue for it in the change.
MAY_IMPORT = {
    "cluster": set(),
    "html": set(),
    "cli": set(),
    "watchdog": {"cluster"},
    "distributed": {"cluster", "watchdog"},
    "data": {"distributed"},
    "training": {"data", "distributed"},
    "checkpoint": {"training", "data", "distributed", "watchdog"},
    "evaluation": {"training", "data", "distributed", "checkpoint"},
    "export": {"training", "checkpoint"},
    "cpu": {"watchdog"},
    "job": {"training", "data", "evaluation", "checkpoint", "export", "distributed", "watchdog", "cpu"},
    "metrics": {"evaluation"},
    "inplace": {"data"},
    "commands": {"cli", "cluster", "html", "watchdog", "distributed", "checkpoint", "evaluation"},
    "tipc": {"cli", "cluster", "html", "distributed", "checkpoint"},
    "errors": set(),
    "foreign": set(),
    "limits": set(),
    "log": set(),
    "_version": set(),
    "__main__": {"cli"},
}
# Modules of these are read by commands and by the deployed script's tests; of training nothing is.
OF_RUNS = {"distributed": {"devices"}, "checkpoint": {"files", "manifest", "history"}, "evaluation": {"confusion"}}
# `check-cards` starts it in processes of its own, as a user's script: it lives on the public API, which the command
# itself does not import.
SCRIPT_OF_A_COMMAND = "ppfleet.commands.check_cards.workload"


@pytest.fixture(scope="module")
def modules():
    return architecture.read()


def test_no_module_imports_itself_through_others(modules):
    assert architecture.cycles({name: module.imports for name, module in modules.items()}) == []
    assert architecture.cycles(architecture.folder_imports(modules)) == []


def test_folders_import_only_what_is_below_them(modules):
    for folder, imported in architecture.folder_imports(modules).items():
        root, _, name = folder.partition(".")
        inside = {other.partition(".")[2] for other in imported if other.startswith("ppfleet.")}
        if root == "ppfleet" and name:
            assert inside <= MAY_IMPORT[name] | BASE, f"{folder} imports {sorted(inside - MAY_IMPORT[name] - BASE)}"
            assert not {other for other in imported if not other.startswith("ppfleet")}, folder
        if root == "deploy":
            assert not imported, f"{folder} must run where ppfleet is not installed"
        if root == "models":
            assert not {other for other in imported if other.startswith("tools")}, folder


def test_commands_and_tipc_know_runs_but_not_training(modules):
    for module in modules.values():
        if module.folder in ("ppfleet.commands", "ppfleet.tipc"):
            for name in module.imports - ({"ppfleet"} if module.name == SCRIPT_OF_A_COMMAND else set()):
                assert name != SCRIPT_OF_A_COMMAND and "." in name, f"{module.name} imports {name}"
                _, folder, *inner = name.split(".")
                assert folder not in OF_RUNS or inner[0] in OF_RUNS[folder], f"{module.name} imports {name}"


PUBLIC = {"ppfleet", "ppfleet.cli", "ppfleet.errors", "ppfleet.export", "ppfleet.log", "ppfleet.metrics"}


def test_our_own_scripts_live_on_the_public_api(modules):
    for module in modules.values():
        if module.name.startswith(("tools.", "examples.")) or module.name == SCRIPT_OF_A_COMMAND:
            inside = {name for name in module.imports if name.startswith("ppfleet")}
            assert inside <= PUBLIC, f"{module.name} imports {sorted(inside - PUBLIC)}"


def test_cycles_are_found():
    """The check itself: a cycle of three, a node that reaches it, and one alone."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert architecture.cycles(graph) == [["a", "b", "c"]]
