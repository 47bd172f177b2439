# The front door. `make` alone prints the targets.
.DEFAULT_GOAL := help
RELEASE := target/release

.PHONY: help setup build demo test check fmt bench oracle schemas dist clean

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

check: ## What CI runs: format, lints, tests, docs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(MAKE) test
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

fmt: ## Format the sources
	cargo fmt --all

bench: build ## Measure: ratios within one run, against the peer each names
	cargo bench --workspace

oracle: build ## Hold the simulator against the allocators of sixteen PyTorch releases
	tests/oracle/run.sh all

schemas: ## Write the generated code of the trace format again
	./schemas/generate.sh

dist: build ## Put what users need into target/gputrace.tar.gz
	tar -czf target/gputrace.tar.gz -C $(RELEASE) gputrace libgputrace.so

clean: ## Remove what was built
	cargo clean
