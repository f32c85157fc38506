package replication

import (
	"slices"

	"github.com/malachilog/malachi/storage"
)

// The disks of the simulator. Bytes are batches, each with a random content; a digest chain runs over them. A journal of groups decides
// what is durable; the files behind it live in a page cache that a power cut takes or leaves, batch by batch. What a process can read back
// after a kill may be lost by the next power cut: a page cache that lies.

const maxSegs = 10

// simBatch is n records that begin at base. content stands for its bytes; bad means that its checksum does not verify.
type simBatch struct {
	base    storage.Offset
	n       uint32
	content uint64
	bad     bool
}

func (b simBatch) end() storage.End { return storage.EndAfter(b.base, uint64(b.n)) }
func (b simBatch) bytes() int64     { return int64(b.n) * 10 }

// chain is the running digest behind b, as it was received.
func chain(d storage.Digest, b simBatch) storage.Digest {
	x := uint64(d) ^ b.content*0x9e3779b97f4a7c15 ^ uint64(b.base)<<32 ^ uint64(b.n)
	x ^= x >> 29
	return storage.Digest(x * 0xbf58476d1ce4e5b9)
}

type entryKind uint8

const (
	entryOpen entryKind = iota + 1
	entryAppend
	entryRecovered
	entryFence
	entryCut
	entrySealed
	entryDropped
	entryCheckpoint
)

type simEntry struct {
	kind entryKind
	seg  int
	b    simBatch
	end  storage.End // open: base; cut, sealed: end
	note *simNote
	done func(failed bool)
}

// simGroup is what one barrier makes durable.
type simGroup struct {
	num     uint64
	entries []simEntry
	durable bool
}

type simNote struct {
	from uint64
	segs []segNote
}

type segNote struct {
	seg       int
	base, end storage.End
	fenced    bool
	damaged   bool
}

type stored struct {
	b       simBatch
	durable bool
	rot     bool // does not verify: flipped, or never written
}

// simFile is a segment file, as the page cache shows it.
type simFile struct {
	base    storage.End
	batches []stored
	named   bool // the directory entry was synced
	sealed  bool // has its footer, synced
}

func (f *simFile) end() storage.End {
	if len(f.batches) == 0 {
		return f.base
	}
	return f.batches[len(f.batches)-1].b.end()
}

func (f *simFile) truncate(end storage.End) {
	for len(f.batches) > 0 && f.end() > end {
		f.batches = f.batches[:len(f.batches)-1]
	}
}

func (f *simFile) sync() {
	f.named = true
	for i := range f.batches {
		f.batches[i].durable = true
	}
}

// onDisk is what no crash may take from a copy: the simulator's own knowledge, which no broker sees.
type onDisk struct {
	opened, fenced, sealed, dropped bool
	end                             storage.End
	good                            storage.End // below it, every byte is what the primary wrote
	bad                             bool
}

type simDisk struct {
	boot   storage.Boot
	groups []*simGroup
	files  [maxSegs]*simFile
	truth  [maxSegs]onDisk
	last   uint64 // newest durable group
	// proof is the newest group that root judges this disk by: found by the first start since it was last registered. Groups that the disk
	// writes while it is not registered prove nothing: else a rolled-back disk grows into its own past by being started again and again.
	proof      uint64
	registered bool
}

// newest is the newest group that is there, durable or not.
func (d *simDisk) newest() uint64 {
	if len(d.groups) == 0 {
		return d.last
	}
	return max(d.last, d.groups[len(d.groups)-1].num)
}

// clone is the disk's image, byte for byte.
func (d *simDisk) clone() *simDisk {
	c := *d
	c.groups = nil
	for _, g := range d.groups {
		h := *g
		h.entries = slices.Clone(g.entries)
		for i := range h.entries {
			h.entries[i].done = nil
		}
		c.groups = append(c.groups, &h)
	}
	for i, f := range d.files {
		if f != nil {
			h := *f
			h.batches = slices.Clone(f.batches)
			c.files[i] = &h
		}
	}
	return &c
}

// powerCut takes what no barrier and no sync has covered, or leaves it, piece by piece.
func (w *world) powerCut(d *simDisk) {
	d.groups = slices.DeleteFunc(d.groups, func(g *simGroup) bool {
		gone := !g.durable && w.chance(.5)
		if gone {
			w.note("a readable group is lost", g.num)
		}
		return gone
	})
	for i, f := range d.files {
		if f == nil {
			continue
		}
		if !f.named && w.chance(.5) {
			d.files[i] = nil
			continue
		}
		for k := range f.batches {
			if s := &f.batches[k]; !s.durable && w.chance(.5) {
				s.rot = true
				w.branch("page cache is lost")
			}
		}
	}
}

