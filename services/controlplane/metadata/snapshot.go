package metadata

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// A snapshot is a sequence of frames: one byte of kind, four of length (little endian), the payload. First the header, then each
// topic by uid, followed by its ranges by id, each followed by its segments by seq; then the tombstones by uid; last an end frame
// with the CRC32C of all bytes before it. Equal states make equal bytes. The level stands in the first frame, so that an older
// process stops before it reads anything that it might misread.
const (
	frameHeader    = 1
	frameTopic     = 2
	frameRange     = 3
	frameSegments  = 4
	frameTombstone = 5
	frameEnd       = 6

	frameSegmentBytes = 256 << 10 // a frame of segments is closed at this size
	maxFrame          = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// frameWriter writes frames and sums them. The first error sticks.
type frameWriter struct {
	w   *bufio.Writer
	sum hash.Hash32
	err error
}

func (w *frameWriter) frame(kind byte, m proto.Message) {
	b, err := deterministic.Marshal(m)
	if err != nil {
		w.fail(err)
		return
	}
	w.raw(kind, b)
}

func (w *frameWriter) raw(kind byte, b []byte) {
	if w.err != nil {
		return
	}
	head := binary.LittleEndian.AppendUint32([]byte{kind}, uint32(len(b)))
	for _, p := range [][]byte{head, b} {
		_, _ = w.sum.Write(p)
		_, err := w.w.Write(p)
		w.fail(err)
	}
}

func (w *frameWriter) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// WriteSnapshot writes the view. Equal states write equal bytes.
func (v *View) WriteSnapshot(out io.Writer) error {
	st := &v.st
	w := &frameWriter{w: bufio.NewWriterSize(out, 64<<10), sum: crc32.New(castagnoli)}
	h := &intrav1.MetadataSnapshotHeader{Level: uint32(st.level), Vnode: st.vnode, RingVersion: st.ringVersion,
		Arcs: arcsToProto(st.arcs), Topics: uint64(st.byUID.Len()), Tombstones: uint64(st.tombs.Len())}
	if !st.cluster.IsZero() {
		h.ClusterId = st.cluster[:]
	}
	w.frame(frameHeader, h)
	st.byUID.Ascend(func(e uidEntry) bool {
		w.topic(e.topic)
		return w.err == nil
	})
	st.tombs.Ascend(func(e tombEntry) bool {
		t := e.tomb
		w.frame(frameTombstone, &intrav1.TombstoneRecord{Uid: t.UID[:], Name: t.Name, Nonce: t.Nonce[:], DeleteNonce: t.DeleteNonce[:],
			DeleteTime: int64(t.DeleteTime), MetaVersion: t.MetaVersion})
		return w.err == nil
	})
	w.raw(frameEnd, binary.LittleEndian.AppendUint32(nil, w.sum.Sum32()))
	if w.err == nil {
		w.err = w.w.Flush()
	}
	if w.err != nil {
		return fmt.Errorf("write metadata snapshot: %w", w.err)
	}
	return nil
}

func (w *frameWriter) topic(t *Topic) {
	p := &intrav1.TopicRecord{Uid: t.UID[:], Name: t.Name, Nonce: t.Nonce[:], CreateTime: int64(t.CreateTime),
		Labels: labelsToProto(t.Labels), DeletionProtection: t.DeletionProtection, InitialRanges: uint32(t.InitialRanges),
		MetaVersion: t.MetaVersion, State: intrav1.TopicState(t.State), DeleteTime: int64(t.DeleteTime),
		Ranges: uint32(len(t.ranges)), CreatedWith: t.createdWith}
	if !t.DeleteNonce.IsZero() {
		p.DeleteNonce = t.DeleteNonce[:]
	}
	for _, u := range t.updates {
		p.Updates = append(p.Updates, &intrav1.AppliedUpdate{Nonce: u.nonce[:], MetaVersion: u.version})
	}
	w.frame(frameTopic, p)
	for _, r := range t.ranges {
		rr := &intrav1.RangeRecord{Timeline: uint64(r.ID.Timeline), Seq: r.ID.Seq, SlicePrefix: r.Slice.Prefix,
			SliceDepth: uint32(r.Slice.Depth), State: intrav1.RangeState(r.State), NextSegment: r.NextSegment, Start: uint64(r.Start),
			SealedEnd: uint64(r.SealedEnd), Segments: uint32(r.Len())}
		for _, pa := range r.Parents {
			rr.Parents = append(rr.Parents, &intrav1.RangeParent{Range: rangeKey(pa.Range), SlicePrefix: pa.Slice.Prefix,
				SliceDepth: uint32(pa.Slice.Depth), End: uint64(pa.End)})
		}
		w.frame(frameRange, rr)
		w.segments(r)
	}
}

func (w *frameWriter) segments(r *Range) {
	chunk, size := &intrav1.SegmentRecords{}, 0
	flush := func() {
		if len(chunk.Segments) > 0 {
			w.frame(frameSegments, chunk)
		}
		chunk, size = &intrav1.SegmentRecords{}, 0
	}
	add := func(s *Segment) {
		p := segmentToProto(s)
		chunk.Segments = append(chunk.Segments, p)
		if size += proto.Size(p); size >= frameSegmentBytes {
			flush()
		}
	}
	for _, s := range r.Closed {
		add(s)
	}
	if r.Open != nil {
		add(r.Open)
	}
	flush()
}

// Restore replaces the machine's state by a snapshot's. On an error the state is as it was and the machine has stopped:
// storage.ErrNewerFormat (the snapshot is of a higher level), storage.ErrCorrupt, or the reader's error.
func (m *Machine) Restore(in io.Reader) error {
	if m.stopped != nil {
		return m.stopped
	}
	r := &frameReader{r: bufio.NewReaderSize(in, 64<<10), sum: crc32.New(castagnoli)}
	st, err := r.state(m.understood)
	if err != nil {
		m.stopped = fmt.Errorf("restore metadata snapshot: %w", err)
		return m.stopped
	}
	m.st = st
	return nil
}

type frameReader struct {
	r    *bufio.Reader
	sum  hash.Hash32
	kind byte // of the frame in buf, which was read but not yet taken
	buf  []byte
	have bool
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), storage.ErrCorrupt)
}

