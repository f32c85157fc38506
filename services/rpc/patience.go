package rpc

import (
	"io"
	"net"
	"net/http"
	"time"
)

// A peer that makes no progress for so long is given up: a body that stops coming, an answer that nobody reads.
const (
	bodyPatience  = 30 * time.Second
	writePatience = 30 * time.Second
	// writePiece is how much of an answer must be taken within writePatience.
	writePiece = 256 << 10
)

// Patient wraps a listener so that a write to a peer that does not read fails in time.
func Patient(l net.Listener) net.Listener { return patientListener{l} }

type patientListener struct{ net.Listener }

// Accept implements net.Listener.
func (l patientListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return patientConn{c}, nil
}

type patientConn struct{ net.Conn }

// Write implements net.Conn.
func (c patientConn) Write(b []byte) (n int, err error) {
	for first := true; first || len(b) > 0; first = false {
		piece := b[:min(len(b), writePiece)]
		if err := c.SetWriteDeadline(time.Now().Add(writePatience)); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(piece)
		n += m
		if err != nil {
			return n, err
		}
		b = b[m:]
	}
	return n, nil
}

// patientBodies wraps a handler so that a body which stops coming fails in time.
func patientBodies(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
			r.Body = &patientBody{r.Body, http.NewResponseController(w), time.Time{}}
		}
		h.ServeHTTP(w, r)
	})
}

type patientBody struct {
	io.ReadCloser
	control *http.ResponseController
	until   time.Time
}

// Read implements io.Reader.
func (b *patientBody) Read(p []byte) (int, error) {
	// A deadline costs little, but a body comes in many pieces: it is moved when half of it is used up.
	if now := time.Now(); b.until.Sub(now) < bodyPatience/2 {
		b.until = now.Add(bodyPatience)
		if err := b.control.SetReadDeadline(b.until); err != nil {
			return 0, err
		}
	}
	n, err := b.ReadCloser.Read(p)
	if err != nil { // the end, or a failure: what comes later on this connection has its own time
		if clearErr := b.control.SetReadDeadline(time.Time{}); clearErr != nil && err == io.EOF {
			return n, clearErr
		}
	}
	return n, err
}
