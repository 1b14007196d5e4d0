# Two commands are all a newcomer needs: `make trace` and `make test`.
PYTHON ?= python3
PROMPT ?= Tell me a short story about a fox who learns to share.
ARGS ?= --temperature 0.7 --top-p 0.9
ADDRESS ?= 8000
MODEL ?= smollm2-135m-instruct
BIN := .venv/bin
WEIGHTS := weights/smollm2-135m-instruct/model.safetensors

.PHONY: trace trace-layers setup generate chat serve test gpu readme prove lint clean

# The model's weights in four bits draft for it; the last line compares with plain decoding. The first run compiles the step.
trace: PROMPT = What is photosynthesis?
trace: .venv/ready $(WEIGHTS)
	@$(BIN)/python generate.py "$${PROMPT}" --draft lowbit --trace --compare

# Three of the 14 layers of small-llama, which is in the repository, draft for it.
trace-layers: PROMPT = Write a short story about a bird.
trace-layers: .venv/ready
	@$(BIN)/python generate.py "$${PROMPT}" --model small-llama --draft skip --trace --compare

# The environment and the model, for every command that begins with `python`: `. .venv/bin/activate` comes first.
setup: .venv/ready $(WEIGHTS)

generate: .venv/ready $(WEIGHTS)
	@$(BIN)/python generate.py "$${PROMPT}" $(ARGS)

# A conversation at the terminal.
chat: .venv/ready $(WEIGHTS)
	@$(BIN)/python generate.py --interactive $(ARGS)

serve: .venv/ready-serve $(WEIGHTS)
	@$(BIN)/python generate.py --serve $(ADDRESS) $(ARGS)

test: lint $(WEIGHTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# On a machine with an NVIDIA GPU: does everything work there, and how fast is it? The report is gpu-report.md.
gpu: .venv/ready-dev $(WEIGHTS)
	@$(BIN)/python -m benchmark.gpu_report --model "$(MODEL)"

# Every command of the README and of docs/, in order, with short settings.
readme: .venv/ready-dev $(WEIGHTS)
	$(BIN)/python -m tests.readme

# The full product of drafters, parameters, policies, stops and rules, larger vocabularies, and bf16 texts of all prompts.
prove: .venv/ready-dev $(WEIGHTS)
	$(BIN)/python -m pytest -m prove -n 2 --dist loadfile tests/decoding tests/model/test_step.py

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The cache folder belongs to all checkouts, so its removal is only offered.
clean:
	@kept=$$($(BIN)/python -c 'from model.places import cache_folder; print(cache_folder())' 2>/dev/null); \
	if [ -d "$$kept" ]; then \
		echo "compiled steps and measurements stay, $$(du -sh "$$kept" | cut -f 1): rm -r '$$kept' removes them"; \
	fi
	rm -rf .venv

# The shell receives the prompt through the environment, so that quotes in it stay quotes ($ is written $$).
export PROMPT

# A step of the installation: one line says what it does, and its output goes into a file, which the
# line of a failure names.
LOG := .venv/install.log
quietly = @mkdir -p .venv; echo "$(1)"; $(2) >>$(LOG) 2>&1 || { tail -n 3 $(LOG); \
	echo "this step failed: all of its output is in $(LOG)"; exit 1; }
install = $(BIN)/python -m pip install --disable-pip-version-check

.venv/ready: requirements.txt
	$(call quietly,making .venv,{ $(PYTHON) -m venv .venv || { $(PYTHON) -m pip install virtualenv && \
		$(PYTHON) -m virtualenv .venv; }; })
	$(call quietly,installing torch and other libraries (0.4 GB with torch for CPUs; gigabytes for GPUs),\
		$(install) -r requirements.txt)
	@command -v cc >/dev/null || { echo "installing a C compiler, since there is none (ziglang)"; \
		$(install) ziglang >>$(LOG) 2>&1; }
	@touch $@

.venv/ready-serve: .venv/ready requirements-serve.txt
	$(call quietly,installing what the server needs,$(install) -r requirements-serve.txt)
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt requirements-serve.txt
	$(call quietly,installing what the tests need,\
		$(install) -r requirements-serve.txt -r requirements-dev.txt)
	@touch $@

$(WEIGHTS): | .venv/ready
	$(BIN)/python -m weights.fetch smollm2-135m-instruct
