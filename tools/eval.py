"""Evaluate weights exactly, on any number of ranks: what `tools/train.py --test-only` does, with the same options.

python tools/eval.py --pretrained=output/mobilenet_v3_small/best.pdparams --data-path=lite_data
"""

import sys

import train

from ppfleet import cli

if __name__ == "__main__":
    cli.run(lambda: train.main(["--test-only", *sys.argv[1:]]))
