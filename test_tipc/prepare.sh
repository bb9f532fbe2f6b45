#!/usr/bin/env bash
# Makes what a mode reads, and names what is missing. Needs no network; may run twice.
#   bash test_tipc/prepare.sh test_tipc/configs/mobilenet_v3_small/train_infer_python.txt lite_train_lite_infer
set -u
source "$(dirname "${BASH_SOURCE[0]}")/common_func.sh"
tipc_begin "$@"
said="$("$python" -m ppfleet tipc plan "$config" "$mode" "${@:3}" 2>&1 > /dev/null)" || { code=$?; echo "$said" >&2; exit "$code"; }
case "$mode" in
    lite_* | whole_infer | benchmark_train) "$python" tools/lite_data.py lite_data || exit ;;
esac
"$python" -m ppfleet tipc plan --inputs "$config" "$mode" "${@:3}" > /dev/null
code=$?
case "$code/$mode" in
    0/*) echo "ready: bash test_tipc/test_train_inference_python.sh $1 $mode" ;;
    1/whole_train_whole_infer) echo "whole data, an image folder: train/<class>/*.JPEG and val/<class>/*.JPEG, or train_list.txt and val_list.txt with lines \`path label\`" >&2 ;;
    1/whole_infer) echo "whole_infer exports weights that are there: train first ($python tools/train.py --data-path=lite_data --epochs=1), or name others in line 24" >&2 ;;
esac
exit "$code"
