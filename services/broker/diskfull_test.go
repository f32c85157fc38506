package broker_test

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"os"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"golang.org/x/sys/unix"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

// smallDisk is a file system of so many bytes. Mounting needs root; under CI=true the test fails without it.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("mount a small disk: %v", err)
		}
		t.Skipf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// TestDiskFull fills a real file system: the error is clear and retryable, what was acknowledged is read back while the disk is full and after a
// restart, and when a topic is deleted appends go on.
func TestDiskFull(t *testing.T) {
	inv.Covers(t, "INV-R7")
	cfg := config(smallDisk(t, "320m"))
	cfg.RaftDir = t.TempDir()
	cfg.DiskReserve = 32 << 20
	c, stop := serve(t, cfg)
	defer func() { stop() }()
	for _, name := range []string{"t", "ballast"} {
		if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	raw := func() malachiv1connect.ProduceServiceClient {
		st, err := c.Admin().GetClusterStatus(t.Context(), &v1.GetClusterStatusRequest{})
		if err != nil || st.GetBrokers()[0].GetState() == "storage_failed" {
			t.Fatalf("%v, %v", st, err)
		}
		return malachiv1connect.NewProduceServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, apiURL(t, c))))
	}
	const size = 256 << 10
	value := bytes.Repeat([]byte("x"), size)
	put := func(topic string, n int) error {
		binary.BigEndian.PutUint32(value, uint32(n))
		res, err := raw().Produce(t.Context(), &v1.ProduceRequest{Topic: topic, Records: []*v1.Record{{
			Key: &v1.Payload{Form: &v1.Payload_Text{Text: "k"}}, Value: &v1.Payload{Form: &v1.Payload_Data{Data: value}},
		}}})
		if err == nil && res.GetResults()[0].GetError() != nil {
			t.Fatalf("one record, and the call did not fail: %v", res)
		}
		return err
	}
	if err := put("ballast", 0); err != nil {
		t.Fatal(err)
	}
	for n := range 200 { // 50 MB that will make room again
		if err := put("ballast", n); err != nil {
			t.Fatal(err)
		}
	}
	written, full := 0, false
	for !full {
		err := put("t", written)
		switch e := client.AsError("produce", err); {
		case err == nil:
			written++
		case e.Reason == v1.Reason_DISK_FULL && e.Code == connect.CodeResourceExhausted && e.RetryDelay > 0 && !e.OutcomeUnknown:
			full = true
		case e.Reason == v1.Reason_OVERLOADED: // the journal waits for a checkpoint
		default:
			t.Fatalf("after %d records: %v", written, err)
		}
		if written > 2000 {
			t.Fatal("320 MB never filled: the fault did not happen")
		}
	}
	readAll(t, c, written, size)
	stop()
	c, stop = serve(t, cfg)
	readAll(t, c, written, size)
	if _, err := c.Admin().DeleteTopic(t.Context(), &v1.DeleteTopicRequest{Name: "ballast"}); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := put("t", written)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("there is room again, and still: %v", err)
		}
	}
	readAll(t, c, written+1, size)
}
