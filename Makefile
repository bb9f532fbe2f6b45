# Every target makes the environment it needs and touches no other: .venv (today's Paddle), .venv26 (Paddle 2.6),
# .venv-cuda (Paddle 2.6 for cards), .venv-peers (what make bench compares with), .venv-docs (what builds the site).
PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv/.ready
VENV26 := .venv26/.ready
VENV_CUDA := .venv-cuda/.ready
VENV_PEERS := .venv-peers/.ready
VENV_DOCS := .venv-docs/.ready
PY := .venv/bin/python
PY26 := .venv26/bin/python
PY_CUDA := .venv-cuda/bin/python
RANKS ?= 2
LAUNCH = $(PY) -m paddle.distributed.launch --nproc_per_node $(RANKS) --log_dir output/demo/launch
DEMO = --epochs=8 --batch-size=16 --image-size=64 --crop=0.6 --augment=none --save-every=20

TIPC ?= test_tipc/configs/mobilenet_v3_small/train_infer_python.txt
MODE ?= lite_train_lite_infer
RUN ?= output/demo
PORT ?= 8040
JOBS ?= 3
PYTEST = -m pytest tests -n $(JOBS) --dist worksteal --durations 12

.PHONY: help setup demo board tipc test test-unit test-fast test-all test-paddle26 test-sim test-sim26 test-cuda-wheel check-cards coverage site docs-test chaos bench bench-quick size lint format debian-packages clean
.DEFAULT_GOAL := help

help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## */\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(VENV)   ## .venv with all that the README and the pages use: source .venv/bin/activate

demo: $(VENV)    ## the whole way: lite data, training on 2 processes, evaluation, export, benchmarked inference
	rm -rf output/demo
	$(PY) tools/lite_data.py lite_data
	$(LAUNCH)/train tools/train.py --device=cpu --data-path=lite_data --output-dir=output/demo $(DEMO)
	$(LAUNCH)/eval tools/eval.py --device=cpu --data-path=lite_data --pretrained=output/demo/best.pdparams
	$(PY) tools/export.py --pretrained=output/demo/best.pdparams --save-inference-dir=output/demo/inference
	$(PY) deploy/inference_python/infer.py --model-dir=output/demo/inference --img-path=lite_data/test --topk=2 --benchmark=True
	@$(PY) -c 'import json; e = json.load(open("output/demo/eval.json")); \
	  print("demo: a MobileNetV3-small that reads %.1f %% of %d unseen digits right: weights, checkpoints and logs in output/demo," \
	  " the deployable model in output/demo/inference" % (100 * e["top1"], e["samples"]))'
	@$(PY) -m ppfleet report output/demo

board: $(VENV)   ## VisualDL on the demo's run or another, for this machine only: make board RUN=<dir> PORT=<port>
	@ls $(RUN)/visualdl/vdlrecords.*.log > /dev/null 2>&1 || { echo "no curves in $(RUN) yet: train first (make demo), or make board RUN=<dir>"; exit 2; }
	@$(PY) -c 'import socket, sys; sys.exit(None if socket.socket().connect_ex(("127.0.0.1", $(PORT))) else "port $(PORT) is taken: make board PORT=<another>")'
	@.venv/bin/visualdl --logdir $(RUN)/visualdl --host 127.0.0.1 --port $(PORT) --language en --disable-telemetry

tipc: $(VENV)    ## certify the whole way from a TIPC text file: make tipc TIPC=<file> MODE=<mode>
	PYTHON=$(PY) bash test_tipc/prepare.sh $(TIPC) $(MODE)
	PYTHON=$(PY) bash test_tipc/test_train_inference_python.sh $(TIPC) $(MODE)

test: $(VENV)    ## unit, single-process, multi-rank and two-host tests (under 15 minutes on 2 cores)
	$(PY) $(PYTEST) -m "not slow"

test-unit: $(VENV) ## the pure tests alone
	$(PY) -m pytest -q tests/unit -n 2

test-fast: $(VENV) ## unit tests and the single-process essentials (about 50 s of CPU time, on 2 cores)
	$(PY) -m pytest -q tests/unit -n 2
	$(PY) -m pytest -q tests/single -n 2 --dist worksteal -m essential

test-all: $(VENV) ## everything: the slow tests, simulated cards and the CUDA wheel too
	$(PY) $(PYTEST)
	$(MAKE) test-sim test-cuda-wheel

test-paddle26: $(VENV26) ## the same suite on Paddle 2.6, in an environment of its own
	$(PY26) $(PYTEST) -m "not slow"

SIM = tests/ranks/test_cards.py tests/ranks/test_check_cards.py tests/faults/test_card_faults.py tests/ranks/test_simcard_collectives.py tests/single/test_simcard.py \
  tests/ranks/test_parity.py tests/ranks/test_comm.py tests/ranks/test_agreement.py tests/ranks/test_evaluation.py \
  tests/ranks/test_resume.py tests/ranks/test_streams.py tests/ranks/test_rollcall.py tests/faults/test_watch.py \
  tests/faults/test_checkpoint_faults.py tests/single/test_job.py tests/single/test_loops.py