// learn is what a barrier makes true on a disk.
func (w *world) learn(b *simBroker, e *simEntry) {
	if e.kind == entryCheckpoint {
		return
	}
	t, m := &b.disk.truth[e.seg], w.segs[e.seg]
	w.dirty[e.seg] = true
	switch e.kind {
	case entryOpen:
		*t = onDisk{opened: true, end: e.end, good: e.end, bad: e.end != m.base}
	case entryAppend, entryRecovered:
		if e.kind == entryAppend && t.fenced {
			w.violates("INV-S5", "broker %d journals an append of segment %d behind its fence", b.index, e.seg)
		}
		if storage.EndBefore(e.b.base) != t.end {
			w.violates("INV-D7", "broker %d takes a batch at %d of segment %d, its end is %d", b.index, e.b.base, e.seg, t.end)
		}
		t.end = e.b.end()
		if t.bad = t.bad || e.b.bad || !m.wrote(e.b); !t.bad {
			t.good = t.end
		}
	case entryFence:
		t.fenced = true
	case entryCut:
		t.end, t.good = min(t.end, e.end), min(t.good, e.end)
		if t.bad && t.good == t.end {
			t.bad = false
		}
	case entrySealed:
		t.sealed = true
	case entryDropped:
		*t = onDisk{dropped: true}
	}
}

// recovered is one live segment as the journal and the newest checkpoint tell it.
type recovered struct {
	base, end storage.End
	fenced    bool
	damaged   bool
	missing   bool
	log       []stored
}

// replay reads a disk as recovery does. It fails if a group is missing below one that is there.
func (d *simDisk) replay() (live [maxSegs]*recovered, ended [maxSegs]entryKind, last uint64, ok bool) {
	var note *simNote
	from := uint64(1)
	for _, g := range d.groups {
		for _, e := range g.entries {
			if e.kind == entryCheckpoint {
				note, from = e.note, e.note.from
			}
		}
	}
	last = from - 1
	var ends [maxSegs]int
	pos := 0
	each := func(fn func(pos int, e *simEntry)) bool {
		last, pos = from-1, 0
		for _, g := range d.groups {
			if g.num < from {
				continue
			}
			if g.num != last+1 {
				return false
			}
			last = g.num
			for i := range g.entries {
				pos++
				fn(pos, &g.entries[i])
			}
		}
		return true
	}
	if !each(func(pos int, e *simEntry) {
		if e.kind == entrySealed || e.kind == entryDropped {
			ends[e.seg], ended[e.seg] = pos, e.kind
		}
	}) {
		return live, ended, last, false
	}
	if note != nil {
		for _, n := range note.segs {
			if ends[n.seg] == 0 {
				live[n.seg] = d.takeUp(n)
			}
		}
	}
	each(func(pos int, e *simEntry) {
		if e.kind != entryCheckpoint && pos > ends[e.seg] {
			live[e.seg] = live[e.seg].replay(e)
		}
	})
	return live, ended, last, true
}

func (d *simDisk) takeUp(n segNote) *recovered {
	r := &recovered{base: n.base, end: n.end, fenced: n.fenced, damaged: n.damaged}
	f := d.files[n.seg]
	if f == nil || f.end() < n.end {
		r.missing = true
	}
	if f != nil {
		r.log = slices.Clone(f.batches)
		for len(r.log) > 0 && r.log[len(r.log)-1].b.end() > n.end {
			r.log = r.log[:len(r.log)-1]
		}
	}
	return r
}

func (r *recovered) replay(e *simEntry) *recovered {
	switch e.kind {
	case entryOpen:
		return &recovered{base: e.end, end: e.end}
	case entryFence:
		r.fenced = true
	case entryAppend, entryRecovered:
		r.log, r.end = append(r.log, stored{b: e.b}), e.b.end()
	case entryCut:
		r.end = e.end
		for len(r.log) > 0 && r.log[len(r.log)-1].b.end() > e.end {
			r.log = r.log[:len(r.log)-1]
		}
		r.missing = r.missing && (len(r.log) == 0 && r.end > r.base || len(r.log) > 0 && r.log[len(r.log)-1].b.end() < r.end)
	}
	return r
}
