# Pando: `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help deps build demo test test-race test-all test-zfs test-dist explore lint bench dist ci clean

# Runs a command with a Go that can build this.
WITH_GO := scripts/go.sh
VERSION = $(or $(shell git describe --always --dirty 2>/dev/null),dev)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what is missing to build, test and lint (Debian, Ubuntu)
	@scripts/deps.sh all

build: ## build bin/pando
	$(WITH_GO) go build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/pando ./cmd/pando

demo: ## install what it needs, build, and show the main job on real input (as root)
	@scripts/deps.sh run
	@$(MAKE) --no-print-directory build
	@scripts/demo.sh

test: ## run every test that this host can run, as root on real filesystems: RUN=Clone PKG=./internal/engine
	@scripts/deps.sh --try all
	@scripts/test.sh $(PKG)

test-race: ## run the tests of packages with goroutines under the race detector
	@scripts/deps.sh --try all
	@RACE=1 scripts/test.sh $(PKG)

test-all: ## run everything, leaving out nothing that `make test` draws from: takes hours
	@scripts/deps.sh --try all
	@PANDO_TEST_FULL=1 scripts/test.sh $(PKG)

test-zfs: ## run the tests of ZFS in a guest that has it: RUN=TestX PKGS=./internal/linux/zfs ZFS=2.1
	@test/zfsvm/test.sh $(PKGS)

test-dist: ## build the packages twice, compare them, and install them into a clean Debian (as root)
	@scripts/deps.sh dist
	@scripts/dist-test.sh

explore: ## look for faults with other shards, seeds and fuzz targets: TIME=20m PKG=./test/crash
	@scripts/deps.sh --try all
	@scripts/explore.sh $(PKG)

lint: ## check format, vet, staticcheck, shellcheck, layers, lengths
	@scripts/lint.sh

bench: build ## measure clones against cp on this host (as root)
	@scripts/bench.sh $(BENCHFLAGS)

dist: ## build tarballs, .deb, .rpm, checksums and bills of materials for amd64 and arm64 into dist/
	@scripts/dist.sh

ci: ## what continuous integration runs
	@.ci/run

clean: ## remove what was built
	rm -rf bin out dist
