#!/usr/bin/env bash
# Certifies train -> eval -> export -> infer from a text file; on several machines, start it on each.
#   bash test_tipc/test_train_inference_python.sh test_tipc/configs/mobilenet_v3_small/train_infer_python.txt lite_train_lite_infer
# Further options go to `python -m ppfleet tipc run` (--help lists them); exit code 0 only when nothing failed.
source "$(dirname "${BASH_SOURCE[0]}")/common_func.sh"
tipc_begin "$@"
exec "$python" -m ppfleet tipc run "$config" "$mode" "${@:3}"
