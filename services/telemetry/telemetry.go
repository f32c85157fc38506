// Package telemetry binds what the broker's parts report to OpenTelemetry instruments and serves them to Prometheus. It is the only package
// that imports the OpenTelemetry SDK. What is recorded is recorded per call and per batch, never per record, and carries no data of users.
package telemetry

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	promexporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/malachilog/malachi/storage/journal"
)

// Gauges are read at every scrape.
type Gauges struct {
	Journal       func() journal.Stats
	StorageFailed func() bool
	DiskFull      func() bool
	Disk          func() (free, total uint64)
	Serving       func() int // open segments served here
	Topics        func() int
	Ready         func() bool
}

// Telemetry holds the instruments. Safe for concurrent use.
type Telemetry struct {
	provider *sdk.MeterProvider
	registry *prometheus.Registry

	calls          metric.Float64Histogram
	produceBatches metric.Int64Counter
	produceRecords metric.Int64Counter
	produceBytes   metric.Int64Counter
	fetchPages     metric.Int64Counter
	fetchRecords   metric.Int64Counter
	fetchBytes     metric.Int64Counter

	options sync.Map // callKey or outcome -> metric.MeasurementOption, so that recording allocates nothing
}

type callKey struct{ procedure, code string }

// New makes the instruments.
func New() (*Telemetry, error) {
	t := &Telemetry{registry: prometheus.NewRegistry()}
	t.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := promexporter.New(promexporter.WithRegisterer(t.registry), promexporter.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("make prometheus exporter: %w", err)
	}
	t.provider = sdk.NewMeterProvider(sdk.WithReader(exporter))
	m := t.provider.Meter("github.com/malachilog/malachi")
	if t.calls, err = m.Float64Histogram("malachi.rpc.duration", metric.WithUnit("s"), metric.WithDescription("Time of one call at the server."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)); err != nil {
		return nil, err
	}
	for _, c := range []struct {
		to         *metric.Int64Counter
		name, unit string
		about      string
	}{
		{&t.produceBatches, "malachi.produce.batches", "{batch}", "Batches that were answered, by outcome."},
		{&t.produceRecords, "malachi.produce.records", "{record}", "Records that were answered, by outcome."},
		{&t.produceBytes, "malachi.produce.bytes", "By", "Bytes of batches that were answered, by outcome."},
		{&t.fetchPages, "malachi.fetch.pages", "{page}", "Pages that were read."},
		{&t.fetchRecords, "malachi.fetch.records", "{record}", "Records that were read."},
		{&t.fetchBytes, "malachi.fetch.bytes", "By", "Bytes that were read."},
	} {
		if *c.to, err = m.Int64Counter(c.name, metric.WithUnit(c.unit), metric.WithDescription(c.about)); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Observe registers the gauges of an open broker. Once.
func (t *Telemetry) Observe(g Gauges) error {
	m := t.provider.Meter("github.com/malachilog/malachi")
	var all []metric.Observable
	var reads []func(metric.Observer)
	counter := func(name, unit, about string, read func() uint64) error {
		c, err := m.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(about))
		all = append(all, c)
		reads = append(reads, func(o metric.Observer) { o.ObserveInt64(c, int64(read())) })
		return err
	}
	gauge := func(name, unit, about string, read func() uint64) error {
		c, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(about))
		all = append(all, c)
		reads = append(reads, func(o metric.Observer) { o.ObserveInt64(c, int64(read())) })
		return err
	}
	flag := func(f func() bool) func() uint64 {
		return func() uint64 {
			if f() {
				return 1
			}
			return 0
		}
	}
	for _, err := range []error{
		counter("malachi.journal.groups", "{group}", "Groups made durable.", func() uint64 { return g.Journal().Groups }),
		counter("malachi.journal.entries", "{entry}", "Entries made durable.", func() uint64 { return g.Journal().Entries }),
		counter("malachi.journal.bytes", "By", "Bytes written to the journal, padding included.", func() uint64 { return g.Journal().Bytes }),
		counter("malachi.journal.barriers", "{barrier}", "Device barriers.", func() uint64 { return g.Journal().Barriers }),
		gauge("malachi.journal.pending", "By", "Bytes journaled and not yet in segment files.", func() uint64 { return uint64(max(g.Journal().Pending, 0)) }),
		gauge("malachi.journal.files_in_use", "{file}", "Journal files that a restart would replay.", func() uint64 { return uint64(g.Journal().FilesInUse) }),
		gauge("malachi.storage.failed", "1", "1 after the first failed write or sync.", flag(g.StorageFailed)),
		gauge("malachi.disk.full", "1", "1 while less than the reserve is free.", flag(g.DiskFull)),
		gauge("malachi.disk.free", "By", "Free bytes.", func() uint64 { free, _ := g.Disk(); return free }),
		gauge("malachi.segments.serving", "{segment}", "Open segments served here.", func() uint64 { return uint64(g.Serving()) }),
		gauge("malachi.topics", "{topic}", "Topics of the vnodes led here.", func() uint64 { return uint64(g.Topics()) }),
		gauge("malachi.ready", "1", "1 when the broker is ready.", flag(g.Ready)),
	} {
		if err != nil {
			return fmt.Errorf("make gauge: %w", err)
		}
	}
	_, err := m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, r := range reads {
			r(o)
		}
		return nil
	}, all...)
	return err
}

// Call records one call.
func (t *Telemetry) Call(procedure, code string, took time.Duration) {
	key := callKey{procedure, code}
	o, ok := t.options.Load(key)
	if !ok {
		o, _ = t.options.LoadOrStore(key, metric.WithAttributeSet(attribute.NewSet(
			attribute.String("rpc.method", procedure), attribute.String("rpc.connect_rpc.error_code", code))))
	}
	t.calls.Record(context.Background(), took.Seconds(), o.(metric.MeasurementOption))
}

// Produced records one answered batch.
func (t *Telemetry) Produced(records, bytes int, outcome string) {
	o, ok := t.options.Load(outcome)
	if !ok {
		o, _ = t.options.LoadOrStore(outcome, metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", outcome))))
	}
	opt := o.(metric.MeasurementOption)
	t.produceBatches.Add(context.Background(), 1, opt)
	t.produceRecords.Add(context.Background(), int64(records), opt)
	t.produceBytes.Add(context.Background(), int64(bytes), opt)
}

// Fetched records one page.
func (t *Telemetry) Fetched(records, bytes int) {
	t.fetchPages.Add(context.Background(), 1)
	t.fetchRecords.Add(context.Background(), int64(records))
	t.fetchBytes.Add(context.Background(), int64(bytes))
}

// Handler serves the Prometheus text format.
func (t *Telemetry) Handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{})
}

// Close ends the provider.
func (t *Telemetry) Close(ctx context.Context) error { return t.provider.Shutdown(ctx) }
