// Package faultfs wraps a vfs.FS and makes operations fail on purpose: exactly the nth, those that a rule picks, or all that need
// space. It counts and can write down every operation.
//
// Mutating operations (create, mkdir, rename, remove, write, truncate, allocate, sync, syncdir, syncfs, lock) and reading ones
// (open, openwrite, opendirect, list, stat, space, read, size) are numbered apart, each from 0, so a test can fail mutation 0, 1,
// 2, … until none is left. Close and StartWriteback have no number. Close can be failed by a rule; the file is closed then too.
//
// One lock guards the counters; it is not held while the wrapped file system works. Concurrent operations are numbered in the
// order in which they arrive. There are no goroutines and nothing survives a crash.
package faultfs

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/malachilog/malachi/storage/vfs"
)

// ErrInjected is what operations fail with when the test has no wish of its own.
var ErrInjected = errors.New("injected fault")

// Kind names an operation.
type Kind string

// The kinds of operations.
const (
	Create     Kind = "create"
	Mkdir      Kind = "mkdir"
	Rename     Kind = "rename"
	Remove     Kind = "remove"
	Write      Kind = "write"
	Truncate   Kind = "truncate"
	Allocate   Kind = "allocate"
	Sync       Kind = "sync"
	SyncDir    Kind = "syncdir"
	SyncFS     Kind = "syncfs"
	Lock       Kind = "lock"
	Open       Kind = "open"
	OpenWrite  Kind = "openwrite"
	OpenDirect Kind = "opendirect"
	List       Kind = "list"
	Stat       Kind = "stat"
	Space      Kind = "space"
	Read       Kind = "read"
	Size       Kind = "size"
	Close      Kind = "close"
)

// Reads reports whether the kind is one of the reading ones.
func (k Kind) Reads() bool {
	switch k {
	case Open, OpenWrite, OpenDirect, List, Stat, Space, Read, Size:
		return true
	}
	return false
}

// Op is one operation, before it is carried out.
type Op struct {
	N      int // number among the mutating or among the reading operations; -1 for Close
	Kind   Kind
	Name   string // as it was given when the file was opened
	To     string // the new name of a rename
	Off    int64
	Len    int64 // bytes; the new length of a truncate
	Direct bool  // the file was opened direct, and is
}

// String is the operation on one line, without its number.
func (o Op) String() string {
	s := string(o.Kind) + " " + o.Name
	switch o.Kind {
	case Rename:
		s += " -> " + o.To
	case Write, Read, Allocate:
		s += fmt.Sprintf(" off=%d len=%d", o.Off, o.Len)
	case Truncate:
		s += fmt.Sprintf(" len=%d", o.Len)
	}
	if o.Direct {
		s += " direct"
	}
	return s
}

// Effect says what an operation does before it fails.
type Effect uint8

// The effects.
const (
	// Nothing: the operation is not carried out.
	Nothing Effect = iota
	// Half: a write reaches the file up to half of its sectors, rounded down (none, if it lies in a single one). Others: Nothing.
	Half
	// Whole: the operation is carried out, and reported as failed.
	Whole
	// Drop: a sync makes nothing durable and the system forgets what was dirty, as Linux does: a later sync succeeds and proves
	// nothing. Needs a file system that can do it (memfs); with another one it is Nothing. Operations that are no sync: Nothing.
	Drop
)

// Fault is how an operation fails.
type Fault struct {
	Effect Effect
	Err    error // nil is ErrInjected
}

func (f Fault) err() error {
	if f.Err == nil {
		return ErrInjected
	}
	return f.Err
}

// Unlimited is the argument of NoSpaceAfter for a disk that is never full.
const Unlimited = -1

// FS wraps another file system.
type FS struct {
	inner vfs.FS

	mu        sync.Mutex
	mutations int
	reads     int
	failWrite map[int]Fault
	failRead  map[int]Fault
	fired     int
	rules     []func(Op) *Fault
	budget    int64            // bytes that files may still grow by; Unlimited
	reserved  map[string]int64 // name -> end of what Allocate reserved, charged already
	tracing   map[bool]bool    // Kind.Reads -> write down
	trace     []string
}

var _ vfs.FS = (*FS)(nil)

// New wraps inner and lets everything pass.
func New(inner vfs.FS) *FS {
	return &FS{inner: inner, failWrite: map[int]Fault{}, failRead: map[int]Fault{}, budget: Unlimited, reserved: map[string]int64{}, tracing: map[bool]bool{}}
}

// FailAt makes mutating operation n (from 0, counted since New or Reset) fail with err and without effect. Nil is ErrInjected.
func (f *FS) FailAt(n int, err error) { f.FailAtWith(n, Fault{Err: err}) }

