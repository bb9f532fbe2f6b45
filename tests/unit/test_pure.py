"""The pure parts need no Paddle: neither to import nor to work."""

import subprocess
import sys

from tests.harness import ROOT

PURE = (
    "errors",
    "log",
    "cli",
    "distributed.world",
    "cluster.link",
    "cluster.rendezvous",
    "distributed.handshake",
    "watchdog.hub",
    "watchdog.judge",
    "distributed.shared_memory",
    "distributed.wire",
    "data.sampler",
    "data.digest",
    "evaluation.metrics",
    "evaluation.confusion",
    "checkpoint.manifest",
    "checkpoint.files",
    "checkpoint.history",
    "checkpoint.pdparams",
    "training.state",
    "watchdog.recorder",
    "watchdog.diagnosis",
    "watchdog.process",
    "html.render",
    "html.chart",
)
COMMANDS = (
    "cluster.process_tree",
    "cluster.hosts",
    "tipc.cli",
    "watchdog.watchdog",
    "commands.launch.command",
    "commands.scale.command",
    "commands.why.command",
    "commands.report.command",
)  # these start processes and ask the network, but know nothing of training


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_pure_parts_import_no_paddle():
    imports = "; ".join(f"import ppfleet.{name}" for name in (*PURE, *COMMANDS))
    done = python(f"import sys, ppfleet; {imports}; print(*sys.modules)")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "ppfleet" in loaded and not loaded & {"paddle", "safetensors", "visualdl", "jinja2", "matplotlib"}, (
        done.stderr
    )


def test_missing_paddle_is_one_sentence():
    hide = "import sys; sys.modules['paddle'] = None"
    done = python(f"{hide}\nimport ppfleet\ntry:\n    ppfleet.Job\nexcept ImportError as e: print(type(e).__name__, e)")
    assert done.stdout.startswith("PaddleMissing ppfleet needs PaddlePaddle"), done.stdout + done.stderr
    assert "ppfleet[cpu]" in done.stdout and "ppfleet[gpu]" in done.stdout


def test_unknown_names_are_attribute_errors():
    done = python("import ppfleet; print(hasattr(ppfleet, 'Jobs'))")
    assert done.stdout.strip() == "False", done.stderr
