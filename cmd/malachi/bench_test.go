package main

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/malachilog/malachi/client/clienttest"
	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

func runBenchLine(t *testing.T, args ...string) (code int, out, diag string) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(t.Context(), append([]string{"bench"}, args...), streams{in: strings.NewReader(""), out: &o, err: &e})
	return code, o.String(), e.String()
}

func TestBenchReportsAndExitsWithNothingWrong(t *testing.T) {
	s := clienttest.Start(t)
	code, out, diag := runBenchLine(t, "--server", s.URL(), "--ops", s.OpsURL(), "--records", "200", "--batch", "10", "--no-floor", "-o", "json")
	if code != exitOK || !strings.Contains(out, `"outcome": "ok"`) || !strings.Contains(out, `"recordsPerSecond"`) {
		t.Errorf("exit %d, stdout %s, stderr %s", code, out, diag)
	}
}

// A run in which a call fails exits with 8 and shows no rate.
func TestBenchWithAnErrorExitsWith8(t *testing.T) {
	inv.Covers(t, "INV-H3")
	s := clienttest.Start(t)
	to, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	var calls atomic.Int64
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == malachiv1connect.ProduceServiceProduceProcedure && calls.Add(1) == 5 {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	for _, output := range []string{"table", "json"} {
		calls.Store(0)
		code, out, diag := runBenchLine(t, "--server", front.URL, "--records", "500", "--batch", "10", "--no-floor", "-o", output)
		if code != exitCheck || !strings.Contains(out, "FAILED") || strings.Contains(out, "records/s, ") || strings.Contains(out, "PerSecond") {
			t.Errorf("exit %d, stdout %s, stderr %s", code, out, diag)
		}
	}
}

func TestBenchWithoutABrokerIsUnavailable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if code, out, diag := runBenchLine(t, "--server", addr, "--no-floor"); code != exitUnavailable || out != "" {
		t.Errorf("exit %d, stdout %s, stderr %s", code, out, diag)
	}
}

func TestBenchRefusesWhatItCannotDo(t *testing.T) {
	for _, args := range [][]string{
		{"--rate", "fast"}, {"--rate", "-1"}, {"--record-bytes", "3"}, {"--ranges", "3"}, {"--batch", "10", "--in-flight", "2"}, {"-o", "xml"},
		{"--ops", "http://127.0.0.1:1"}, {"suite", "--only", "everything"}, {"--compression", "rar"},
	} {
		if code, out, diag := runBenchLine(t, args...); code != exitUsage || out != "" {
			t.Errorf("%v: exit %d, stdout %s, stderr %s", args, code, out, diag)
		}
	}
}
