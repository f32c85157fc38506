package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

func init() {
	extra["malachi"] = func(_, dir string, wrap []string) Target { return &malachiTarget{dir: dir, wrap: wrap} }
}

// malachiTarget runs brokers of this repository: MALACHI_BIN, else malachi on PATH.
type malachiTarget struct {
	dir   string
	wrap  []string
	nodes []*Node
	urls  []string
	admin *client.Client
}

const malachiPort = 15040

// Nodes are the broker processes.
func (t *malachiTarget) Nodes() []*Node { return t.nodes }

// Start founds a cluster of n brokers, with the settings that a person gets who sets none.
func (t *malachiTarget) Start(n int) error {
	bin := os.Getenv("MALACHI_BIN")
	if bin == "" {
		var err error
		if bin, err = exec.LookPath("malachi"); err != nil {
			return err
		}
	}
	port := func(i, k int) string { return fmt.Sprintf("127.0.0.1:%d", malachiPort+100*i+k) }
	var founders []string
	for i := range n {
		founders = append(founders, port(i, 2))
	}
	for i := range n {
		d := filepath.Join(t.dir, fmt.Sprintf("malachi%d", i))
		conf := fmt.Sprintf("data: %q\napi: %s\nops: %s\nrpc: %s\nraft: %s\ngossip: %s\nlog_level: info\n", d, port(i, 0), port(i, 1), port(i, 2), port(i, 3), port(i, 4))
		if n > 1 {
			conf += fmt.Sprintf("bootstrap_expect: %d\nfounders: [%s]\njoin: [%s]\n", n, strings.Join(founders, ", "), strings.Join(founders, ", "))
		} else {
			conf += "bootstrap: true\n"
		}
		if err := os.WriteFile(d+".yaml", []byte(conf), 0o644); err != nil {
			return err
		}
		node := &Node{Dir: d, Args: append(append([]string{}, t.wrap...), bin, "server", "--config", d+".yaml"), Env: []string{"MALACHI_SERVER="}}
		node.Ready = func() error {
			res, err := http.Get("http://" + port(i, 1) + "/readyz")
			if err != nil {
				return err
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				return fmt.Errorf("readyz: %s", res.Status)
			}
			return nil
		}
		t.nodes, t.urls = append(t.nodes, node), append(t.urls, "http://"+port(i, 0))
	}
	for _, nd := range t.nodes {
		if err := nd.Start(); err != nil {
			return err
		}
	}
	for _, nd := range t.nodes {
		if err := nd.WaitReady(30 * time.Second); err != nil {
			return err
		}
	}
	var err error
	t.admin, err = t.client()
	return err
}

func (t *malachiTarget) client() (*client.Client, error) {
	return client.New(client.Config{Servers: t.urls, Compression: client.CompressionNone})
}

// Stop ends the brokers.
func (t *malachiTarget) Stop() {
	for _, n := range t.nodes {
		n.Kill()
	}
}

// CreateTopics makes n topics of one range, as the peers' have one partition.
func (t *malachiTarget) CreateTopics(prefix string, n int) error {
	var wg sync.WaitGroup
	errs := make(chan error, n)
	sem := make(chan struct{}, 16)
	for i := range n {
		name := prefix
		if n > 1 {
			name = fmt.Sprintf("%s%d", prefix, i)
		}
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer wg.Done()
			defer func() { <-sem }()
			if _, err := t.admin.Admin().CreateTopic(context.Background(), &v1.CreateTopicRequest{Name: name}); err != nil {
				errs <- err
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

type malachiProducer struct {
	c     *client.Client
	topic string
}

// NewProducer is a client of its own, as the other targets' producers have a connection of their own.
func (t *malachiTarget) NewProducer(topic string) (Producer, error) {
	c, err := t.client()
	if err != nil {
		return nil, err
	}
	return &malachiProducer{c, topic}, nil
}

// Send implements Producer.
func (p *malachiProducer) Send(b []byte, done func(error)) { p.SendTo(p.topic, b, done) }

// SendTo sends to another topic.
func (p *malachiProducer) SendTo(topic string, b []byte, done func(error)) {
	if err := p.c.ProduceAsync(context.Background(), topic, client.Record{Value: b}, func(r client.Result) { done(r.Err) }); err != nil {
		done(err)
	}
}

// Flush does nothing: without a linger nothing waits.
func (p *malachiProducer) Flush() {}

// Close ends the client.
func (p *malachiProducer) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = p.c.Close(ctx)
}

// Consume reads from the oldest record on.
func (t *malachiTarget) Consume(topic string, f func(p []byte) bool) error {
	c, err := t.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer c.Close(ctx)
	k, err := c.Consume(topic, client.ConsumeConfig{})
	if err != nil {
		return err
	}
	for r, err := range k.Records(ctx) {
		if err != nil {
			return err
		}
		if !f(r.Value) {
			return nil
		}
	}
	return nil
}

// Leader is the primary of the topic's only head.
func (t *malachiTarget) Leader(topic string) (int, error) {
	body := strings.NewReader(fmt.Sprintf(`{"topic":%q}`, topic))
	for i, u := range t.urls {
		res, err := http.Post(u+"/malachi.v1.AdminService/ListSegments", "application/json", body)
		if err != nil {
			return 0, err
		}
		defer res.Body.Close()
		var list struct {
			Segments []struct {
				State    string
				Replicas []string
			}
		}
		if err := json.NewDecoder(res.Body).Decode(&list); err != nil {
			return 0, fmt.Errorf("list segments at node %d: %w", i, err)
		}
		for _, s := range list.Segments {
			if s.State == "OPEN" && len(s.Replicas) > 0 {
				return t.nodeOf(s.Replicas[0])
			}
		}
		return 0, fmt.Errorf("topic %s has no open segment: %+v", topic, list)
	}
	return 0, fmt.Errorf("no node")
}

func (t *malachiTarget) nodeOf(broker string) (int, error) {
	for i, n := range t.nodes {
		b, err := os.ReadFile(filepath.Join(n.Dir, "MALACHI"))
		if err == nil && strings.Contains(string(b), broker) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no node is broker %s", broker)
}
