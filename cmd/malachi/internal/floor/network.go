package floor

import (
	"context"
	"errors"
	"io"
	"net"
	"time"
)

const (
	requestBytes = 1 << 10
	answerBytes  = 16
	streamBytes  = 256 << 10
)

func (f *Floor) network(ctx context.Context, part time.Duration) (err error) {
	if f.RoundTrip, err = roundTrip(ctx, part); err != nil {
		return err
	}
	f.LoopbackMBps, err = streaming(ctx, part)
	return err
}

// pair connects two ends over loopback, runs server on one and client on the other, and returns when both have ended.
func pair(ctx context.Context, server, client func(net.Conn) error) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = errors.Join(server(c), c.Close())
		}
		served <- err
	}()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return errors.Join(err, l.Close(), <-served)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) }) // the error that follows says it
	defer stop()
	err = client(c)
	return errors.Join(err, c.Close(), <-served, l.Close())
}

func roundTrip(ctx context.Context, part time.Duration) (time.Duration, error) {
	var took []time.Duration
	err := pair(ctx, func(c net.Conn) error {
		b := make([]byte, requestBytes)
		for {
			if _, err := io.ReadFull(c, b); err != nil {
				return ended(err)
			}
			if _, err := c.Write(b[:answerBytes]); err != nil {
				return err
			}
		}
	}, func(c net.Conn) error {
		b := make([]byte, requestBytes)
		began := time.Now()
		for time.Since(began) < part || len(took) < 100 {
			at := time.Now()
			if _, err := c.Write(b); err != nil {
				return err
			}
			if _, err := io.ReadFull(c, b[:answerBytes]); err != nil {
				return err
			}
			took = append(took, time.Since(at))
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return median(took), nil
}

func streaming(ctx context.Context, part time.Duration) (float64, error) {
	var sent int
	var spent time.Duration
	err := pair(ctx, func(c net.Conn) error {
		b := make([]byte, streamBytes)
		for {
			if _, err := c.Read(b); err != nil {
				return ended(err)
			}
		}
	}, func(c net.Conn) error {
		b := make([]byte, streamBytes)
		began := time.Now()
		for spent = 0; spent < part; spent = time.Since(began) {
			n, err := c.Write(b)
			if err != nil {
				return err
			}
			sent += n
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return float64(sent) / spent.Seconds() / 1e6, nil
}

// ended: the other end has closed, as it should.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
