# Every target does its own set-up, inside of this directory only. All paths are relative, so that a checkout
# may lie under any name. ARGS="…" goes to the program that a target starts.

VENV := .venv
VPYTHON := $(VENV)/bin/python

# The first interpreter that is new enough; PYTHON=… chooses another one.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

# $(call need,COMMAND,SENTENCE) ends the set-up with the sentence when the command fails.
need = @$(1) >/dev/null 2>&1 || { echo '$(2)' >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: demo test native up bench locust soak chaos integrations check fmt clean help runtime
.NOTPARALLEL:

demo: runtime  ## start the whole stack, send real calls through it, show what came of them, stop it
	@$(VPYTHON) -m loadtest.demo $(ARGS)

test: check runtime  ## check, then every test
	@$(VPYTHON) -m pytest $(ARGS)

native: NATIVE := build/native
native: CFLAGS := -g -O1 -Wall -Wextra -Wconversion -Wshadow -Werror -DINJECT_FAULTS
native: SANITIZERS := address,undefined -fno-sanitize-recover=all
native: FUZZ_S ?= 60
native:  ## the jail's C code by itself: sanitizers, valgrind, a minute of fuzzing
	$(call need,[ "$$(id -u)" = 0 ],The harness of the forkserver makes namespaces: run this as root.)
	$(call need,{ gcc --version && clang --version && valgrind --version; },A tool is missing (Debian: apt install gcc clang libclang-rt-dev valgrind).)
	@mkdir -p $(NATIVE)/corpus
	@for cc in gcc clang; do echo "$$cc with sanitizers:"; \
	$$cc $(CFLAGS) -static -nostdlib -ffreestanding -fno-stack-protector -o $(NATIVE)/init sandbox/jail/init.c && \
	$$cc $(CFLAGS) -fsanitize=$(SANITIZERS) -o $(NATIVE)/harness tests/native/harness.c && \
	ASAN_OPTIONS=detect_leaks=0 $(NATIVE)/harness $(NATIVE)/init || exit; done # leaks are for valgrind: it can follow a PID 1
	@echo 'valgrind:'
	@gcc $(CFLAGS) -DFOR_VALGRIND -o $(NATIVE)/harness tests/native/harness.c
	@valgrind --quiet --vgdb=no --error-exitcode=99 --leak-check=full --show-leak-kinds=all --errors-for-leak-kinds=all \
	$(NATIVE)/harness $(NATIVE)/init
	@echo 'fuzzer:'
	@clang $(CFLAGS) -fsanitize=fuzzer,$(SANITIZERS) -o $(NATIVE)/fuzz tests/native/fuzz.c
	@$(NATIVE)/fuzz -max_total_time=$(FUZZ_S) -max_len=512 -print_final_stats=1 -artifact_prefix=$(NATIVE)/ \
	$(NATIVE)/corpus >$(NATIVE)/fuzz.log 2>&1 || { tail -n 100 $(NATIVE)/fuzz.log; exit 1; }
	@grep stat:: $(NATIVE)/fuzz.log

up: runtime  ## leave the stack running in the foreground until Ctrl-C
	@$(VPYTHON) -m sandbox up $(ARGS)

bench: runtime  ## how fast it is here, a row at a time, in less than five minutes
	@$(VPYTHON) -m loadtest.table $(ARGS)

locust: runtime  ## users of locust against a service of its own; without ARGS on a web page
	@$(VPYTHON) -m loadtest.locustfiles $(ARGS)

soak: runtime  ## hostile programs among honest ones for 20 minutes: every answer right, nothing leaked
	@$(VPYTHON) -m loadtest.soak $(ARGS)

chaos: CHAOS_S ?= 600
chaos: runtime  ## kill, end and freeze all parts of a loaded service for ten minutes: nothing lost, nothing twice
	@$(VPYTHON) -m tests.system.chaos --seconds $(CHAOS_S) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(ARGS)

integrations: runtime  ## every adapter against the package that it is for, in environments under build/
	@$(VPYTHON) -m tests.integrations $(ARGS)

check: $(VENV)/installed  ## lint, format, types and layers
	@$(VPYTHON) -m ruff check
	@$(VPYTHON) -m ruff format --check
	@$(VPYTHON) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

fmt: $(VENV)/installed  ## put the code into its one format
	@$(VPYTHON) -m ruff check --fix-only --quiet
	@$(VPYTHON) -m ruff format

clean:  ## remove all that these targets made, the virtual environment with the runtime too
	@rm -rf $(VENV) build dist .*_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1 :\2/p' Makefile | while IFS=: read -r name text; do \
	printf '%-14s%s\n' "$$name" "$$text"; done

# What programs see inside the jail. It looks for changes itself and does nothing where there are none.
runtime: $(VENV)/installed
	@$(VPYTHON) -m sandbox runtime build >/dev/null

# The virtual environment; made anew where an earlier attempt ended half way.
$(VENV)/installed: pyproject.toml
	$(call need,[ "$$(uname -s)" = Linux ],RoC Sandbox needs Linux: its jail is made of Linux namespaces.)
	$(call need,[ -n "$(PYTHON)" ],Python 3.11 or newer is missing (Debian: apt install python3).)
	$(call need,"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))',$(PYTHON) is no Python 3.11 or newer (Debian: apt install python3).)
	$(call need,"$(PYTHON)" -c 'import ensurepip; import venv',The venv module of $(PYTHON) is missing (Debian: apt install python3-venv).)
	$(call need,for cc in cc gcc clang; do echo '#include <sys/mount.h>' | $$cc -E - && break; done,A C compiler with the C library headers is missing (Debian: apt install gcc libc6-dev).)
	@$(VPYTHON) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo 'Installing what the service and its tests need into $(VENV) …'
	@$(VPYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
