package memfs

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"path"
	"slices"
	"strings"
)

// UnitKind says what a Unit is.
type UnitKind uint8

// The kinds of units.
const (
	UnitEntry  UnitKind = iota + 1 // an operation on one directory's entries
	UnitSize                       // a file's length
	UnitSector                     // 512 bytes of a file
)

// Unit is one thing that is not durable yet: a power cut keeps or loses it whole, independently of every other. Units are
// comparable; in one state of a file system no two are equal, and Unsynced and CrashClone use equal ones.
type Unit struct {
	Kind UnitKind
	// Name is the file, or for entries the name the operation is about (the old one of a rename).
	Name string
	// Index is the sector's number in the file, the length that the file would get, or the operation's number.
	Index int64
	// Entry is "create", "remove", "rename NEW", "rename-in" or "rename-out" (a rename between directories is one unit in each).
	Entry string
	// Dropped units were given up by a failed sync: no later sync makes them durable, but the power cut may still find them.
	Dropped bool

	ino, seq uint64
}

// String is the unit on one line.
func (u Unit) String() string {
	drop := ""
	if u.Dropped {
		drop = " (dropped)"
	}
	switch u.Kind {
	case UnitEntry:
		return fmt.Sprintf("entry %s %s%s", u.Name, u.Entry, drop)
	case UnitSize:
		return fmt.Sprintf("size %s %d%s", u.Name, u.Index, drop)
	}
	return fmt.Sprintf("sector %s %d%s", u.Name, u.Index, drop)
}

func (n *inode) entryUnit(e entryOp) Unit {
	what := e.kind.String()
	if e.kind == entryRename {
		what += " " + path.Join(n.path, e.to)
	}
	return Unit{Kind: UnitEntry, Name: path.Join(n.path, e.name), Index: int64(e.seq), Entry: what, Dropped: e.dropped, ino: n.id, seq: e.seq}
}

func (n *inode) sizeUnit(s sizeChange) Unit {
	return Unit{Kind: UnitSize, Name: n.path, Index: s.size, Dropped: s.dropped, ino: n.id, seq: s.seq}
}

func (n *inode) sectorUnit(page, sector int) Unit {
	dropped := n.marks[page].dropped>>sector&1 == 1
	return Unit{Kind: UnitSector, Name: n.path, Index: int64(page)*pageSectors + int64(sector), Dropped: dropped, ino: n.id}
}

// Unsynced lists what a power cut now could lose, in an order that is the same for the same history. It includes the units of
// files whose removal is not durable.
func (f *FS) Unsynced() []Unit {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Unit
	for _, n := range f.reachable() {
		n.units(func(u Unit) { out = append(out, u) })
	}
	return out
}

// CrashClone returns the file system as a power cut now would leave it if exactly the unsynced units for which keep answers true
// had reached the device. keep is called once per unit in the order of Unsynced and must not use f; nil keeps none. Everything
// in the clone is durable, no lock is held, and reservations of space are gone. The clone has f's options, no hook, and shares
// nothing with f that either can change. It costs about a microsecond per file: bytes are copied only where one side writes later.
//
// A directory that would be reached by two names (its move to another directory was kept by half) appears under the first one
// only, as a file system check would leave it.
func (f *FS) CrashClone(keep func(Unit) bool) *FS {
	if keep == nil {
		keep = func(Unit) bool { return false }
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	nodes := f.reachable()
	images := make(map[*inode]*inode, len(nodes))
	for _, n := range nodes {
		images[n] = n.crashed(keep)
	}
	c := &FS{opts: f.opts, seq: f.seq, nextID: f.nextID, root: images[f.root]}
	c.root.settle(images, "")
	if c.opts.Capacity > 0 {
		c.root.walk(map[*inode]bool{}, func(n *inode) { c.used += n.charged() })
	}
	return c
}

// settle replaces the old inodes that a cloned directory names by their images and counts links, from the root down.
func (n *inode) settle(images map[*inode]*inode, at string) {
	n.durable = make(map[string]*inode, len(n.entries))
	for _, name := range sortedNames(n.entries) {
		img := images[n.entries[name]]
		if img.dir && img.durable != nil { // has a name already
			delete(n.entries, name)
			continue
		}
		img.links++
		if img.links == 1 {
			img.path = path.Join(at, name)
		}
		n.entries[name] = img
		n.durable[name] = img
		if img.dir {
			img.settle(images, img.path)
		}
	}
}

// reachable lists every inode that a name leads to or, after a power cut, may lead to, by id. It refreshes their paths.
func (f *FS) reachable() []*inode {
	f.root.name(map[*inode]bool{})
	seen := map[*inode]bool{}
	var out []*inode
	f.root.walk(seen, func(n *inode) { out = append(out, n) })
	slices.SortFunc(out, func(a, b *inode) int { return cmp.Compare(a.id, b.id) })
	return out
}

// walk visits n and all that it leads to in any state, each once, in no particular order.
func (n *inode) walk(seen map[*inode]bool, visit func(*inode)) {
	if seen[n] {
		return
	}
	seen[n] = true
	visit(n)
	for _, e := range n.entries {
		e.walk(seen, visit)
	}
	for _, e := range n.durable {
		e.walk(seen, visit)
	}
	for _, e := range n.pending {
		e.ino.walk(seen, visit)
	}
}

// name sets the paths of everything below n that has a name now.
func (n *inode) name(seen map[*inode]bool) {
	seen[n] = true
	for name, e := range n.entries {
		p := path.Join(n.path, name)
		if !seen[e] || p < e.path { // of several names the first, whatever order the map has
			e.path = p
		}
		if e.dir && !seen[e] {
			e.name(seen)
		}
		seen[e] = true
	}
}

func sortedNames(m map[string]*inode) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Dump prints the tree (volatile size and checksum, durable size and checksum) and then the unsynced units: two file systems
// with equal dumps hold equal bytes, apart from chance.
func (f *FS) Dump() string {
	units := f.Unsynced()
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	f.root.dump(&b)
	for _, u := range units {
		fmt.Fprintf(&b, "unsynced %s\n", u)
	}
	return b.String()
}

func (n *inode) dump(b *strings.Builder) {
	for _, name := range sortedNames(n.entries) {
		e, at := n.entries[name], path.Join(n.path, name)
		if e.dir {
			fmt.Fprintf(b, "%s/\n", at)
			e.dump(b)
			continue
		}
		fmt.Fprintf(b, "%s size=%d crc=%08x", at, e.vol.size, e.vol.crc())
		if d := e.dur.crc(); e.dur.size != e.vol.size || d != e.vol.crc() {
			fmt.Fprintf(b, " durable size=%d crc=%08x", e.dur.size, d)
		}
		if e.locked {
			b.WriteString(" locked")
		}
		b.WriteByte('\n')
	}
}

func (c *content) crc() uint32 {
	sum := crc32.NewIEEE()
	buf := make([]byte, 64<<10)
	for off := int64(0); off < c.size; {
		n := c.readAt(buf, off)
		_, _ = sum.Write(buf[:n]) // a hash never fails
		off += int64(n)
	}
	return sum.Sum32()
}
