package memfs

import (
	"maps"
	"math/bits"
)

// inode is a file or directory: what is there now, what is durable, and the units between the two.
type inode struct {
	id      uint64
	path    string // last known
	dir     bool
	links   int // names in volatile directories
	handles int
	locked  bool

	// Files.
	vol, dur content
	marks    []mark // per page; may be shorter than the file
	unsynced int    // sectors that are dirty or dropped
	sizes    []sizeChange

	// Directories.
	entries map[string]*inode // now
	durable map[string]*inode // before pending
	pending []entryOp         // what separates them, oldest first
}

// mark says which sectors of a page are newer than the durable ones. dropped ones are so too, but no sync will write them: the
// system has forgotten that they are dirty.
type mark struct {
	dirty, dropped uint8
	reserved       bool // Allocate took space for this page
}

// sizeChange is a pending length. Growth upon growth is one change; each cut is its own, because what lies beyond it must not
// come back when the cut is kept.
type sizeChange struct {
	seq     uint64
	size    int64
	growth  bool
	dropped bool
}

type entryKind uint8

const (
	entryCreate entryKind = iota + 1
	entryRemove
	entryRename    // inside one directory: both names change together
	entryRenameIn  // from another directory
	entryRenameOut // to another directory
)

func (k entryKind) String() string {
	return [...]string{"?", "create", "remove", "rename", "rename-in", "rename-out"}[k]
}

type entryOp struct {
	seq      uint64
	kind     entryKind
	name, to string
	ino      *inode
	durable  bool // synced, but an older dropped one keeps it from being folded
	dropped  bool
}

func (e entryOp) apply(m map[string]*inode) {
	switch e.kind {
	case entryCreate, entryRenameIn:
		m[e.name] = e.ino
	case entryRemove, entryRenameOut:
		delete(m, e.name)
	case entryRename:
		delete(m, e.name)
		m[e.to] = e.ino
	}
}

func (n *inode) mark(i int64) *mark {
	for int64(len(n.marks)) <= i {
		n.marks = append(n.marks, mark{})
	}
	return &n.marks[i]
}

// dirty notes that sectors of page i were written.
func (n *inode) dirty(i int64, mask uint8) {
	m := n.mark(i)
	n.unsynced += bits.OnesCount8(mask &^ (m.dirty | m.dropped))
	m.dirty |= mask
	m.dropped &^= mask
}

// clean forgets sectors of page i.
func (n *inode) clean(i int64, mask uint8) {
	if i >= int64(len(n.marks)) {
		return
	}
	m := &n.marks[i]
	n.unsynced -= bits.OnesCount8(mask & (m.dirty | m.dropped))
	m.dirty &^= mask
	m.dropped &^= mask
}

// resize sets the volatile length and notes the change as a unit.
func (n *inode) resize(size int64, seq uint64) {
	growth := size > n.vol.size
	if !growth { // nothing beyond the cut can be written any more; the sector it goes through is (its tail becomes zero)
		first := (size + sectorSize - 1) / sectorSize
		for i := first / pageSectors; i < int64(len(n.marks)); i++ {
			mask := uint8(0xff)
			if i == first/pageSectors {
				mask <<= first % pageSectors
			}
			n.clean(i, mask)
		}
		if size%sectorSize != 0 {
			n.dirty(size/pageSize, 1<<(size%pageSize/sectorSize))
		}
	}
	n.vol.setSize(size)
	if last := len(n.sizes) - 1; growth && last >= 0 && n.sizes[last].growth && !n.sizes[last].dropped {
		n.sizes[last].size = size
		return
	}
	n.sizes = append(n.sizes, sizeChange{seq: seq, size: size, growth: growth})
}

// syncSizes makes the pending lengths durable, except dropped ones.
func (n *inode) syncSizes() {
	kept := n.sizes[:0]
	for _, s := range n.sizes {
		if s.dropped {
			kept = append(kept, s)
			continue
		}
		n.dur.setSize(s.size)
	}
	n.sizes = kept
	if n.dur.size == n.vol.size {
		n.sizes = nil
	}
}

// sync makes every dirty sector and the length durable. What was dropped stays volatile.
func (n *inode) sync() {
	n.syncSizes()
	if n.unsynced == 0 {
		return
	}
	for i := range n.marks {
		m := &n.marks[i]
		if m.dirty == 0 {
			continue
		}
		mask := m.dirty
		if m.dropped == 0 {
			mask = 0xff // clean sectors are equal on both sides: take the page as it is
		}
		n.dur.copySectors(int64(i), &n.vol, mask)
		n.clean(int64(i), m.dirty)
	}
	n.dur.trim()
}

// syncPages makes whole pages and the length durable, as a direct write does.
func (n *inode) syncPages(first, end int64) {
	n.syncSizes()
	for i := first; i < end; i++ {
		n.dur.copySectors(i, &n.vol, 0xff)
		n.clean(i, 0xff)
	}
	n.dur.trim()
}

// drop marks everything unsynced as clean without making it durable, as a kernel does after a failed writeback. Cuts stay: they
// are metadata.
func (n *inode) drop() {
	for i := range n.marks {
		n.marks[i].dropped |= n.marks[i].dirty
		n.marks[i].dirty = 0
	}
	for i := range n.sizes {
		n.sizes[i].dropped = n.sizes[i].dropped || n.sizes[i].growth
	}
	for i := range n.pending {
		n.pending[i].dropped = n.pending[i].dropped || !n.pending[i].durable
	}
}

// syncEntries makes a directory's pending operations durable, except dropped ones.
func (n *inode) syncEntries() {
	for i := range n.pending {
		n.pending[i].durable = n.pending[i].durable || !n.pending[i].dropped
	}
	fold := 0
	for fold < len(n.pending) && n.pending[fold].durable {
		n.pending[fold].apply(n.durable)
		fold++
	}
	n.pending = append([]entryOp(nil), n.pending[fold:]...)
}

// crashed is what n is after a power cut that kept the units for which keep answers true. Directories still name the old inodes.
func (n *inode) crashed(keep func(Unit) bool) *inode {
	c := &inode{id: n.id, path: n.path, dir: n.dir}
	if n.dir {
		c.entries = maps.Clone(n.durable)
		for _, e := range n.pending {
			if e.durable || keep(n.entryUnit(e)) {
				e.apply(c.entries)
			}
		}
		return c
	}
	img := n.dur.share()
	for _, s := range n.sizes {
		if keep(n.sizeUnit(s)) {
			img.setSize(s.size)
		}
	}
	if n.unsynced > 0 {
		for i := range n.marks {
			var mask uint8
			for s := range pageSectors {
				if (n.marks[i].dirty|n.marks[i].dropped)>>s&1 == 1 && keep(n.sectorUnit(i, s)) {
					mask |= 1 << s
				}
			}
			if mask != 0 {
				img.copySectors(int64(i), &n.vol, mask)
			}
		}
		img.trim()
	}
	c.dur = img.share()
	c.vol = c.dur
	return c
}

// units calls yield for each unit of n, in the order in which crashed asks for them.
func (n *inode) units(yield func(Unit)) {
	for _, e := range n.pending {
		if !e.durable {
			yield(n.entryUnit(e))
		}
	}
	for _, s := range n.sizes {
		yield(n.sizeUnit(s))
	}
	if n.unsynced == 0 {
		return
	}
	for i := range n.marks {
		for s := range pageSectors {
			if (n.marks[i].dirty|n.marks[i].dropped)>>s&1 == 1 {
				yield(n.sectorUnit(i, s))
			}
		}
	}
}