// peek returns the kind of the next frame.
func (r *frameReader) peek() (byte, error) {
	if r.have {
		return r.kind, nil
	}
	var head [5]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return 0, eof(err)
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, corrupt("frame of %d bytes", n)
	}
	r.buf = make([]byte, n)
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return 0, eof(err)
	}
	r.kind, r.have = head[0], true
	if r.kind != frameEnd {
		_, _ = r.sum.Write(head[:])
		_, _ = r.sum.Write(r.buf)
	}
	return r.kind, nil
}

func eof(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return corrupt("it ends early")
	}
	return err
}

// take reads the next frame, which must be of this kind.
func (r *frameReader) take(kind byte, into proto.Message) error {
	k, err := r.peek()
	if err != nil {
		return err
	}
	if k != kind {
		return corrupt("frame of kind %d where %d belongs", k, kind)
	}
	r.have = false
	if err := proto.Unmarshal(r.buf, into); err != nil {
		return corrupt("frame of kind %d: %v", k, err)
	}
	return nil
}

func (r *frameReader) state(understood storage.Level) (state, error) {
	var h intrav1.MetadataSnapshotHeader
	if err := r.take(frameHeader, &h); err != nil {
		return state{}, err
	}
	if l := storage.Level(h.Level); l > understood && !mutate.On("metadata.apply-above-level") {
		return state{}, fmt.Errorf("level %d, this process understands %d: %w", l, understood, storage.ErrNewerFormat)
	}
	st := newState()
	st.level, st.vnode, st.ringVersion, st.arcs = storage.Level(h.Level), h.Vnode, h.RingVersion, arcsFromProto(h.Arcs)
	if len(st.arcs) == 0 {
		st.arcs = nil
	} else if why := validArcs(st.arcs); why != "" || len(h.ClusterId) != 16 {
		return state{}, corrupt("header: cluster id of %d bytes, %s", len(h.ClusterId), why)
	} else {
		st.cluster = storage.ClusterID(h.ClusterId)
	}
	if h.Topics > MaxTopics {
		return state{}, corrupt("%d topics", h.Topics)
	}
	for range h.Topics {
		t, err := r.topic()
		if err != nil {
			return state{}, err
		}
		st.put(t)
		st.remember(t.UID, t.Name, t.Nonce, t.DeleteNonce)
	}
	for range h.Tombstones {
		if err := r.tombstone(&st); err != nil {
			return state{}, err
		}
	}
	if uint64(st.byUID.Len()) != h.Topics || uint64(st.tombs.Len()) != h.Tombstones ||
		st.byName.Len()+st.deleting.Len() != st.byUID.Len() {
		return state{}, corrupt("a topic stands twice")
	}
	want := r.sum.Sum32()
	if k, err := r.peek(); err != nil {
		return state{}, err
	} else if k != frameEnd || len(r.buf) != 4 || binary.LittleEndian.Uint32(r.buf) != want {
		return state{}, corrupt("the checksum does not match")
	}
	return st, nil
}

