package fetch

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/rangelog"

	"github.com/malachilog/malachi/e2e/inv"
)

// fakes stand for metadata and replicas: one topic of one range with one open segment.
type fakes struct {
	topic     *metadata.Topic
	committed storage.End
	broken    error // what Committed answers instead
	written   storage.End
	readErr   error
	watchers  []chan<- struct{}
	batches   []rangelog.Batch
}

func (f *fakes) CachedTopic(name string) (*metadata.Topic, bool) {
	return f.topic, f.topic != nil && name == f.topic.Name
}
func (f *fakes) CachedTopicByUID(storage.TopicUID) (*metadata.Topic, bool) {
	return f.topic, f.topic != nil
}
func (f *fakes) Topic(context.Context, string) (*metadata.Topic, error) {
	if f.topic == nil {
		return nil, storage.ErrUnavailable
	}
	return f.topic, nil
}
func (f *fakes) Changed(storage.TopicUID) (<-chan struct{}, func()) { return nil, func() {} }
func (f *fakes) Committed(context.Context, *metadata.Segment) (storage.End, error) {
	return f.committed, f.broken
}
func (f *fakes) Latest(context.Context, *metadata.Segment) (storage.End, error) {
	return f.committed, f.broken
}
func (f *fakes) OffsetAt(context.Context, *metadata.Segment, storage.Time) (storage.Offset, error) {
	return 0, f.readErr
}
func (f *fakes) Watch(_ *metadata.Segment, _ storage.End, c chan<- struct{}) func() {
	f.watchers = append(f.watchers, c)
	return func() {}
}
func (f *fakes) Read(_ context.Context, seg *metadata.Segment, from storage.Offset, _ int, _ func(int) []byte) (out []rangelog.Batch, limit storage.End, err error) {
	if limit = seg.End; seg.State == metadata.SegmentOpen {
		limit, err = f.committed, f.broken
	}
	if err == nil {
		err = f.readErr
	}
	if err != nil || !limit.Holds(from) {
		return out, limit, err
	}
	for _, b := range f.batches {
		if b.Header.End() > storage.EndBefore(from) && b.Header.End() <= min(limit, f.written) {
			out = append(out, b)
		}
	}
	return out, limit, nil
}

func newFakes(t *testing.T) *fakes {
	t.Helper()
	m := metadata.New(storage.CurrentLevel)
	apply := func(c metadata.Command) metadata.Result {
		b, err := metadata.Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		r, err := m.Apply(b)
		if err != nil || r.Outcome != metadata.OutcomeOK {
			t.Fatalf("%T: %+v, %v", c, r, err)
		}
		return r
	}
	apply(&metadata.InitVnode{Cluster: storage.ClusterID{1}, RingVersion: 1, Arcs: []metadata.Arc{{First: 0, Last: ^uint64(0)}}})
	apply(&metadata.CreateTopic{Nonce: metadata.Nonce{1}, UID: storage.TopicUID{1}, Name: "t", InitialRanges: 1, Time: 1})
	apply(&metadata.OpenSegment{
		TopicName: "t", Topic: storage.TopicUID{1}, Range: storage.RangeID{Topic: storage.TopicUID{1}}, Nonce: metadata.Nonce{2},
		Replicas: []storage.BrokerID{1}, Quorum: 1, ReplicationFactor: 1, PrimaryBoot: 1, Header: []byte("h"), Time: 1,
	})
	topic, outcome := m.View().Topic("t")
	if outcome != metadata.OutcomeOK {
		t.Fatal(outcome)
	}
	return &fakes{topic: topic}
}

// add puts a batch of n records into the segment; committed and written follow by hand.
func (f *fakes) add(t *testing.T, n int) {
	t.Helper()
	base := storage.Offset(0)
	if len(f.batches) > 0 {
		base = f.batches[len(f.batches)-1].Header.End().Next()
	}
	var b batch.Builder
	for i := range n {
		if err := b.Add(&batch.Record{Value: fmt.Appendf(nil, "%d", int(base)+i)}, 0); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := b.Build(nil, batch.Options{})
	if err != nil {
		t.Fatal(err)
	}
	batch.Stamp(raw, base, 1, storage.Slice{})
	h, err := batch.ParseHeader(raw)
	if err != nil {
		t.Fatal(err)
	}
	f.batches = append(f.batches, rangelog.Batch{Header: h, Data: raw})
}

func (f *fakes) service() *Service {
	return New(Deps{Topics: f, Replicas: f, Blocked: func(storage.RangeID) string { return "votes" }, Closing: make(chan struct{})})
}

func reasonOf(err error) v1.Reason {
	_, _, d, _ := rpc.Describe(err)
	return d.GetReason()
}

// TestBlockedRangeIsAnError: what can't be read now is UNAVAILABLE within the deadline, never an empty page and never a hang.
func TestBlockedRangeIsAnError(t *testing.T) {
	inv.Covers(t, "INV-C1", "INV-C10")
	for _, wait := range []int32{0, 500, 60_000} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakes(t)
			f.broken = storage.ErrStaleRoute
			began := time.Now()
			page, err := f.service().Fetch(t.Context(), &v1.FetchRequest{Topic: "t", WaitMs: wait})
			if err == nil || reasonOf(err) != v1.Reason_RANGE_BLOCKED {
				t.Fatalf("wait %d: %v, %v", wait, page, err)
			}
			if took, most := time.Since(began), time.Duration(wait)*time.Millisecond+grace; took > most {
				t.Errorf("wait %d: it took %v", wait, took)
			}
		})
	}
}

