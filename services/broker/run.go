package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"connectrpc.com/grpchealth"
	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

// refreshEvery is how often root is told the journal's last durable group, refreshFirst when for the first time: a copy made at the start is told from
// the original from then on.
const (
	refreshEvery = 30 * time.Second
	refreshFirst = 2 * time.Second
)

// Run serves until ctx ends, then drains: readiness off, streams ended with a reason, calls under way finished within the grace, what was
// journaled written out. It returns nil after a drain, and the failure that ended it otherwise; storage.ErrNewerFormat means exit 78. A storage
// failure does not end it: reads go on.
func (b *Broker) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, b.close()) }()
	health := grpchealth.NewStaticChecker(malachiv1connect.ProduceServiceName, malachiv1connect.FetchServiceName, malachiv1connect.AdminServiceName)
	api := &http.Server{
		Handler:           rpc.Handler(b.services, rpc.Deps{Logger: b.log, Observe: b.telemetry.Call, Health: health}),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		Protocols:         new(http.Protocols),
	}
	api.Protocols.SetHTTP1(true)
	api.Protocols.SetHTTP2(true)
	api.Protocols.SetUnencryptedHTTP2(true) // gRPC without TLS
	ops := &http.Server{Handler: b.opsHandler(), ReadHeaderTimeout: 10 * time.Second}

	// Three circles, ended from the outside in: first the calls, then what serves them, last the store.
	storeCtx, stopStore := context.WithCancel(context.WithoutCancel(ctx))
	defer stopStore()
	storeDone := make(chan error, 1)
	go func() { storeDone <- b.store.Run(storeCtx) }()

	loopsCtx, stopLoops := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLoops()
	loops, loopsCtx := errgroup.WithContext(loopsCtx)
	loops.Go(func() error { return b.coord.Run(loopsCtx) })
	loops.Go(func() error { return b.cp.Run(loopsCtx) })
	loops.Go(func() error { return b.replicas.Run(loopsCtx) })
	loops.Go(func() error { return b.refresh(loopsCtx) })
	loops.Go(func() error { return b.retire(loopsCtx) })
	for _, s := range []struct {
		server *http.Server
		on     net.Listener
	}{{api, rpc.Patient(b.net.public(b.net.api, "api", b.transportDeps()))}, {ops, b.net.public(b.net.ops, "ops", b.transportDeps())}} {
		loops.Go(func() error {
			if err := s.server.Serve(s.on); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve: %w", err)
			}
			return nil
		})
	}
	b.ready.Store(true)

	select {
	case <-ctx.Done():
	case <-loopsCtx.Done(): // something that must run has ended
	case <-b.backgroundCtx.Done():
	}
	b.ready.Store(false)
	for _, s := range []string{"", malachiv1connect.ProduceServiceName, malachiv1connect.FetchServiceName, malachiv1connect.AdminServiceName} {
		health.SetStatus(s, grpchealth.StatusNotServing)
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.cfg.DrainGrace)
	defer cancel()
	b.handOver(grace)
	close(b.closing)
	if err := api.Shutdown(grace); err != nil {
		b.log.Warn("calls under way were cut off", "error", err)
		err = api.Close()
		if err != nil {
			b.log.Warn("close api", "error", err)
		}
	}
	stopLoops()
	if err := ops.Close(); err != nil {
		b.log.Warn("close ops", "error", err)
	}
	err = loops.Wait()
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	stopStore()
	if serr := <-storeDone; serr != nil {
		err = errors.Join(err, serr)
	}
	return errors.Join(err, b.telemetry.Close(context.WithoutCancel(ctx)))
}

// handOver gives what this broker leads to others, while it still serves: at most half of the grace.
func (b *Broker) handOver(ctx context.Context) {
	others := false
	for _, o := range b.brokers() {
		others = others || o.ID != b.self && !o.Absent && !o.Draining
	}
	if !others {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DrainGrace/2)
	defer cancel()
	b.coord.HandOver(ctx)
	if err := b.cp.HandOver(ctx); err != nil {
		b.log.Info("not every metadata group was handed over", "error", err)
	}
}

// refresh tells root how far the journal is, so that a disk which is rolled back is noticed at the next start.
func (b *Broker) refresh(ctx context.Context) error {
	due := time.NewTimer(refreshFirst)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-due.C:
			due.Reset(refreshEvery)
		}
		err := b.cp.Refresh(ctx, b.store.Stats().LastGroup)
		switch {
		case errors.Is(err, storage.ErrFolderRefused):
			return err // another process has this identity: one of the two must stop
		case err != nil && ctx.Err() == nil:
			b.log.Warn("journal group not reported", "error", err)
		}
	}
}

// opsHandler serves the operations port.
func (b *Broker) opsHandler() http.Handler {
	mux := http.NewServeMux()
	answer := func(check func() error) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if err := check(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			if _, err := w.Write([]byte("ok\n")); err != nil {
				b.log.Debug("health answer not sent", "error", err)
			}
		}
	}
	mux.Handle("GET /livez", answer(func() error { return nil })) // a failed disk or a lost quorum is no reason to be killed
	mux.Handle("GET /startupz", answer(b.startedUp))
	mux.Handle("GET /readyz", answer(b.Ready))
	mux.Handle("GET /metrics", b.telemetry.Handler())
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

func (b *Broker) startedUp() error {
	if b.cp.Status().Boot == 0 {
		return errors.New("not registered with the cluster yet")
	}
	return nil
}

// Ready is nil while the broker serves, and else says what it waits for: what /readyz answers. Safe for concurrent use, and before Run.
func (b *Broker) Ready() error {
	st := b.cp.Status()
	switch {
	case !b.ready.Load():
		return errors.New("starting or draining")
	case st.Err != nil:
		return fmt.Errorf("control plane: %w", st.Err)
	case !st.Ready:
		return errors.New("a metadata shard has no leader")
	case b.store.Failed() != nil:
		return errors.New("storage has failed")
	case !b.coord.Settled():
		return errors.New("replicas of the last start are being verified")
	}
	return nil
}
