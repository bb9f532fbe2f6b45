# Sourced by prepare.sh and test_train_inference_python.sh. Chooses the interpreter and calls ppfleet; no logic of the chain.

# The one that $PYTHON names, else the project's own environment, else python3. No other is touched.
tipc_python() {
    if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"
    elif [ -x "$1/.venv/bin/python" ]; then echo "$1/.venv/bin/python"
    else echo python3; fi
}

# Go to the repository, where the commands of the text files start, with the text file found from either place.
tipc_begin() {
    if [ $# -lt 2 ]; then
        echo "usage: bash $0 <config.txt> <mode>" >&2
        echo "modes: lite_train_lite_infer lite_train_whole_infer whole_train_whole_infer whole_infer benchmark_train" >&2
        exit 2
    fi
    local here
    here="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." > /dev/null && pwd)"
    config="$1"
    mode="$2"
    python="$(tipc_python "$here")"
    case "$python" in
        /*) ;;
        */*) python="$PWD/$python" ;;
    esac
    if [ -f "$config" ] && [ ! "$config" -ef "$here/$config" ]; then config="$(realpath -- "$config")"; fi
    cd -- "$here" || exit 2
    if [ "$("$python" -c 'import ppfleet.tipc.cli; print("ready")')" != ready ]; then
        echo "$python cannot import ppfleet: run \`make .venv/.ready\`, or $python -m pip install -e '.[cpu,dev]' ('.[gpu,dev]' with cards)" >&2
        exit 2
    fi
}
