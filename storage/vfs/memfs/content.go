package memfs

import "github.com/malachilog/malachi/storage/vfs"

const (
	pageSize    = vfs.BlockSize
	sectorSize  = vfs.SectorSize
	pageSectors = pageSize / sectorSize // one bit each in a uint8
)

// page is 4 KiB of a file. It may be changed in place only by the content whose owner it carries; everyone else copies. A page
// with a nil owner is frozen. That makes sharing between volatile, durable and cloned contents O(1) without reference counts.
type page struct {
	owner *owner
	data  [pageSize]byte
}

// owner is an identity; it must not be of size zero, or two of them could be equal.
type owner struct{ _ byte }

// content is the bytes of a file. Pages that are nil or beyond the slice are zeros, and so is every byte at or past size.
type content struct {
	size     int64
	pages    []*page
	ownSlice bool   // the slice is ours alone
	owner    *owner // pages that carry it are ours alone
}

// share returns a copy that holds the same pages. From here on both sides copy before they change anything.
func (c *content) share() content {
	c.ownSlice, c.owner = false, nil
	return *c
}

func (c *content) page(i int64) *page {
	if i < int64(len(c.pages)) {
		return c.pages[i]
	}
	return nil
}

// slots makes pages[i] assignable.
func (c *content) slots(i int64) {
	n := max(int64(len(c.pages)), i+1)
	if !c.ownSlice {
		own := make([]*page, n, n+n/4)
		copy(own, c.pages)
		c.pages, c.ownSlice = own, true
		return
	}
	for int64(len(c.pages)) < n {
		c.pages = append(c.pages, nil)
	}
}

// writable returns page i for changing.
func (c *content) writable(i int64) *page {
	c.slots(i)
	p := c.pages[i]
	if p != nil && c.owner != nil && p.owner == c.owner {
		return p
	}
	if c.owner == nil {
		c.owner = new(owner)
	}
	q := &page{owner: c.owner}
	if p != nil {
		q.data = p.data
	}
	c.pages[i] = q
	return q
}

// copySectors sets the sectors of mask in page i to those of src, which lives under the same lock. Whole pages are shared.
func (c *content) copySectors(i int64, src *content, mask uint8) {
	p := src.page(i)
	if p == nil && c.page(i) == nil {
		return
	}
	if mask == 0xff {
		if p != nil && src.owner != nil && p.owner == src.owner { // src alone holds it, so this write races with nobody
			p.owner = nil
		}
		c.slots(i)
		c.pages[i] = p
		return
	}
	w := c.writable(i)
	for s := range pageSectors {
		if mask>>s&1 == 0 {
			continue
		}
		at := s * sectorSize
		if p == nil {
			clear(w.data[at : at+sectorSize])
		} else {
			copy(w.data[at:at+sectorSize], p.data[at:at+sectorSize])
		}
	}
}

// setSize cuts or grows. What was cut reads as zero after growth.
func (c *content) setSize(n int64) {
	shrink := n < c.size
	c.size = n
	if shrink {
		c.trim()
	}
}

// trim restores the rule that everything at or past size is zero.
func (c *content) trim() {
	if n := (c.size + pageSize - 1) / pageSize; int64(len(c.pages)) > n {
		if c.ownSlice {
			clear(c.pages[n:])
		}
		c.pages = c.pages[:n:n]
	}
	i, rest := c.size/pageSize, c.size%pageSize
	if p := c.page(i); rest != 0 && p != nil && !allZero(p.data[rest:]) {
		clear(c.writable(i).data[rest:])
	}
}

// readAt copies what there is; it returns the number of bytes.
func (c *content) readAt(p []byte, off int64) int {
	if off >= c.size {
		return 0
	}
	p = p[:min(int64(len(p)), c.size-off)]
	for done := 0; done < len(p); {
		at := off + int64(done)
		in := int(at % pageSize)
		n := min(pageSize-in, len(p)-done)
		if pg := c.page(at / pageSize); pg == nil {
			clear(p[done : done+n])
		} else {
			copy(p[done:done+n], pg.data[in:])
		}
		done += n
	}
	return len(p)
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
