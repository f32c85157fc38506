// Package frontier is the algebra of reading places. A frontier is a set of positions (range, offset) whose slices are disjoint and cover the
// keyspace; everything before it was delivered. Cursors and group positions are both frontiers.
//
// The package is pure: what the topic looks like comes in as a View. Values are not safe for concurrent use while they are changed.
package frontier

import (
	"fmt"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// MaxPositions bounds a frontier: no topic has more ranges alive at once.
const MaxPositions = 4096

// Position says that of Slice everything below Offset in Range was delivered.
type Position struct {
	Range  storage.RangeID
	Slice  storage.Slice
	Offset storage.Offset
}

// Frontier is a whole reading place. Positions are in keyspace order. Rotation is the index of the position that is read first next, so that
// no range starves.
type Frontier struct {
	Topic     storage.TopicUID
	Positions []Position
	Rotation  uint32
}

// Range is what a View knows of a range.
type Range struct {
	ID     storage.RangeID
	Slice  storage.Slice
	Closed bool           // sealed: End is final
	Start  storage.Offset // first offset still there
	End    storage.End    // of a closed range
	// Parents have to be finished before this range is read; Children follow a closed range.
	Parents  []storage.RangeID
	Children []storage.RangeID
}

// View answers from one state of the topic.
type View interface {
	// Range returns a range, stubs included. False: the topic never issued this id.
	Range(storage.RangeID) (Range, bool)
}

// Errors of a frontier that does not fit its topic. Each wraps storage.ErrInvalid or storage.ErrBeyondEnd.
var (
	// ErrMalformed: not a frontier at all, or of another topic.
	ErrMalformed = fmt.Errorf("not a valid cursor: %w", storage.ErrInvalid)
	// ErrUnknownRange: a range that the topic never issued.
	ErrUnknownRange = fmt.Errorf("cursor names a range that the topic never had: %w", storage.ErrInvalid)
)

// BeyondEndError is a position beyond its closed range's end, with the nearest frontier that is valid. errors.Is(err, storage.ErrBeyondEnd).
type BeyondEndError struct {
	Position Position
	End      storage.End
	Nearest  Frontier
}

func (e *BeyondEndError) Error() string {
	return fmt.Sprintf("cursor stands at %d of range %s, which ends at %d", e.Position.Offset, e.Position.Range, e.End)
}

// Unwrap makes it a storage.ErrBeyondEnd.
func (e *BeyondEndError) Unwrap() error { return storage.ErrBeyondEnd }

// Check reports whether f is a frontier: positions in keyspace order, disjoint, covering the whole keyspace, all of f.Topic. It allocates
// nothing unless it fails.
func (f *Frontier) Check() error {
	if len(f.Positions) == 0 || len(f.Positions) > MaxPositions {
		return fmt.Errorf("%d positions: %w", len(f.Positions), ErrMalformed)
	}
	if int(f.Rotation) >= len(f.Positions) {
		return fmt.Errorf("rotation %d of %d positions: %w", f.Rotation, len(f.Positions), ErrMalformed)
	}
	next := storage.Position(0)
	for i, p := range f.Positions {
		switch {
		case !p.Slice.Valid() || p.Offset > storage.MaxOffset+1:
			return fmt.Errorf("position %d: %w", i, ErrMalformed)
		case p.Range.Topic != f.Topic:
			return fmt.Errorf("position %d is of another topic: %w", i, ErrMalformed)
		case i > 0 && next == 0: // the one before reached the end of the keyspace
			return fmt.Errorf("position %d overlaps the one before: %w", i, ErrMalformed)
		case p.Slice.First() != next:
			return fmt.Errorf("position %d leaves a hole or overlaps: %w", i, ErrMalformed)
		}
		next = p.Slice.Last() + 1 // 0 at the end of the keyspace
	}
	if next != 0 {
		return fmt.Errorf("the positions do not reach the end of the keyspace: %w", ErrMalformed)
	}
	return nil
}

// Begin is the frontier before everything: the first range of every part of the keyspace, at its start. roots are the ranges without parents.
func Begin(topic storage.TopicUID, roots []Range) Frontier {
	f := Frontier{Topic: topic}
	for _, r := range roots {
		f.Positions = append(f.Positions, Position{Range: r.ID, Slice: r.Slice, Offset: 0})
	}
	f.sort()
	return f
}

func (f *Frontier) sort() {
	slices.SortFunc(f.Positions, func(a, b Position) int {
		switch x, y := a.Slice.First(), b.Slice.First(); {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
}

// Fit checks f against what the topic is: every range was issued, no position lies beyond a closed range's end, and each position's slice lies
// in its range's.
func (f *Frontier) Fit(v View) error {
	for i, p := range f.Positions {
		r, ok := v.Range(p.Range)
		if !ok {
			return fmt.Errorf("range %s: %w", p.Range, ErrUnknownRange)
		}
		if !r.Slice.Covers(p.Slice) {
			return fmt.Errorf("position %d: slice %s is not of range %s: %w", i, p.Slice, p.Range, ErrMalformed)
		}
		if r.Closed && storage.EndBefore(p.Offset) > r.End {
			near := Frontier{Topic: f.Topic, Positions: slices.Clone(f.Positions), Rotation: f.Rotation}
			near.Positions[i].Offset = r.End.Next()
			return &BeyondEndError{p, r.End, near}
		}
	}
	return nil
}

// Resolve moves every position that has finished its closed range to the range's children at 0, as often as that is possible. A child of two
// parents is entered when both are finished; until then the finished one stays. Lineage is followed, never jumped over. f must fit v.
func (f *Frontier) Resolve(v View) {
	for f.resolveOnce(v) {
	}
	if n := uint32(len(f.Positions)); f.Rotation >= n {
		f.Rotation = 0
	}
}

func (f *Frontier) resolveOnce(v View) bool {
	for i, p := range f.Positions {
		r, ok := v.Range(p.Range)
		if !ok || !Finished(p, r) {
			continue
		}
		for _, id := range r.Children {
			child, ok := v.Range(id)
			if ok && f.enter(i, child, v) {
				return true
			}
		}
	}
	return false
}

// Finished reports whether p has delivered all of a closed range.
func Finished(p Position, r Range) bool { return r.Closed && storage.EndBefore(p.Offset) >= r.End }

// enter puts child in the place of the finished positions that it follows. One that came of a split replaces a part of position i's slice; the
// others of that slice are entered by the other children.
func (f *Frontier) enter(i int, child Range, v View) bool {
	at := f.Positions[i]
	if at.Slice.Covers(child.Slice) { // a split: the child gets its part
		var out []Position
		out = append(out, f.Positions[:i]...)
		out = append(out, remainder(at, child.Slice)...)
		out = append(out, Position{Range: child.ID, Slice: child.Slice})
		out = append(out, f.Positions[i+1:]...)
		f.Positions = out
		f.sort()
		return true
	}
	if !child.Slice.Covers(at.Slice) {
		return false
	}
	// A merge, or a child of a range of which this position holds a part: everything of the child's slice must be finished.
	keep := f.Positions[:0:0]
	for _, p := range f.Positions {
		if !child.Slice.Covers(p.Slice) {
			keep = append(keep, p)
			continue
		}
		r, ok := v.Range(p.Range)
		if !ok || !Finished(p, r) || !slices.Contains(child.Parents, p.Range) {
			return false
		}
	}
	f.Positions = append(keep, Position{Range: child.ID, Slice: child.Slice})
	f.sort()
	return true
}

// remainder is p without the part of its slice that is taken: the other halves on the way down.
func remainder(p Position, taken storage.Slice) []Position {
	var out []Position
	for s := p.Slice; s != taken; {
		low, high := s.Halves()
		if low.Covers(taken) {
			out = append(out, Position{p.Range, high, p.Offset})
			s = low
		} else {
			out = append(out, Position{p.Range, low, p.Offset})
			s = high
		}
	}
	return out
}
