package client_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/client/clienttest"
	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// open starts a broker in this process with the topic "orders" and connects to it.
func open(ctx context.Context) (c *client.Client, done func()) {
	folder, err := os.MkdirTemp("", "malachi")
	if err != nil {
		log.Fatal(err)
	}
	server, err := clienttest.Open(folder, slog.New(slog.DiscardHandler))
	if err != nil {
		log.Fatal(err)
	}
	c, err = client.New(client.Config{Servers: []string{server.URL()}})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Admin().CreateTopic(ctx, &malachiv1.CreateTopicRequest{Name: "orders"}); err != nil {
		log.Fatal(err)
	}
	return c, func() {
		if err := c.Close(ctx); err != nil {
			log.Fatal(err)
		}
		if err := server.Stop(); err != nil {
			log.Fatal(err)
		}
		if err := os.RemoveAll(folder); err != nil {
			log.Fatal(err)
		}
	}
}

func ExampleClient_Produce() {
	ctx := context.Background()
	c, done := open(ctx)
	defer done()

	err := c.Produce(ctx, "orders", client.Record{Key: []byte("u1"), Value: []byte("paid"), Headers: []client.Header{{Key: "h", Value: []byte("x")}}})
	fmt.Println(err)
	// Output: <nil>
}

func ExampleClient_ProduceAsync() {
	ctx := context.Background()
	c, done := open(ctx)
	defer done()

	written := make(chan error, 10)
	for i := range 10 {
		err := c.ProduceAsync(ctx, "orders", client.Record{Key: []byte("u1"), Value: fmt.Append(nil, i)}, func(r client.Result) { written <- r.Err })
		if err != nil {
			log.Fatal(err)
		}
	}
	if err := c.Flush(ctx); err != nil {
		log.Fatal(err)
	}
	for range 10 {
		if err := <-written; err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println("done")
	// Output: done
}

func ExampleConsumer_Records() {
	ctx := context.Background()
	c, done := open(ctx)
	defer done()
	for _, v := range []string{"one", "two", "three"} {
		if err := c.Produce(ctx, "orders", client.Record{Key: []byte("u1"), Value: []byte(v)}); err != nil {
			log.Fatal(err)
		}
	}

	consumer, err := c.Consume("orders", client.ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		log.Fatal(err)
	}
	for record, err := range consumer.Records(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(record.Value))
		if string(record.Value) == "two" {
			break
		}
	}
	// Another consumer, perhaps another process, goes on where this one stopped.
	next, err := c.Consume("orders", client.ConsumeConfig{From: client.Cursor(consumer.Cursor()), ExitAtEnd: true})
	if err != nil {
		log.Fatal(err)
	}
	for record, err := range next.Records(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("then", string(record.Value))
	}
	// Output:
	// one
	// two
	// then three
}
