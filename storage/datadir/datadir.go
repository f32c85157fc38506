// Package datadir is a broker's data directory: one lock, and a marker file that says whose directory it is.
//
// The marker is small text: JSON, then a line with its CRC32C. It is replaced whole (temporary file, sync, rename, directory sync), so after
// any crash it is the old one or the new one. A Dir is safe for concurrent use; it starts no goroutine.
package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"sync"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

const (
	markerName = "MALACHI"
	tempName   = markerName + ".tmp"
	lockName   = "LOCK"
	// Format is the version of the directory's layout that this build writes.
	Format = 1
	// maxMarker bounds what is read of a marker.
	maxMarker = 64 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Marker is what the directory knows of itself.
type Marker struct {
	Format  int    `json:"format"`
	Cluster string `json:"cluster_id"` // 32 hex digits; empty until the broker belongs to one
	Broker  string `json:"broker_id"`  // 16 hex digits
	// Boot counts the starts of a process on this directory.
	Boot storage.Boot `json:"boot"`
	// Level is the highest level that was seen here.
	Level storage.Level `json:"level"`
	// Journal: the directory has a journal; its absence is damage.
	Journal bool `json:"journal"`
	// Founding: this start, or one before that a crash cut short, founds the cluster.
	Founding bool `json:"founding"`
	// Joining: the cluster has admitted this broker, and no start has come as far as being registered there.
	Joining bool `json:"joining,omitempty"`
	// Registered: the newest boot was accepted by the cluster. Proof is the newest journal group that was here before a start wrote anything
	// itself: a disk that was refused must not grow, start by start, into what it claims to be.
	Registered bool   `json:"registered,omitempty"`
	Proof      uint64 `json:"proof,omitempty"`
	// StorageFailed is why writing ended, until an operator or a completed recovery clears it.
	StorageFailed string `json:"storage_failed,omitempty"`
}

// Dir is an open, locked data directory.
type Dir struct {
	fs   vfs.FS
	lock io.Closer

	mu     sync.Mutex
	marker Marker
}

// Open locks the directory and reads its marker. An empty directory gets one, with a broker id from rand. Errors wrap
// storage.ErrFolderRefused: in use, not empty and without a marker, of a newer format or level (also storage.ErrNewerFormat), or a marker
// that does not verify. On error nothing but the lock file was changed.
func Open(fs vfs.FS, rand io.Reader) (*Dir, error) {
	marker, found, err := read(fs)
	if err != nil {
		return nil, err
	}
	if !found {
		if err := mustBeEmpty(fs); err != nil {
			return nil, err
		}
	}
	lock, err := fs.Lock(lockName)
	if errors.Is(err, vfs.ErrLocked) {
		return nil, fmt.Errorf("%w: another broker runs on it", storage.ErrFolderRefused)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: it cannot be locked: %w", storage.ErrFolderRefused, err)
	}
	d := &Dir{fs: fs, lock: lock}
	if found {
		// Again under the lock: who held it a moment ago may have changed it.
		marker, found, err = read(fs)
	}
	if err == nil && !found {
		marker, err = fresh(rand)
		if err == nil {
			err = d.write(marker)
		}
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	d.marker = marker
	return d, nil
}

func fresh(rand io.Reader) (Marker, error) {
	var b [8]byte
	if _, err := io.ReadFull(rand, b[:]); err != nil {
		return Marker{}, fmt.Errorf("draw a broker id: %w", err)
	}
	id := storage.BrokerID(0)
	for _, c := range b {
		id = id<<8 | storage.BrokerID(c)
	}
	return Marker{Format: Format, Broker: max(id, 1).String(), Level: storage.CurrentLevel}, nil
}

func mustBeEmpty(fs vfs.FS) error {
	entries, err := fs.List(".")
	if err != nil {
		return fmt.Errorf("list: %w", err)
	}
	for _, e := range entries {
		if e.Name != lockName && e.Name != tempName && e.Name != "lost+found" {
			return fmt.Errorf("%w: it has no marker and is not empty (it holds %q): name an empty folder, or one of a broker", storage.ErrFolderRefused, e.Name)
		}
	}
	return nil
}

// read reads the marker without changing anything.
func read(fs vfs.FS) (m Marker, found bool, err error) {
	f, err := fs.Open(markerName)
	if vfs.IsNotExist(err) {
		return m, false, nil
	}
	if err != nil {
		return m, false, fmt.Errorf("open marker: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b := make([]byte, maxMarker)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return m, false, fmt.Errorf("read marker: %w", err)
	}
	m, err = Parse(b[:n])
	return m, err == nil, err
}

// Parse reads a marker's bytes. A newer format is told before anything else is asked of them.
func Parse(b []byte) (Marker, error) {
	bad := func(what string) (Marker, error) {
		return Marker{}, fmt.Errorf("%w: marker file %s: %s", storage.ErrFolderRefused, markerName, what)
	}
	body, sum, ok := strings.Cut(string(b), "\n")
	if !ok {
		return bad("it is cut short")
	}
	if sum != fmt.Sprintf("crc32c %08x\n", crc32.Checksum([]byte(body), castagnoli)) {
		return bad("its checksum is wrong")
	}
	var v struct {
		Format int           `json:"format"`
		Level  storage.Level `json:"level"`
	}
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		return bad("it is not JSON")
	}
	if v.Format > Format || v.Level > storage.CurrentLevel {
		return Marker{}, fmt.Errorf("%w: %w: format %d, level %d; this build knows %d and %d", storage.ErrFolderRefused, storage.ErrNewerFormat,
			v.Format, v.Level, Format, storage.CurrentLevel)
	}
	var m Marker
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		return bad("its fields do not fit")
	}
	if _, err := storage.ParseBrokerID(m.Broker); err != nil || m.Format < 1 {
		return bad("it names no broker")
	}
	if m.Cluster != "" {
		if _, err := storage.ParseTopicUID(m.Cluster); err != nil { // the same 32 digits
			return bad("its cluster id is not one")
		}
	}
	return m, nil
}

// Encode is the marker's bytes.
func (m Marker) Encode() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode marker: %w", err)
	}
	return fmt.Appendf(b, "\ncrc32c %08x\n", crc32.Checksum(b, castagnoli)), nil
}

func (d *Dir) write(m Marker) (err error) {
	b, err := m.Encode()
	if err != nil {
		return err
	}
	if err := d.fs.Remove(tempName); err != nil && !vfs.IsNotExist(err) {
		return fmt.Errorf("write marker: %w", err)
	}
	f, err := d.fs.Create(tempName)
	if err != nil {
		return fmt.Errorf("write marker: %w", err)
	}
	_, err = f.WriteAt(b, 0)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write marker: %w", err)
	}
	if err := d.fs.Rename(tempName, markerName); err != nil {
		return fmt.Errorf("write marker: %w", err)
	}
	if err := d.fs.SyncDir("."); err != nil {
		return fmt.Errorf("write marker: %w", err)
	}
	return nil
}

// Marker returns the marker as it is on disk.
func (d *Dir) Marker() Marker {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.marker
}

// Update changes the marker durably. On error the directory holds the old marker or the new one; the caller ends the process.
func (d *Dir) Update(change func(*Marker)) (Marker, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.marker
	change(&m)
	if m == d.marker {
		return m, nil
	}
	if err := d.write(m); err != nil {
		return d.marker, err
	}
	d.marker = m
	return m, nil
}

// Close releases the lock.
func (d *Dir) Close() error { return d.lock.Close() }
