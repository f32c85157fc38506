// Package bench is Malachi's load generator: it writes records to a broker, reads every one back, and reports how fast that went, only
// if everything acknowledged was there, once, unchanged and in order per key.
//
// A Bench is used once, by one goroutine; Run owns every goroutine it starts and returns after the last has left. Nothing is kept on
// disk. Suite runs the project's speed targets one after another, each against a broker process of its own.
package bench

import (
	"errors"
	"fmt"
	"time"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// Config is one run. Zero values stand for the defaults.
type Config struct {
	// Server is the base URL of the broker's API. Required.
	Server string
	// Ops is the base URL of its operations port, for the broker's own counters. Empty: the report has none.
	Ops string
	// RecordBytes is the size of a record's key and value together; at least MinRecordBytes; 0 means 1024.
	RecordBytes int
	// Batch is the number of records per explicit batch, which is a request of its own; a producer has one under way. 0: the SDK makes
	// the batches, as in any program.
	Batch int
	// InFlight bounds the records that one producer has under way when the SDK makes the batches; 1 is one record at a time. 0: only the
	// SDK's buffer bounds it.
	InFlight int
	// Producers are streams of records, each with keys of its own; 0 means 1.
	Producers int
	// Keys is the number of keys of a producer; 0 means 16.
	Keys int
	// Topics are written in turn by each producer; 0 means 1.
	Topics int
	// Ranges is the number of ranges of a topic, a power of two; 0 means 1.
	Ranges int
	// Consumers read every topic while it is written. Whatever their number, everything is verified.
	Consumers int
	// Duration ends the writing; 0 means 10 s.
	Duration time.Duration
	// Records ends the writing after so many records, rounded up to whole batches. 0: only Duration does.
	Records int64
	// Rate is records a second over all producers, sent on time whatever the answers do (open loop): a latency begins when its record was
	// due. 0: each producer sends the next when it may (closed loop).
	Rate float64
	// Compression is none, s2 or zstd; empty means none. With none the values are random bytes, else words that shrink about threefold.
	Compression string
	// ReadPass reads everything once more after the verification, counting only, to tell how fast the SDK reads what was just written.
	ReadPass bool
	// Prefix begins the topics' names; empty means "bench".
	Prefix string
	// Keep leaves the topics there.
	Keep bool
}

const (
	// MinRecordBytes holds a key and what a value says of itself.
	MinRecordBytes = keyBytes + stampBytes

	maxProducers = 1024
	maxKeys      = 1 << 20
	maxTopics    = 10_000
	maxReaders   = 4096
)

func (c Config) withDefaults() Config {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.RecordBytes, 1024)
	def(&c.Producers, 1)
	def(&c.Keys, 16)
	def(&c.Topics, 1)
	def(&c.Ranges, 1)
	if c.Duration == 0 {
		c.Duration = 10 * time.Second
	}
	if c.Compression == "" {
		c.Compression = batch.CodecNone.String()
	}
	if c.Prefix == "" {
		c.Prefix = "bench"
	}
	return c
}

// Validate reports every fault at once, each wrapping storage.ErrInvalid.
func (c Config) Validate() error {
	c = c.withDefaults()
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf(format+": %w", append(args, storage.ErrInvalid)...))
	}
	within := func(name string, v, low, high int) {
		if v < low || v > high {
			fault("%s is %d, want %d to %d", name, v, low, high)
		}
	}
	if c.Server == "" {
		fault("no server")
	}
	within("record-bytes", c.RecordBytes, MinRecordBytes, storage.MaxRecordBytes)
	within("batch", c.Batch, 0, storage.MaxBatchRecords)
	within("in-flight", c.InFlight, 0, 1_000_000)
	within("producers", c.Producers, 1, maxProducers)
	within("keys", c.Keys, 1, maxKeys)
	within("topics", c.Topics, 1, maxTopics)
	within("ranges", c.Ranges, 1, storage.MaxInitialRanges)
	within("consumers", c.Consumers, 0, maxReaders/min(c.Topics, maxReaders))
	if c.Ranges&(c.Ranges-1) != 0 {
		fault("ranges is %d, want a power of two", c.Ranges)
	}
	if c.Duration < 0 || c.Records < 0 || c.Rate < 0 {
		fault("duration, records and rate are not below zero")
	}
	if c.Batch > 0 && c.InFlight > 0 {
		fault("in-flight is for batches that the SDK makes; a producer of explicit batches has one under way")
	}
	if n := c.Batch * (c.RecordBytes + 64); n > storage.MaxBatchBytes {
		fault("a batch of %d records of %d bytes is above the limit of %d bytes", c.Batch, c.RecordBytes, storage.MaxBatchBytes)
	}
	if n := c.Producers * c.Topics * c.Keys; n > 1<<26 {
		fault("producers x topics x keys is %d, want at most %d", n, 1<<26)
	}
	if _, err := batch.ParseCodec(c.Compression); err != nil {
		fault("compression is %.40q, want none, s2 or zstd", c.Compression)
	}
	return errors.Join(faults...)
}
