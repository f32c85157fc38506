package rpc

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sync/semaphore"
)

func TestScratchIsBoundedAndGivenBack(t *testing.T) {
	budget := semaphore.NewWeighted(100)
	ctx, held := withScratch(context.Background(), budget)
	if b := Scratch(ctx, 30); len(b) != 30 {
		t.Fatalf("%d bytes", len(b))
	}
	if Scratch(ctx, 30) != nil {
		t.Fatal("two times 60 of 100 were given")
	}
	Sent(ctx)
	if b := Scratch(ctx, 50); len(b) != 50 {
		t.Error("what was sent is not given back")
	}
	held.release()
	if !budget.TryAcquire(100) {
		t.Error("what the call held is not given back")
	}
	if b := Scratch(context.Background(), 5); len(b) != 5 {
		t.Error("outside of a call")
	}
}

// TestSilentPeersAreGivenUp: a body that stops coming and an answer that nobody reads end with an error, by a clock that the test owns.
func TestSilentPeersAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		if _, err := (patientConn{near}).Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("nobody reads, and the write says %v", err)
		}
	})
	read := make(chan error, 1)
	server := httptest.NewServer(patientBodies(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b := r.Body.(*patientBody)
		_, err := b.Read(make([]byte, 100))
		if err != nil && !errors.Is(err, io.EOF) || b.until.IsZero() {
			read <- errors.New("a body without a deadline")
			return
		}
		_, err = io.ReadAll(r.Body)
		read <- err
	})))
	defer server.Close()
	res, err := http.Post(server.URL, "text/plain", strings.NewReader(strings.Repeat("x", 1000)))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if err := <-read; err != nil {
		t.Error(err)
	}
}
