module github.com/malachilog/malachi/e2e/bench

go 1.27.0

require (
	github.com/malachilog/malachi v0.0.0
	github.com/nats-io/nats.go v1.55.0
)

require (
	connectrpc.com/connect/v2 v2.0.2 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/klauspost/compress v1.20.4 // indirect
	github.com/nats-io/nkeys v0.4.16 // indirect
	github.com/nats-io/nuid v1.0.1 // indirect
	golang.org/x/crypto v0.57.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/malachilog/malachi => ../..