// TestCommittedButNotWritten: a record that is committed and not yet in the file is waited for, not left out.
func TestCommittedButNotWritten(t *testing.T) {
	inv.Covers(t, "INV-C8")
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		f.add(t, 2)
		f.add(t, 2)
		f.committed = 2
		got := make(chan *v1.FetchResponse, 1)
		go func() {
			page, err := f.service().Fetch(t.Context(), &v1.FetchRequest{Topic: "t"})
			if err != nil {
				t.Error(err)
			}
			got <- page
		}()
		synctest.Wait()
		if len(got) > 0 {
			t.Fatal("it answered before the record was in the file")
		}
		f.written = 4 // the follower has given both, but only the first is committed
		for _, c := range f.watchers {
			select {
			case c <- struct{}{}:
			default:
			}
		}
		if page := <-got; len(page.GetRecords()) != 2 {
			t.Errorf("%d records: an uncommitted record was read, or a committed one left out", len(page.GetRecords()))
		}
	})
}

// TestTailIsClaimedOnlyWhenKnown: not while metadata or the primary do not answer, and not where records follow.
func TestTailIsClaimedOnlyWhenKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		s := f.service()
		page, err := s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", WantAtTail: true})
		if err != nil || page.AtTail == nil || !page.GetAtTail() {
			t.Errorf("an empty topic: %v, %v", page, err)
		}
		if page, err = s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t"}); err != nil || page.AtTail != nil {
			t.Errorf("told unasked: %v, %v", page, err)
		}
		f.add(t, 1)
		f.committed, f.written = 1, 1
		if page, err = s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", WantAtTail: true}); err != nil || page.AtTail != nil || len(page.GetRecords()) != 1 {
			t.Errorf("with a record: %v, %v", page, err)
		}
		f.broken = storage.ErrStaleRoute
		if _, err := s.GetCursor(t.Context(), &v1.GetCursorRequest{Topic: "t", Start: &v1.StartPosition{At: &v1.StartPosition_Latest{Latest: true}}}); reasonOf(err) != v1.Reason_RANGE_BLOCKED {
			t.Errorf("latest without the primary's answer: %v", err)
		}
	})
}

func TestBeyondEndNamesTheNearestCursor(t *testing.T) {
	f := newFakes(t)
	f.add(t, 5)
	f.committed, f.written = 5, 5
	s := f.service()
	page, err := s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t"})
	if err != nil || len(page.GetRecords()) != 5 {
		t.Fatal(page, err)
	}
	f.committed, f.written = 3, 3 // another cluster of the same name, a forged cursor, a lost disk
	_, err = s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: page.GetCursor()})
	var e *rpc.Error
	if !errors.As(err, &e) || e.Reason != v1.Reason_BEYOND_END || e.Metadata["nearest_cursor"] == "" {
		t.Fatalf("beyond the end: %v", err)
	}
	if page, err := s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: e.Metadata["nearest_cursor"]}); err != nil || len(page.GetRecords()) != 0 {
		t.Errorf("the nearest cursor: %v, %v", page, err)
	}
}

// TestPagesCutBatches: pages smaller than a batch give each record once; RAW gives whole batches and says what to skip.
func TestPagesCutBatches(t *testing.T) {
	inv.Covers(t, "INV-C9")
	f := newFakes(t)
	f.add(t, 7)
	f.add(t, 3)
	f.committed, f.written = 10, 10
	s := f.service()
	cursor, next := "", 0
	for next < 10 {
		page, err := s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: cursor, MaxRecords: 4, Encoding: v1.Encoding_TEXT})
		if err != nil || len(page.GetRecords()) == 0 {
			t.Fatal(page, err)
		}
		for _, r := range page.GetRecords() {
			if r.GetValue().GetText() != fmt.Sprint(next) {
				t.Fatalf("record %s where %d is due", r.GetValue().GetText(), next)
			}
			next++
		}
		if next == 4 {
			raw, err := s.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: page.GetCursor(), Encoding: v1.Encoding_RAW})
			if err != nil || len(raw.GetBatches()) != 2 || raw.GetBatches()[0].GetSkipRecords() != 4 || raw.GetBatches()[1].GetSkipRecords() != 0 {
				t.Fatalf("RAW from the middle of a batch: %v, %v", raw, err)
			}
		}
		cursor = page.GetCursor()
	}
}

// TestDamageIsTold: a batch that does not verify is a typed error, and what was read before it is delivered first.
func TestDamageIsTold(t *testing.T) {
	f := newFakes(t)
	f.add(t, 1)
	f.committed, f.written = 1, 1
	f.batches[0].Data[len(f.batches[0].Data)-1] ^= 1
	if _, err := f.service().Fetch(t.Context(), &v1.FetchRequest{Topic: "t"}); reasonOf(err) != v1.Reason_DATA_CORRUPT {
		t.Errorf("a flipped bit: %v", err)
	}
	f.readErr = fmt.Errorf("read: %w", storage.ErrDamaged)
	if _, err := f.service().Fetch(t.Context(), &v1.FetchRequest{Topic: "t"}); reasonOf(err) != v1.Reason_DATA_CORRUPT {
		t.Errorf("a damaged replica: %v", err)
	}
}