// FailAtWith makes mutating operation n fail with an effect.
func (f *FS) FailAtWith(n int, fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failWrite[n] = fault
}

// FailReadAt makes reading operation n fail. A read that fails returns no byte.
func (f *FS) FailReadAt(n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failRead[n] = Fault{Err: err}
}

// Inject adds a rule: an operation for which it returns an error fails with it and without effect. Rules are asked in the order
// in which they were added, from the goroutine of the operation, without a lock held.
func (f *FS) Inject(rule func(Op) error) {
	f.InjectWith(func(op Op) *Fault {
		if err := rule(op); err != nil {
			return &Fault{Err: err}
		}
		return nil
	})
}

// InjectWith adds a rule that also chooses the effect; nil lets the operation pass.
func (f *FS) InjectWith(rule func(Op) *Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, rule)
}

// Reset forgets faults, rules and counts, and makes the disk unlimited. The trace stays.
func (f *FS) Reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.failWrite)
	clear(f.failRead)
	f.mutations, f.reads, f.fired, f.rules, f.budget = 0, 0, 0, nil, Unlimited
}

// NoSpaceAfter lets files grow by n more bytes; after that Create, MkdirAll, Allocate, and writes that grow a file beyond its size
// and beyond what was allocated fail with vfs.ErrNoSpace and without effect, while all else works. 0 is a disk that is full now,
// Unlimited one that never is. Removing gives nothing back (memfs with a capacity does).
func (f *FS) NoSpaceAfter(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.budget = n
}

// SetFull switches a full disk on and off.
func (f *FS) SetFull(full bool) {
	if full {
		f.NoSpaceAfter(0)
	} else {
		f.NoSpaceAfter(Unlimited)
	}
}

// Ops is the number of mutating operations so far, failed ones included.
func (f *FS) Ops() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mutations
}

// Reads is the number of reading operations so far, failed ones included.
func (f *FS) Reads() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

// Fired is the number of operations that were made to fail. A test that injects checks it: a fault that never happened proves
// nothing.
func (f *FS) Fired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

// StartTrace begins to write down mutating operations, and reading ones too if reads is set, and forgets earlier lines.
func (f *FS) StartTrace(reads bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trace = nil
	f.tracing = map[bool]bool{false: true, true: reads}
}

// TakeTrace returns the lines since StartTrace or the last TakeTrace, in the order in which operations ended: the operation, and
// " : " with the error if there was one.
func (f *FS) TakeTrace() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.trace
	f.trace = nil
	return out
}

// begin numbers an operation and decides its fate.
func (f *FS) begin(op *Op) *Fault {
	f.mu.Lock()
	var planned *Fault
	switch {
	case op.Kind == Close:
		op.N = -1
	case op.Kind.Reads():
		op.N = f.reads
		f.reads++
		if x, ok := f.failRead[op.N]; ok {
			planned = &x
		}
	default:
		op.N = f.mutations
		f.mutations++
		if x, ok := f.failWrite[op.N]; ok {
			planned = &x
		}
	}
	rules := f.rules
	f.mu.Unlock()
	for i := 0; planned == nil && i < len(rules); i++ {
		planned = rules[i](*op)
	}
	if planned != nil {
		f.mu.Lock()
		f.fired++
		f.mu.Unlock()
	}
	return planned
}

// end writes the trace.
func (f *FS) end(op Op, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.tracing[op.Kind.Reads()] {
		return
	}
	line := op.String()
	if err != nil {
		line += " : " + cause(err)
	}
	f.trace = append(f.trace, line)
}

// cause is the text of an error without the operation and name that are on the line already.
func cause(err error) string {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err.Error()
	}
	return err.Error()
}

// run carries out one operation: call does it whole, part (may be nil) does what the effects Half and Drop ask for.
func (f *FS) run(op Op, call func() error, part func(Effect) error) error {
	fault := f.begin(&op)
	err := f.carryOut(op, fault, call, part)
	f.end(op, err)
	return err
}

func (f *FS) carryOut(op Op, fault *Fault, call func() error, part func(Effect) error) error {
	if fault == nil {
		return call()
	}
	var err error
	switch {
	case fault.Effect == Whole:
		err = call()
	case fault.Effect != Nothing && part != nil:
		err = part(fault.Effect)
	}
	return &fs.PathError{Op: string(op.Kind), Path: op.Name, Err: errors.Join(fault.err(), err)}
}

// takeSpace charges growth to the budget.
func (f *FS) takeSpace(n int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.budget == Unlimited {
		return nil
	}
	if n > f.budget || f.budget == 0 {
		f.fired++
		return vfs.ErrNoSpace
	}
	f.budget -= n
	return nil
}