// remember fills the index of nonces.
func (s *state) remember(uid storage.TopicUID, name string, create, del Nonce) {
	s.nonces.ReplaceOrInsert(nonceEntry{name: name, nonce: create, uid: uid})
	if !del.IsZero() {
		s.nonces.ReplaceOrInsert(nonceEntry{name: name, nonce: del, delete: true, uid: uid})
	}
}

func (r *frameReader) tombstone(st *state) error {
	var p intrav1.TombstoneRecord
	if err := r.take(frameTombstone, &p); err != nil {
		return err
	}
	d := decoder{}
	t := &Tombstone{UID: storage.TopicUID(d.id(p.Uid)), Name: p.Name, Nonce: Nonce(d.id(p.Nonce)),
		DeleteNonce: Nonce(d.id(p.DeleteNonce)), DeleteTime: storage.Time(p.DeleteTime), MetaVersion: p.MetaVersion}
	if d.bad {
		return corrupt("tombstone")
	}
	st.tombs.ReplaceOrInsert(tombEntry{t.UID, t})
	st.remember(t.UID, t.Name, t.Nonce, t.DeleteNonce)
	return nil
}

func (r *frameReader) topic() (*Topic, error) {
	var p intrav1.TopicRecord
	if err := r.take(frameTopic, &p); err != nil {
		return nil, err
	}
	d := decoder{}
	t := &Topic{UID: storage.TopicUID(d.id(p.Uid)), Name: p.Name, Nonce: Nonce(d.id(p.Nonce)), CreateTime: storage.Time(p.CreateTime),
		Labels: d.labels(p.Labels), DeletionProtection: p.DeletionProtection, InitialRanges: int(p.InitialRanges),
		MetaVersion: p.MetaVersion, State: TopicState(p.State), DeleteTime: storage.Time(p.DeleteTime), createdWith: p.CreatedWith}
	if len(p.DeleteNonce) > 0 {
		t.DeleteNonce = Nonce(d.id(p.DeleteNonce))
	}
	for _, u := range p.Updates {
		t.updates = append(t.updates, appliedUpdate{Nonce(d.id(u.Nonce)), u.MetaVersion})
	}
	if d.bad || t.State != TopicActive && t.State != TopicDeleting || p.Ranges > MaxRanges {
		return nil, corrupt("topic %.40q", p.Name)
	}
	for range p.Ranges {
		rng, err := r.rangeOf(t)
		if err != nil {
			return nil, err
		}
		t.ranges = append(t.ranges, rng)
		t.segments += rng.Len()
	}
	if !slices.IsSortedFunc(t.ranges, func(a, b *Range) int { return compareRangeIDs(a.ID, b.ID) }) {
		return nil, corrupt("topic %.40q: ranges out of order", p.Name)
	}
	t.owners = ownersOf(t.ranges)
	return t, nil
}

func (r *frameReader) rangeOf(t *Topic) (*Range, error) {
	var p intrav1.RangeRecord
	if err := r.take(frameRange, &p); err != nil {
		return nil, err
	}
	d := decoder{}
	rng := &Range{ID: storage.RangeID{Topic: t.UID, Timeline: storage.Timeline(p.Timeline), Seq: p.Seq},
		Slice: storage.Slice{Prefix: p.SlicePrefix, Depth: uint8(min(p.SliceDepth, 255))}, State: RangeState(p.State),
		Start: storage.Offset(p.Start), SealedEnd: storage.End(p.SealedEnd), NextSegment: p.NextSegment}
	for _, pa := range p.Parents {
		rng.Parents = append(rng.Parents, Parent{Range: d.rangeID(pa.Range), End: storage.End(pa.End),
			Slice: storage.Slice{Prefix: pa.SlicePrefix, Depth: uint8(min(pa.SliceDepth, 255))}})
	}
	if d.bad || !rng.Slice.Valid() || rng.State < RangeActive || rng.State > RangeSealed || p.Segments > MaxSegments {
		return nil, corrupt("range %s", rng.ID)
	}
	for have := 0; have < int(p.Segments); {
		var chunk intrav1.SegmentRecords
		if err := r.take(frameSegments, &chunk); err != nil {
			return nil, err
		}
		for _, sp := range chunk.Segments {
			s := d.segment(sp, rng.ID)
			if d.bad || rng.Open != nil {
				return nil, corrupt("a segment of range %s", rng.ID)
			}
			if s.State == SegmentOpen {
				rng.Open = s
			} else {
				rng.Closed = append(rng.Closed, s)
			}
		}
		if len(chunk.Segments) == 0 {
			return nil, corrupt("range %s: an empty frame of segments", rng.ID)
		}
		have += len(chunk.Segments)
	}
	if rng.Len() != int(p.Segments) {
		return nil, corrupt("range %s: %d segments of %d", rng.ID, rng.Len(), p.Segments)
	}
	return rng, nil
}