test-sim: $(VENV) ## the multi-rank suite again, on simulated cards (tests/simcard)
	PPFLEET_TEST_DEVICE=sim $(PY) -m pytest $(SIM) -n $(JOBS) --dist worksteal --durations 12 -m "not slow"

test-sim26: $(VENV26) ## the same on Paddle 2.6
	PPFLEET_TEST_DEVICE=sim $(PY26) -m pytest $(SIM) -n $(JOBS) --dist worksteal --durations 12 -m "not slow"

test-cuda-wheel: $(VENV_CUDA) ## PyPI's wheel for cards, on a machine without any: what can run on its CPU (4 GB of disk)
	$(PY_CUDA) -m pytest -q tests/unit -n 2
	$(PY_CUDA) -m pytest -q tests/single -n 2 --dist worksteal -m essential --ignore=tests/single/test_simcard.py
	$(PY_CUDA) -m pytest -q tests/ranks/test_parity.py tests/ranks/test_comm.py -n 2 --dist worksteal -m "not slow"

CARDS ?= 2

check-cards:     ## on a machine with cards, with the active Python: what ppfleet promises: make check-cards CARDS=2 IPS=<a>,<b>
	$(PYTHON) -m ppfleet check-cards --cards=$(CARDS) $(if $(IPS),--ips=$(IPS))

COVER ?= tests/unit tests/single

coverage: $(VENV) ## which lines the tests reach, in subprocesses too, per folder: make coverage COVER="tests/unit tests/ranks"
	rm -rf output/coverage && mkdir -p output/coverage
	$(PY) -m coverage run -m pytest -q $(COVER) -n 2 --dist worksteal -m "not slow"; tests=$$?; \
	$(PY) -m coverage combine --quiet && \
	$(PY) -m coverage html --quiet --directory output/coverage/html && \
	$(PY) -m coverage json --quiet -o output/coverage/coverage.json && \
	$(PY) -m tests.coverage_folders output/coverage/coverage.json && exit $$tests

site: $(VENV_DOCS) ## the documentation as a site in site/: English, Chinese, reference, search; no network when it is read
	rm -rf output/pages && mkdir -p output/pages
	tar cf - --exclude=__pycache__ --exclude=test_tipc/output *.md docs deploy/cluster test_tipc ppfleet | tar xf - -C output/pages
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

docs-test: $(VENV) ## run every command of the README and of docs/ in a fresh copy, and compare what they print (8 minutes on 2 quiet cores)
	$(PY) -m pytest -s tests/unit/test_pages.py tests/single/test_docs.py

chaos: $(VENV)   ## 200 kills and 100 faults into real jobs, and the same with plain Paddle (root; more than an hour)
	$(PY) -m tests.faults.chaos kills --count 200
	$(PY) -m tests.faults.chaos faults --count 100
	$(PY) -m tests.faults.chaos table
	$(PY) -m tests.faults.chaos write docs/reliability.md docs/reliability_cn.md

BENCHMARKS = train scale input infer memory overhead

bench: $(VENV) $(VENV_PEERS) ## speed, beside Paddle, PyTorch, ONNX Runtime and OpenVINO; writes docs/performance.md (26 minutes on 2 quiet cores)
	for name in $(BENCHMARKS); do $(PY) benchmarks/$$name.py || exit 1; done
	$(PY) benchmarks/report.py

bench-quick: $(VENV) $(VENV_PEERS) ## start every benchmark with a few steps: does it still run? (its figures mean nothing)
	for name in $(BENCHMARKS); do $(PY) benchmarks/$$name.py --quick --output output/bench-quick || exit 1; done

size: $(VENV)    ## modules, lines, functions and imports per folder; make size COMPARE=<commit> shows both
	@$(PY) -m tests.architecture $(if $(COMPARE),--compare $(COMPARE))

lint: $(VENV)    ## formatter, linter, type checker
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	cd deploy/inference_python && ../../$(PY) -m mypy --config-file ../../pyproject.toml infer.py

format: $(VENV)  ## rewrite the files as `make lint` wants them
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

debian-packages: ## what some tests need of the system (root): network namespaces, Slurm, etcd
	apt-get update && apt-get install --yes --no-install-recommends $$(cat requirements/debian.txt)

clean:           ## remove the environments and everything the targets made
	rm -rf .venv .venv26 .venv-cuda .venv-peers .venv-docs site output lite_data test_tipc/output build *.egg-info .pytest_cache .mypy_cache .ruff_cache

define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 9) else "ppfleet needs Python 3.9 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet $(2)
	@touch $(1)/.ready
endef

$(VENV): setup.py pyproject.toml
	$(call make_venv,.venv,-e ".[cpu$(comma)dev$(comma)deploy]")

$(VENV26): setup.py pyproject.toml requirements/paddle26.txt
	$(call make_venv,.venv26,-r requirements/paddle26.txt -e ".[dev]")

$(VENV_CUDA): setup.py pyproject.toml requirements/cuda-wheel.txt
	$(call make_venv,.venv-cuda,-r requirements/cuda-wheel.txt -e ".[dev]")

$(VENV_PEERS): requirements/peers.txt
	$(call make_venv,.venv-peers,-r requirements/peers.txt)

$(VENV_DOCS): requirements/docs.txt
	$(call make_venv,.venv-docs,-r requirements/docs.txt)

comma := ,
