# The front door. `make` alone prints the targets.
.DEFAULT_GOAL := help
RELEASE := target/release

.PHONY: help setup build demo test torture check fmt bench oracle schemas dist clean

help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: ## Install what a fresh Debian or Ubuntu with Rust lacks
	./tests/setup.sh

build: ## Build libgputrace.so and gputrace, optimised
	cargo build --release --workspace

demo: build ## Record a small training loop on the fake device, and report it
	$(RELEASE)/gputrace record -f -o target/demo.gtr -- $(RELEASE)/fake-cuda demo
	$(RELEASE)/gputrace report target/demo.gtr

test: build ## Run every test that needs no GPU
	cargo test --workspace

# `make test` has the short form. GPUTRACE_TEST_PYTHONS=A:B:... names the Pythons, GPUTRACE_TORTURE_ONLY=WORD some of the scenarios.
torture: build ## Kill, starve and corner recorded programs for minutes: they end as they do alone
	GPUTRACE_TORTURE=long cargo test -p gputrace-tests --test torture -- --nocapture

check: ## What CI runs: format, lints, tests, docs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(MAKE) test
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

fmt: ## Format the sources
	cargo fmt --all

bench: build ## Measure: ratios within one run, against the peer each names
	cargo bench -p gputrace-tests --bench capture
	cargo bench -p gputrace --bench simulator
	cargo build --release -p gputrace-schemas --example training
	python3 tests/scale.py $(RELEASE)

# One wheel of each release that the simulator knows; `make oracle RELEASES=2.11.0` takes one. `make oracle ORACLE_SEEDS=100`
# runs 100 programs of 1,000 commands with each of 12 to 22 option strings of every release: 15 minutes of a processor.
RELEASES := 2.0.1 2.1.2 2.2.2 2.3.1 2.4.1 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.0 2.15.0

oracle: ## Hold the simulator against PyTorch's own compiled allocator
	tests/oracle/build.sh target/oracle $(RELEASES) || [ $$? = 77 ]
	cargo test --release -p gputrace --lib oracle -- --nocapture

schemas: ## Hold the trace format's code against trace.fbs (and flatc, where it is installed)
	cargo test -p gputrace-schemas

dist: build ## Put what users need into target/gputrace.tar.gz
	tar -czf target/gputrace.tar.gz -C $(RELEASE) gputrace libgputrace.so

clean: ## Remove what was built
	cargo clean
