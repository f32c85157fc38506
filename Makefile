# Malachi. `make run` and `make test` do all the set-up they need: the Go toolchain and modules come through the go command.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help
export GOTOOLCHAIN := go1.27.3
export GOFLAGS := -buildvcs=false

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LINT_VERSION := v2.15.0
PKGS := ./...
RACE ?=

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):[^#]*## /\1\t/' | expand -t 18

.PHONY: build
build: ## build bin/malachi
	@mkdir -p bin
	go build -trimpath -ldflags "-X main.version=$(VERSION)" -o bin/malachi ./cmd/malachi

.PHONY: run
run: build ## run a broker on this machine: data in ./malachi-data, API on 127.0.0.1:4040
	./bin/malachi dev --data malachi-data

.PHONY: demo
demo: build ## load this repository's history, kill the broker in the middle, restart it, compare every record
	go run ./cmd/demo -malachi ./bin/malachi

.PHONY: test
test: ## run all tests (RACE=1 for the race detector)
	go test $(if $(RACE),-race) -timeout 20m $(PKGS)

.PHONY: lint
lint: .tools/golangci-lint ## check format, vet and lint rules
	@test -z "$$(gofmt -l $$(git ls-files '*.go' | grep -v ^gen/))" || { gofmt -l $$(git ls-files '*.go' | grep -v ^gen/); exit 1; }
	go vet ./...
	.tools/golangci-lint run ./...

.tools/golangci-lint: Makefile
	@mkdir -p .tools
	GOBIN=$(CURDIR)/.tools go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@touch $@

.tools/protoc-gen-go: go.mod
	@mkdir -p .tools
	go build -o $@ google.golang.org/protobuf/cmd/protoc-gen-go

.tools/protoc-gen-connect-go: go.mod
	@mkdir -p .tools
	go build -o $@ connectrpc.com/connect/v2/cmd/protoc-gen-connect-go

tools/node_modules/.bin/buf: tools/package-lock.json
	cd tools && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: generate
generate: .tools/protoc-gen-go .tools/protoc-gen-connect-go tools/node_modules/.bin/buf ## generate gen/ from proto/
	tools/node_modules/.bin/buf lint
	tools/node_modules/.bin/buf generate

.PHONY: checkgenerate
checkgenerate: generate ## fail if gen/ is not what proto/ gives
	@git diff --exit-code --stat -- gen proto && test -z "$$(git status --porcelain -- gen)" || { echo "gen/ is stale: run make generate"; exit 1; }

.PHONY: bench
bench: build ## measure against this machine's limits (minutes; figures go to docs/benchmarks.md)
	./bin/malachi bench suite

.PHONY: e2e
e2e: build ## run the tests with whole processes
	go test -count=1 -timeout 15m ./e2e/...

.PHONY: modules
modules: ## vet the modules that are not part of the root one
	cd e2e/bench && go vet ./...

PEERS ?= nats-always;nats-default;ceiling-direct;malachi
W ?= w1,w2,w3,w4
.PHONY: benchpeers
benchpeers: build ## three brokers against NATS and a bare quorum loop (needs nats-server on PATH; PEERS= W= RUNS=)
	cd e2e/bench && go build -o ../../bin/benchpeers . && MALACHI_BIN=$(CURDIR)/bin/malachi ../../bin/benchpeers -targets "$(PEERS)" -w $(W) -runs $(or $(RUNS),3)

NAME ?=
.PHONY: drill
drill: build ## drills with three broker processes: NAME=Growth picks some
	go test -count=1 -timeout 15m -v -run 'Test$(NAME)' ./e2e/drill

SEED ?= 0
STEPS ?= 500
.PHONY: sim
sim: ## simulate replica sets: fixed and fresh seeds, or SEED=n STEPS=n with its trace
	go test -count=1 -timeout 15m -run '^TestSimulation$$' -v ./storage/replication -args -sim.seed=$(SEED) -sim.steps=$(STEPS)

FUZZTIME ?= 10s
.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME
	@set -e; for p in $$(go list ./...); do for f in $$(go test -list '^Fuzz' $$p 2>/dev/null | grep ^Fuzz || true); do \
	  echo "$$p $$f"; go test -run='^$$' -fuzz="^$$f\$$" -fuzztime=$(FUZZTIME) $$p; done; done

.PHONY: invariants
invariants: ## list invariants without a test, and turn every safety rule off to see its test go red
	go run ./e2e/inv/invcheck
