# Pando: `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help deps build demo test test-zfs lint bench ci clean

# Runs a command with a Go that can build this.
WITH_GO := scripts/go.sh
# Of go test. Not from its cache, which does not see the kernel and the disks. One
# package after the other: some make mount namespaces, which would hold what the
# tests of others unmount. The sweep of all crashes takes minutes.
TESTFLAGS ?= -count=1 -p 1 -timeout 30m
VERSION = $(or $(shell git describe --always --dirty 2>/dev/null),dev)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what is missing to build, test and lint (Debian, Ubuntu)
	@scripts/deps.sh all

build: ## build bin/pando
	CGO_ENABLED=0 $(WITH_GO) go build -buildvcs=false -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/pando ./cmd/pando

demo: ## install what it needs, build, and show the main job on real input (as root)
	@scripts/deps.sh run
	@$(MAKE) --no-print-directory build
	@scripts/demo.sh

test: ## run every test that this host can run; as root on real filesystems
	@scripts/deps.sh --try all
	@$(WITH_GO) go build ./... # on all cores
	@$(WITH_GO) go run -buildvcs=false ./tools/testsum $(TESTFLAGS) ./...

test-zfs: ## run the tests of ZFS in a guest that has it: RUN=TestX PKGS=./internal/zfs ZFS=2.1
	@test/zfsvm/test.sh $(PKGS)

lint: ## check format, vet, staticcheck, shellcheck, layers, lengths
	@scripts/lint.sh

bench: build ## measure clones against cp on this host (as root)
	@scripts/bench.sh $(BENCHFLAGS)

ci: ## what continuous integration runs
	@.ci/run

clean: ## remove what was built
	rm -rf bin out
