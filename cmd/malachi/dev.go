package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/services/transport"
)

type devFlags struct {
	data, api, ops, readyFile, logLevel string
	nodes                               int
}

func newDev(std streams) *cobra.Command {
	var f devFlags
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run one broker with everything embedded, for development",
		Long: "Run one broker with everything embedded, on loopback. Records are as durable as in production: only the sizes are small\n" +
			"(replication factor 1, 4 metadata shards). Ctrl-C stops it.\n\n" +
			"With --nodes 3 it runs a cluster: three broker processes with a folder each, replication factor 3. Node i takes the given ports plus\n" +
			"100(i-1). One that is killed starts again with the command that was printed for it.",
		Example: "  malachi dev\n  malachi dev --nodes 3\n  malachi dev --data /tmp/malachi --api :0 --ops :0 --ready-file /tmp/malachi.json",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return dev(cmd.Context(), f, std) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.data, "data", "malachi-data", "data folder; made if missing")
	fl.StringVar(&f.api, "api", "127.0.0.1:4040", "address of the public API; port 0 takes a free one")
	fl.StringVar(&f.ops, "ops", "127.0.0.1:4041", "address of the operations port; port 0 takes a free one")
	fl.StringVar(&f.readyFile, "ready-file", "", "write where the broker listens to this `FILE` once it serves")
	fl.IntVar(&f.nodes, "nodes", 1, "broker processes to run: 1, or 3 to 9 for a cluster")
	fl.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

// loopback fills in the host of ":port": dev never listens beyond this machine.
func loopback(addr string) string {
	if strings.HasPrefix(addr, ":") {
		return "127.0.0.1" + addr
	}
	return addr
}

func dev(ctx context.Context, f devFlags, std streams) error {
	level, err := parseLevel(f.logLevel)
	if err != nil {
		return err
	}
	if f.data == "" {
		return usage("--data is empty: name a folder")
	}
	for _, addr := range []string{loopback(f.api), loopback(f.ops)} {
		if host, _, err := net.SplitHostPort(addr); err == nil && !transport.IsLoopback(host) {
			return usage("%s: dev serves only loopback; for others use malachi server", addr)
		}
	}
	if f.nodes != 1 {
		if f.nodes < 3 || f.nodes > 9 {
			return usage("--nodes %d: want 1, or 3 to 9", f.nodes)
		}
		return devCluster(ctx, f, std)
	}
	return launch{
		cfg: broker.Config{
			Data: f.data, API: loopback(f.api), Ops: loopback(f.ops), RPC: "127.0.0.1:0", Raft: "127.0.0.1:0", Gossip: "127.0.0.1:0", Bootstrap: true, Vnodes: 4,
			ElectionTimeout: 200 * time.Millisecond, DiskReserve: 64 << 20, Version: version,
		},
		level: level, readyFile: f.readyFile,
		restart: func(b *broker.Broker) string { return f.restart(b) },
		greet:   func(b *broker.Broker) { greet(b, f.data, std) },
	}.run(ctx, std)
}

// restart starts this broker again, from any folder, on the same data and ports.
func (f devFlags) restart(b *broker.Broker) string {
	words := []string{self(), "dev", "--data", absolute(f.data), "--api", b.APIAddr(), "--ops", b.OpsAddr()}
	if f.readyFile != "" {
		words = append(words, "--ready-file", absolute(f.readyFile))
	}
	if f.logLevel != "info" {
		words = append(words, "--log-level", f.logLevel)
	}
	return quoteArgs(words...)
}

// command is how a person calls this program: by its name if that finds it, else by its path.
func command() string {
	path := self()
	found, err := exec.LookPath("malachi")
	if err != nil {
		return quoteArg(path)
	}
	a, err1 := os.Stat(path)
	b, err2 := os.Stat(found)
	if err1 == nil && err2 == nil && os.SameFile(a, b) {
		return "malachi"
	}
	return quoteArg(path)
}

// greet prints commands that work when pasted into a shell of this machine.
func greet(b *broker.Broker, data string, std streams) {
	api, ops := "http://"+b.APIAddr(), "http://"+b.OpsAddr()
	m := command()
	if api != defaultServer || os.Getenv("MALACHI_SERVER") != "" {
		m += " --server " + api
	}
	const post = " -H 'Content-Type: application/json' -d "
	say(std.err, `
Malachi %s is ready. Data is in %s.
`, version, absolute(data))
	lines := []string{
		m + " topic create greetings --ranges 4",
		"echo hello | " + m + " produce greetings",
		m + " consume greetings --exit-at-end",
		"",
		"curl -sS " + api + "/malachi.v1.AdminService/CreateTopic" + post + `'{"name":"events"}'`,
		"curl -sS " + api + "/malachi.v1.ProduceService/Produce" + post +
			`'{"topic":"events","records":[{"key":{"text":"u1"},"value":{"json":{"a":1}}}]}'`,
		"curl -sS " + api + "/malachi.v1.FetchService/Fetch" + post + `'{"topic":"events","encoding":"TEXT"}'`,
	}
	if b.Boot() > 1 { // the topics are there already, if these commands were ever used
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "topic create") || strings.Contains(l, "CreateTopic") })
	}
	for _, line := range lines {
		say(std.err, "%s", strings.TrimRight("  "+line, " "))
	}
	say(std.err, "\nOperations: %s/readyz %s/metrics. Stop with Ctrl-C.", ops, ops)
}
